"""How a session pushes, and what it reports of a push."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_patches.refit.engines import PauseMode
from megatron_patches.refit.lease import DEFAULT_LEASE_S, LEAST_LEASE_S
from megatron_patches.refit.memory_mode import MemoryMode
from megatron_patches.refit.rendezvous_messages import LONGEST_TIMEOUT_S
from megatron_patches.refit.transports.base import TransportName, named_transport

_LEAST_STAGING_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class RefitOptions:
    """Options of a session.

    Attributes:
        transport: how bytes travel; ``shm`` and ``cuda_ipc`` need trainer and engines on one host. None for the
            fastest that reaches all; see :func:`megatron_patches.refit.parties.choosing.choose`.
        staging_bytes: the most memory that packets take in one process, on either side; every link has two buffers.
            At least 4096; with buffers much smaller than the weights, preparation takes long.
        timeout_s: seconds that a step may take after its first party has finished.
        pause: what happens to requests in flight when the engines pause, which they do for the commit, or in place for
            the whole push.
        memory: where workers receive new weights: beside those that serve, or in their memory.
        host: address at which engines can reach this process.
        allow_narrowing: whether an engine may keep a weight in a type that cannot hold every value of the trainer's,
            where its own loader would round a checkpoint alike; otherwise :meth:`RefitSession.prepare` refuses.
        lease_s: seconds after which engines that hear nothing of this process go on without it: a paused server with
            its old or new weights, a worker that receives with the old ones.
    """

    transport: TransportName | None = None
    staging_bytes: int = 256 << 20
    timeout_s: float = 300.0
    pause: PauseMode = PauseMode.WAIT
    memory: MemoryMode = MemoryMode.BESIDE
    host: str = "127.0.0.1"
    allow_narrowing: bool = False
    lease_s: float = DEFAULT_LEASE_S

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
        if _is_any(self.host):
            raise ValueError(
                f"host is {self.host}, to which engines cannot connect; it must be the address of this machine at "
                "which they reach it"
            )
        # A program may give their names, as the flags do; which mode it is, is asked by identity.
        object.__setattr__(self, "transport", None if self.transport is None else named_transport(self.transport))
        object.__setattr__(self, "pause", PauseMode(self.pause))
        object.__setattr__(self, "memory", MemoryMode(self.memory))


def _is_any(host: str) -> bool:
    """Whether a host stands for all addresses of a machine, and is none to connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return not host


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """The result of a push.

    Attributes:
        version: number of the weights that were pushed; they serve if the push waited for it.
        nbytes: bytes that all destinations together were sent.
        staged_bytes: the most memory that packets took at a time in any process, of either side; at most the
            option ``staging_bytes``.
        beside_bytes: the most memory that a worker made on its device for the new weights, beside those that serve.
        backup_bytes: the most memory of its host in which a worker keeps the weights that serve.
        seconds: duration of each phase on this rank: ``send`` until every byte was verified and, where the push
            waited for it, ``commit`` until all engines serve the new weights, and ``paused``, the longest that one of
            them began no request, from when it was asked to pause. Of ``send``, on the slowest rank, ``look_up``
            of the weights, and on the slowest worker ``allocate`` memory beside the weights that serve, ``move``
            (packing, the way and unpacking, which overlap, and what of ``look_up`` it has to wait for), and ``verify``.
    """

    version: int
    nbytes: int
    staged_bytes: int
    beside_bytes: int
    backup_bytes: int
    seconds: Mapping[str, float]
