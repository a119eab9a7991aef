"""The trainer's calls to an engine's workers, as they arrive over HTTP, and what the engine's operator allows."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, fields
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from megatron_patches.refit.control.adapter_names import ADAPTER_NAME
from megatron_patches.refit.control.messages import LONGEST_TIMEOUT_S, Invitation
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.parties.terms import LinkOptions, MemoryMode
from megatron_patches.refit.transports.base import TransportName
from megatron_patches.refit.transports.nics import AUTO_NICS, parse_nics

SECTION = "etp"
UNGUARDED = f'{{"{SECTION}": {{"unguarded": true}}}}'
"""Value of ``--additional-config`` for a server that accepts commands from any client that reaches it."""


class EngineSettings(msgspec.Struct, forbid_unknown_fields=True):
    """An operator's settings of one engine, in ``--additional-config '{"etp": {...}}'``.

    vLLM's ``--weight-transfer-config`` accepts no additional fields.

    Attributes:
        trainers: addresses to which workers may connect when a trainer asks them to: IP addresses, networks such as
            ``10.0.0.0/24``, or names as trainers give them (``--refit-host``). None allows any trainer that has shown
            the secret.
        unguarded: whether workers join trainers although the server runs without
            :class:`megatron_patches.refit.vllm.guard.RefitGuard`, so that any client that reaches it can make them.
        nics: which network interfaces this engine's workers may use for the transport ``nixl``; see
            :func:`megatron_patches.refit.transports.nics.parse_nics`.
    """

    trainers: list[str] | None = None
    unguarded: bool = False
    nics: str = AUTO_NICS

    def check_trainer(self, host: str) -> None:
        """Refuses a trainer's address that is not allowed.

        Raises:
            RefitError: with the address.
        """
        if self.trainers is not None and not any(_allows(entry, host) for entry in self.trainers):
            raise RefitError(
                f"asked to connect to a trainer at {host}, which is not among those that this engine was started with "
                f"({', '.join(self.trainers) or 'none'}); add it to the trainers in --additional-config "
                f'\'{{"{SECTION}": {{"trainers": [...]}}}}\''
            )


def settings_of(additional_config: Any) -> EngineSettings:
    """The settings in vLLM's ``additional_config``.

    Raises:
        RefitError: if the section is invalid.
    """
    section = additional_config.get(SECTION, {}) if isinstance(additional_config, dict) else {}
    try:
        settings = msgspec.convert(section, EngineSettings)
        for entry in settings.trainers or ():
            _parsed(entry)
        parse_nics(settings.nics)
    except (msgspec.ValidationError, ValueError) as error:
        raise RefitError(f"--additional-config: {SECTION}: {error}") from error
    return settings


def _allows(entry: str, host: str) -> bool:
    allowed = _parsed(entry)
    if isinstance(allowed, str):
        return allowed == host.lower()
    try:
        return ipaddress.ip_address(host) in allowed
    except ValueError:  # host is a name, which may resolve to any address
        return False


def _parsed(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | str:
    """A network or a name.

    Raises:
        ValueError: if the entry is neither.
    """
    try:
        return ipaddress.ip_network(entry)
    except ValueError:
        if "/" in entry:
            raise
    if not re.fullmatch(r"[0-9A-Za-z._-]+|[0-9A-Fa-f:]+%[0-9A-Za-z._-]+", entry):
        raise ValueError(
            f"trainer {entry!r} must be like 10.0.0.5, 10.0.0.0/24 or trainer-0; trainers choose their ports"
        )
    return entry.lower()


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
        transport: as ``host``: the transport; None for the fastest that reaches all parties.
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
    transport: TransportName | None = None
    staging_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    memory: MemoryMode = MemoryMode.BESIDE
    payload: PayloadKind = PayloadKind.WHOLE
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
        """
        return LinkOptions(
            transport=self.transport,
            staging_bytes=self.staging_bytes,
            sources=self.sources,
            memory=self.memory,
            payload=self.payload,
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
