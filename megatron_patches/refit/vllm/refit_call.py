"""The calls of the trainer to an engine's workers, as they arrive over HTTP."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from megatron_patches.refit.control.adapter_names import ADAPTER_NAME
from megatron_patches.refit.control.messages import LONGEST_TIMEOUT_S, Invitation
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.parties.terms import LinkOptions, MemoryMode
from megatron_patches.refit.transports.base import AUTO, named_transport
from megatron_patches.refit.vllm.engine_settings import settings_of

Count = Annotated[int, Meta(ge=0, le=1 << 32)]


@dataclass(kw_only=True)
class RefitCall(WeightTransferInitInfo):
    """One call, from JSON.

    Attributes:
        call: ``admit``, ``join``, ``record``, ``receive``, ``commit``, ``abandon``, ``relay``, ``meet``, ``keep`` or
            ``leave``.
        host: for join, relay and meet: address of the rendezvous.
        port: as ``host``: its port.
        token: secret that all parties of a session share.
        timeout_s: as ``host``: seconds that one step may take after its first party has finished.
        sources: as ``host``: number of sources, such as trainer ranks; the parties with the first numbers. Workers of
            the receiving engine follow.
        transport: as ``host``: name of the transport, or ``auto``.
        staging_bytes: as ``host``: see :class:`megatron_patches.refit.parties.terms.LinkOptions`.
        lease_s: as ``host``: seconds without a message of the trainer after which the worker gives up its step.
        memory: as ``host``: where versions are received; see
            :class:`megatron_patches.refit.parties.terms.MemoryMode`.
        payload: for join: what versions travel as; see :class:`megatron_patches.refit.memory.delta.PayloadKind`.
        key: for relay and meet: secret of the meeting of the engine that takes a version with those that serve it; for
            receive: that secret if the version comes from other engines, otherwise empty.
        first: for relay: number of this engine's first worker among the parties of that meeting.
        version: for receive, commit and relay: number of the weights.
        step: for receive: number of the trainer's next step.
        linked: for receive: whether the trainer's links are up.
        adapter: name of the LoRA adapter that the call is about; empty if it is about the model's weights.
        folder: for join with an adapter: absolute path of the folder for files of its versions.
        versions: for keep, with an adapter: the versions whose files are in use.
    """

    call: Annotated[str, Meta(max_length=256)]
    host: Annotated[str, Meta(pattern=r"^[0-9A-Za-z.:%_-]{0,255}\Z")] = ""
    port: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    token: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    timeout_s: Annotated[float, Meta(ge=0, le=LONGEST_TIMEOUT_S)] = 0.0
    lease_s: Annotated[float, Meta(ge=0, le=LONGEST_TIMEOUT_S)] = 0.0
    sources: Count = 0
    transport: Annotated[str, Meta(max_length=32)] = AUTO
    staging_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    memory: Annotated[str, Meta(max_length=32)] = MemoryMode.BESIDE.value
    payload: Annotated[str, Meta(max_length=32)] = PayloadKind.WHOLE.value
    key: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    first: Count = 0
    version: Annotated[int, Meta(ge=0)] = 0
    step: Annotated[int, Meta(ge=0)] = 0
    linked: bool = False
    adapter: Annotated[str, Meta(pattern=rf"^({ADAPTER_NAME})?\Z")] = ""
    folder: Annotated[str, Meta(max_length=4096)] = ""
    versions: tuple[Annotated[int, Meta(ge=0)], ...] = ()

    def __post_init__(self) -> None:
        joins = self.host and self.port and self.token and self.timeout_s and self.sources
        if self.call == "join" and not joins:
            raise ValueError("to join, a call names host, port, token, timeout_s and sources")
        if self.call == "relay" and not (joins and self.key and self.first):
            raise ValueError("to relay, a call names host, port, token, key, timeout_s, sources and first")
        if self.call == "meet" and not (joins and self.key):
            raise ValueError("to meet, a call names host, port, token, key, timeout_s and sources")
        if self.call == "join" and self.adapter and not self.folder.startswith("/"):
            raise ValueError(f"to join with an adapter, a call names an absolute folder, not {self.folder!r}")

    @property
    def invitation(self) -> Invitation:
        """The invitation to the rendezvous of the call: a meeting of engines if it has a key, else the trainer's."""
        return Invitation(self.host, self.port, self.key or self.token, self.timeout_s)

    def links(self, config: VllmConfig) -> LinkOptions:
        """How all parties there move bytes.

        Args:
            config: vLLM's configuration, with the operator's settings.

        Raises:
            ValueError: if the call has values that this worker does not know.
        """
        return LinkOptions(
            transport=named_transport(self.transport),
            staging_bytes=self.staging_bytes,
            sources=self.sources,
            memory=MemoryMode(self.memory),
            payload=PayloadKind(self.payload),
            nics=settings_of(config.additional_config).nics,
        )


def read_call(content: dict[str, Any]) -> RefitCall:
    """Reads one call.

    Raises:
        ValueError: if it has unknown fields or invalid values.
    """
    unknown = content.keys() - {field.name for field in fields(RefitCall)}
    if unknown:
        raise ValueError(f"Invalid init_info: unknown {', '.join(sorted(map(str, unknown)))[:256]}")
    try:
        return msgspec.convert(content, RefitCall)
    except msgspec.ValidationError as error:
        raise ValueError(f"Invalid init_info: {error}") from error
