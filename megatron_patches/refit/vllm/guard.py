r"""ASGI middleware that protects a vLLM server: only a client that shows its secret can change it.

::

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server ... \
        --middleware megatron_patches.refit.vllm.guard.RefitGuard

Routes for inference and routes that only report the server's state stay as vLLM has them. Every other route, including
all that ``VLLM_SERVER_DEV_MODE`` opens and any that a later vLLM adds, answers 401 to a request without the secret
(:mod:`megatron_patches.refit.control.secret`), before the body is read. Give this middleware last, because the last one
sees a request first.

It also grants leases, so that no server waits for ever for a trainer that has paused it
(:mod:`megatron_patches.refit.vllm.pause_lease`). If the server has an API key, the routes that this package adds demand
it too.

Workers join no trainer until their server's guard has admitted it. See
:class:`megatron_patches.refit.vllm.refit_call.EngineSettings` for running without a guard.
"""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from megatron_patches.refit.control import lease
from megatron_patches.refit.control.adapter_names import ADAPTER_NAME, ADAPTER_ROUTE, version_name
from megatron_patches.refit.control.credentials import API_KEY_VARIABLE
from megatron_patches.refit.control.secret import SECRET_HEADER, Secret, read_or_make_secret
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.vllm.asgi import GUARDED, App, Message, Receive, Send, answer, read_body
from megatron_patches.refit.vllm.pause_lease import PauseLease
from megatron_patches.refit.vllm.plugin import ENGINE_NAME

logger = logging.getLogger(__name__)

# Prefixes of the routes that vLLM's own API key guards.
_PUBLIC_PREFIXES = ("/v1/", "/v2/", "/inference/")
_PUBLIC = frozenset(
    {
        *("/health", "/ping", "/version", "/load", "/metrics", "/metrics/"),
        *("/tokenize", "/detokenize", "/tokenizer_info", "/invocations", "/generative_scoring"),
        *("/pooling", "/classify", "/score", "/rerank"),
    }
)
# These change the model that answers.
_NOT_PUBLIC = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})


_OWN = frozenset({f"/{lease.ROUTE}", f"/{ADAPTER_ROUTE}"})
"""The routes that this package adds."""
_MOST_BYTES = 8192


class RefitGuard:
    """See the module's docstring.

    Args:
        app: the wrapped server.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._secret: Secret | None = None
        self._refusal = ""
        self._admitted = False
        self._lease = PauseLease(app)
        try:
            self._secret = read_or_make_secret()
        except RefitError as error:  # an exception here would only show at the first request
            self._refusal = str(error)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
        elif is_public(scope):
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # not accepted yet, so uvicorn answers 403
        else:
            await self._guard(scope, receive, send)

    async def _start(self, scope: Message, receive: Receive, send: Send) -> None:
        """Logs where the secret is. Without a secret, the server must not start."""
        if self._secret is None:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": f"refit: {self._refusal}"})
            return
        logger.info("refit: weights can be replaced by whoever shows the secret of %s", self._secret.origin)
        await self._app(scope, receive, send)

    async def _guard(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        route = route_of(scope)
        shown = [value for name, value in headers if name == SECRET_HEADER.encode()]
        if self._secret is None or len(shown) != 1 or not self._secret.is_shown_by(shown[0]):
            logger.warning("refit: refused %s of %s, who did not show the secret", scope["path"], scope.get("client"))
            await answer(send, 401, f"{SECRET_HEADER}: show this server's secret")
        elif route in _OWN and not _has_key(scope, dict(headers)):
            logger.warning("refit: refused %s of %s, who did not show the API key", route, scope.get("client"))
            why = f"authorization: show this server's API key; a trainer sends that in {API_KEY_VARIABLE}"
            await answer(send, 401, why, scheme="Bearer")
        else:
            await self._serve(route, dict(headers), scope, receive, send)

    async def _serve(
        self, route: str, headers: dict[bytes, bytes], scope: Message, receive: Receive, send: Send
    ) -> None:
        """Answers, or passes on, what somebody asks who may."""
        if not _is_json(headers):
            await answer(send, 415, "content-type: a body must be application/json")
            return
        if route == f"/{lease.ROUTE}":
            await self._lease.request(scope, receive, send)
            return
        pauses, resumes = (
            headers.get(name.encode(), b"").decode(errors="replace") for name in (lease.LEASE_HEADER, lease.RESUMES)
        )
        ended = self._lease.why_ended(pauses) or self._lease.why_not_resumed(resumes)
        if ended is not None:
            await answer(send, 410, ended)
            return
        if route == f"/{ADAPTER_ROUTE}":
            await add_adapter(scope, receive, send)
            return
        if route == "/start_draft_weight_update" and _is_ours(scope):
            await answer(send, 501, "draft models are not updated: trainers describe and send the main model only")
            return
        if route == "/init_weight_transfer_engine":
            await self._admit(scope)
        await self._app(scope, receive, _marked(send))

    async def _admit(self, scope: Message) -> None:
        """Tells the workers, once, that their callers know the secret."""
        if self._admitted or not _is_ours(scope):
            return
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await scope["app"].state.engine_client.init_weight_transfer_engine(
            WeightTransferInitRequest(init_info={"call": "admit"})
        )
        self._admitted = True


def is_public(scope: Message) -> bool:
    """Whether a request changes nothing and needs no secret."""
    route = route_of(scope)
    return route in _PUBLIC or (route.startswith(_PUBLIC_PREFIXES) and route not in _NOT_PUBLIC)


def route_of(scope: Message) -> str:
    """The path by which the server chooses a route, without the prefix of ``--root-path``."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if path == root or path.startswith(f"{root}/") else path


