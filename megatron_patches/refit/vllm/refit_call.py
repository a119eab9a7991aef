"""The calls of the trainer to an engine's workers, as they arrive over HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from megatron_patches.refit.memory_mode import MemoryMode
from megatron_patches.refit.transports.base import AUTO


@dataclass(kw_only=True)
class RefitCall(WeightTransferInitInfo):
    """One call, from JSON.

    Attributes:
        call: ``join``, ``receive``, ``commit`` or ``abandon``.
        host: to join: address of the rendezvous.
        port: to join: its port.
        token: secret that all parties of a session share. To abandon: empty for whatever session it is.
        parties: to join: number of all parties.
        timeout_s: to join: seconds that one step may take after its first party has finished.
        first_party: to join: number of this engine's worker 0 among all parties.
        sources: to join: number of trainer ranks.
        transport: to join: how packets travel, or ``auto``.
        staging_bytes: to join: see :class:`megatron_patches.refit.parties.terms.LinkOptions`.
        memory: to join: where versions are received; see :class:`megatron_patches.refit.memory_mode.MemoryMode`.
        version: to receive and commit: number of the weights.
        step: to receive: number of the step at which the trainer is.
        linked: to receive: whether the trainer's links are up.
    """

    call: str
    host: str = ""
    port: int = 0
    token: str = ""
    parties: int = 0
    timeout_s: float = 0.0
    first_party: int = 0
    sources: int = 0
    transport: str = AUTO
    staging_bytes: int = 0
    memory: str = MemoryMode.BESIDE.value
    version: int = 0
    step: int = 0
    linked: bool = False
