"""The route of a server's guard at which the trainer adds a version of a LoRA adapter that the workers have written.

It uses the server's own list of models, as ``/v1/load_lora_adapter`` does, which is open only with
``VLLM_ALLOW_RUNTIME_LORA_UPDATING``. In the same step it drops the oldest versions, and says which are in use, so that
workers know which files vLLM may still read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from megatron_patches.refit.control.adapter_names import ADAPTER_NAME, version_name
from megatron_patches.refit.vllm.asgi import Message, Receive, Send, answer, read_body

_MOST_BYTES = 8192


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a request; see :class:`megatron_patches.refit.trainer.adapter_engine.AdapterServer`."""

    adapter: Annotated[str, Meta(pattern=rf"^{ADAPTER_NAME}\Z")]
    version: Annotated[int, Meta(ge=0)]
    folder: Annotated[str, Meta(max_length=4096, pattern="^/")]
    keep: Annotated[int, Meta(ge=1)]


async def add_adapter(scope: Message, receive: Receive, send: Send) -> None:
    """Adds a version, and drops those beyond the limit. Answers with the versions of the adapter that are in use."""
    try:
        asked = msgspec.json.decode(await read_body(receive, _MOST_BYTES), type=_Asked)
    except msgspec.MsgspecError as error:
        await answer(send, 400, str(error))
        return
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest

    state = scope["app"].state
    models: Any = state.openai_serving_models
    name, beginning = version_name(asked.adapter, asked.version), f"{asked.adapter}@"
    loaded = await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=name, lora_path=asked.folder))
    if not isinstance(loaded, str):
        await answer(send, 409, f"vLLM does not add {name}: {loaded.error.message}")
        return

    def versions_in(names: Iterable[str | None]) -> list[int]:
        known = [name.removeprefix(beginning) for name in names if name is not None and name.startswith(beginning)]
        return [int(version) for version in known if version.isdecimal()]  # an operator may name others

    served = versions_in(models.lora_requests)
    for old in served[: -asked.keep]:
        await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=version_name(asked.adapter, old)))
    running = versions_in(request.lora_name for request in state.engine_client.output_processor.request_states.values())
    await answer(send, 200, None, versions=sorted({*running, *served[-asked.keep :]}))