def _has_key(scope: Message, headers: dict[bytes, bytes]) -> bool:
    """Whether a request shows an API key of the server, if it has any: as vLLM demands it for inference."""
    arguments = getattr(getattr(scope.get("app"), "state", None), "args", None)
    keys = getattr(arguments, "api_key", None) or [os.environ.get(API_KEY_VARIABLE)]
    known = [key.encode() for key in keys if key]
    scheme, _, shown = headers.get(b"authorization", b"").partition(b" ")
    matches = [hmac.compare_digest(shown, key) for key in known]  # all, so that the time says nothing
    return not known or (scheme.lower() == b"bearer" and any(matches))


def _is_ours(scope: Message) -> bool:
    """Whether the server's weights are replaced by this package."""
    config = scope["app"].state.engine_client.vllm_config.weight_transfer_config
    return config is not None and config.backend == ENGINE_NAME


def _is_json(headers: dict[bytes, bytes]) -> bool:
    """Whether the request has no body, or declares it as JSON."""
    if b"transfer-encoding" not in headers and headers.get(b"content-length", b"0").strip() == b"0":
        return True
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == b"application/json"


def _marked(send: Send) -> Send:
    """Adds the header to an answer that shows a trainer that there is a guard."""

    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), GUARDED]}
        await send(message)

    return marked


class _NewVersion(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a request; see :class:`megatron_patches.refit.trainer.engine_client.AdapterServer`."""

    adapter: Annotated[str, Meta(pattern=rf"^{ADAPTER_NAME}\Z")]
    version: Annotated[int, Meta(ge=0)]
    folder: Annotated[str, Meta(max_length=4096, pattern="^/")]
    keep: Annotated[int, Meta(ge=1)]


async def add_adapter(scope: Message, receive: Receive, send: Send) -> None:
    """Adds a version of a LoRA adapter that the workers have written, and drops those beyond the limit.

    It uses the server's own list of models, as ``/v1/load_lora_adapter`` does, which is open only with
    ``VLLM_ALLOW_RUNTIME_LORA_UPDATING``. It answers with the versions of the adapter that are in use, so that workers
    know which files vLLM may still read.
    """
    try:
        asked = msgspec.json.decode(await read_body(receive, _MOST_BYTES), type=_NewVersion)
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
