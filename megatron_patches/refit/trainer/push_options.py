"""How a session pushes, and what it reports of a push."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from megatron_patches.refit.control.lease import DEFAULT_LEASE_S, LEAST_LEASE_S
from megatron_patches.refit.control.messages import LONGEST_TIMEOUT_S
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.layout.weight_format import WeightFormat
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.parties.terms import LinkOptions, MemoryMode
from megatron_patches.refit.trainer.engine_client import PauseMode, SleepMode
from megatron_patches.refit.transports.base import AUTO, TransportName
from megatron_patches.refit.transports.nics import AUTO_NICS, parse_nics

_LEAST_STAGING_BYTES = 4096


class OnEngineFailure(StrEnum):
    """What a push does when an engine fails."""

    RAISE = "raise"
    """It raises on all ranks. The other engines still serve the version."""
    DROP = "drop"
    """It leaves the engine out until it answers again, and reports that."""


class Fate(StrEnum):
    """What became of an engine in a push."""

    SERVES = "serves"
    """It serves the version."""
    SENT = "sent"
    """It has received the version and is committing it."""
    TAKES = "takes"
    """It takes the version from other engines."""
    LAGS = "lags"
    """It is still committing or taking an earlier version, so it misses this one; it stays subscribed."""
    JOINING = "joining"
    """It is joining, and takes part in a later version."""
    JOINED = "joined"
    """It has joined, and takes part in the next version."""
    BACK = "back"
    """It failed before, answers again, and begins to join."""
    FAILED = "failed"
    """It failed; the reason says why. It serves what it served before, or nothing."""
    LEFT = "left"
    """It was detached."""


@dataclass(frozen=True, kw_only=True)
class RefitOptions:
    """Options of a session.

    Attributes:
        transport: how bytes travel. ``shm`` and ``cuda_ipc`` need trainer and engines on one host. None for the
            fastest that reaches all; see :func:`megatron_patches.refit.parties.choosing.choose`.
        staging_bytes: limit of the memory for packets in one process, on either side; every link has two buffers. At
            least 4096. With buffers much smaller than the weights, preparation takes long.
        timeout_s: seconds that a step may take after its first party has finished.
        pause: what happens to requests in flight when the engines pause, which they do for the commit or, in place, for
            the whole push.
        memory: where workers receive new weights: beside the serving ones, or in their memory.
        sleeping: what a push does with an engine that sleeps. To wake it, ``memory`` must be beside.
        payload: what a version travels as: whole, or what changed since the version that an engine serves. For the
            latter, every rank keeps a copy of its weights of the last version, on a GPU if they are there.
        weight_format: the format of the weights that engines receive; the same as that of the engines' own checkpoints.
        host: address at which engines can reach this process.
        allow_narrowing: whether an engine may keep a weight in a dtype that cannot hold every value of the trainer's,
            if its own loader would round a checkpoint in the same way. Otherwise ``RefitSession.prepare`` refuses.
        lease_s: seconds without a message from this process after which engines continue without it: a paused server
            with its old or new weights, a worker that is receiving with the old ones. Also the seconds after which the
            trainer gives up a worker whose process is stopped, or whose machine or network is lost.
        on_engine_failure: what a push does when an engine fails.
        lag_s: with :attr:`OnEngineFailure.DROP`, seconds that a push waits for an engine that is still committing the
            version before; then the engine misses this version.
        fan_out: whether an engine that joins late, comes back or missed a version takes the current one from engines
            that serve it, instead of waiting for the next push. Engines then connect to each other. Not with ``c10d``.
        nics: which network interfaces the trainer's ranks may use for the transport ``nixl``; see
            :func:`megatron_patches.refit.transports.nics.parse_nics`. Engines have a setting of their own.
        fan_out_width: with ``fan_out``, to how many engines a push sends the version. The others take it from these, in
            waves. Later pushes also send to an engine that could not take a version from others. None to send to all.
    """

    transport: TransportName | None = None
    staging_bytes: int = 256 << 20
    timeout_s: float = 300.0
    pause: PauseMode = PauseMode.WAIT
    memory: MemoryMode = MemoryMode.BESIDE
    sleeping: SleepMode = SleepMode.REFUSE
    payload: PayloadKind = PayloadKind.WHOLE
    weight_format: WeightFormat = WeightFormat.TRAINED
    host: str = "127.0.0.1"
    allow_narrowing: bool = False
    lease_s: float = DEFAULT_LEASE_S
    on_engine_failure: OnEngineFailure = OnEngineFailure.RAISE
    lag_s: float = 30.0
    fan_out: bool = False
    nics: str = AUTO_NICS
    fan_out_width: int | None = None

    def __post_init__(self) -> None:
        if self.staging_bytes < _LEAST_STAGING_BYTES:
            raise ValueError(
                f"staging_bytes is {self.staging_bytes}; with less than {_LEAST_STAGING_BYTES}, planning the packets "
                "would take longer than any time-out"
            )
        if not 0 < self.timeout_s <= LONGEST_TIMEOUT_S:
            raise ValueError(
                f"timeout_s is {self.timeout_s}; it must be more than 0 and at most {LONGEST_TIMEOUT_S:.0f} seconds"
            )
        if not LEAST_LEASE_S <= self.lease_s <= LONGEST_TIMEOUT_S:
            raise ValueError(
                f"lease_s is {self.lease_s}; it must be {LEAST_LEASE_S:.0f} to {LONGEST_TIMEOUT_S:.0f} seconds"
            )
        if not 0 <= self.lag_s <= LONGEST_TIMEOUT_S:
            raise ValueError(f"lag_s is {self.lag_s}; it must be 0 to {LONGEST_TIMEOUT_S:.0f} seconds")
        if _is_any(self.host):
            raise ValueError(
                f"host is {self.host}, to which engines cannot connect; it must be the address of this machine at "
                "which they reach it"
            )
        parse_nics(self.nics)
        # A program may pass names, as the flags do; modes are compared by identity.
        transport = None if self.transport in (None, AUTO) else TransportName(self.transport)
        object.__setattr__(self, "transport", transport)
        if self.fan_out and self.transport is TransportName.C10D:
            raise ValueError(
                "fan_out is on and transport is c10d, over which an engine that sends would answer no requests; choose "
                "another transport"
            )
        if self.fan_out_width is not None and not (self.fan_out and self.fan_out_width > 0):
            raise ValueError(
                f"fan_out_width is {self.fan_out_width} and fan_out is {self.fan_out}; the width is a number of "
                "engines, at least 1, and needs fan_out"
            )
        object.__setattr__(self, "pause", PauseMode(self.pause))
        object.__setattr__(self, "memory", MemoryMode(self.memory))
        object.__setattr__(self, "sleeping", SleepMode(self.sleeping))
        if self.memory is MemoryMode.IN_PLACE and self.sleeping is not SleepMode.REFUSE:
            raise ValueError(
                f"memory is in_place and sleeping is {self.sleeping}: an engine that sleeps may have no weights to put "
                "back if a version does not arrive; choose memory beside"
            )
        object.__setattr__(self, "payload", PayloadKind(self.payload))
        object.__setattr__(self, "weight_format", WeightFormat(self.weight_format))
        object.__setattr__(self, "on_engine_failure", OnEngineFailure(self.on_engine_failure))

    def links(self, sources: int, staging_bytes: int) -> LinkOptions:
        """How the parties of one subscription move bytes.

        Args:
            sources: number of its sources.
            staging_bytes: its part of the staging memory.
        """
        return LinkOptions(
            transport=self.transport,
            staging_bytes=staging_bytes,
            sources=sources,
            memory=self.memory,
            payload=self.payload,
            nics=self.nics,
        )


def _is_any(host: str) -> bool:
    """Whether a host is a wildcard address, which clients cannot connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return not host


@dataclass(frozen=True)
class EngineReport:
    """What became of one engine in a push.

    Attributes:
        fate: what became of it.
        seconds: how long each state of its subscription lasted, by name of the state, on this rank.
        nbytes: bytes of weights sent to it by all ranks.
        reason: why it failed; None if it did not.
    """

    fate: Fate
    seconds: Mapping[str, float] = field(default_factory=dict)
    nbytes: int = 0
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """The result of a push.

    Attributes:
        version: number of the weights that were pushed; they serve if the push waited for it.
        nbytes: bytes sent to all destinations together.
        staged_bytes: peak memory of packets in any process of either side; at most the option ``staging_bytes``.
        beside_bytes: most memory that a worker allocated on its device for the new weights, beside the serving ones.
        backup_bytes: most host memory in which a worker keeps the serving weights.
        seconds: duration of each phase on this rank. ``send`` lasts until every byte is verified. If the push waited
            for the commit, ``commit`` lasts until all engines serve the new weights, and ``paused`` is the longest time
            in which an engine began no request, from the call to pause. Parts of ``send``: ``look_up`` of the weights,
            on the slowest rank; and on the slowest worker ``allocate`` memory beside the serving weights, ``move``
            (packing, transfer and unpacking, which overlap, plus any wait for ``look_up``), and ``verify``.
        engines: what became of each engine, by name; equal on all ranks except for ``seconds``.
    """

    version: int
    nbytes: int
    staged_bytes: int
    beside_bytes: int
    backup_bytes: int
    seconds: Mapping[str, float]
    engines: Mapping[str, EngineReport]

    def check_served(self, *, all_must: bool = True) -> None:
        """Raises unless engines serve the version, in a report of a push that waited for it.

        Args:
            all_must: whether each must; otherwise one is enough.

        Raises:
            PartyFailedError: with every engine that does not, and its reason.
        """
        missing = {name: one for name, one in self.engines.items() if one.fate is not Fate.SERVES}
        if len(missing) == len(self.engines) or (missing and all_must):
            reasons = [f"{name}: {one.reason or one.fate.value}" for name, one in missing.items()]
            raise PartyFailedError(f"version {self.version} does not serve: {'; '.join(reasons)}", missing)
