"""The engine's options. Frozen and passed in: nothing here is global."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, StrEnum


class TransportName(StrEnum):
    """Which collectives move the shards."""

    AUTO = "auto"
    """The fastest that every rank of the group can use."""
    C10D = "c10d"
    """``torch.distributed`` collectives: NCCL on CUDA, gloo on CPU."""
    COPY_ENGINE = "copy_engine"
    """Peer copies from symmetric memory between the GPUs of one host, which need peer access (NVLink)."""
    HIERARCHICAL = "hierarchical"
    """For groups that span hosts: ``c10d`` between hosts, and within each host what ``auto`` selects there."""


class GradReduction(StrEnum):
    """How gradients combine over the shard group."""

    MEAN = "mean"
    """Each rank's loss is a mean over its own data: average."""
    SUM = "sum"
    """Losses are sums that the caller normalises later (Megatron's per-token loss): add."""


@dataclass(frozen=True, kw_only=True)
class EtpConfig:
    """Options of one :class:`etp.EtpRuntime`.

    Attributes:
        transport: which collectives move the shards.
        prefetch_depth: gathers run ahead of compute by up to this many times the bytes of the chain's largest
            weight group, and by at least one group, among the next 8 visits (or this many, if that is more); 0 gathers
            each weight when it is needed.
        resident_bytes: bytes of gathered weights that may stay in memory between forward and backward, in addition to
            the ``prefetch_depth + 1`` slots of each shape.
        pad_for_alignment: a shard's rows are a multiple of this; 0 forbids padding.
        grad_reduction: mean or sum over the shard group.
        fp32_accumulation: sum the ranks' gradients in fp32, in rank order, rounding once; otherwise in the
            gradient's own dtype by the backend's reduce-scatter. ``copy_engine`` always sums shards' gradients in fp32.
            ``hierarchical`` sums those of a host's ranks first, and then those of the hosts.
        reduce_once_per_iteration: add the microbatches' weight gradients locally (at full size) and reduce-scatter
            once, when :func:`etp.wait_async_comms` is called. Calling ``zero_grad()`` before that, with either value
            of ``set_to_none``, discards the sums. So does a backward pass that raises. An optimizer step before that is
            refused, and so is a change of ``grad``, which would not reach the sums.
        reuse_across_forwards: a forward may use a gathered weight that an earlier pass left in its slot. Prefetching
            then also continues across the end of a pass, forward or backward, with the weights that began the
            corresponding next pass of the previous iteration; an iteration ends with an optimizer step or an announced
            change. Safe only if every change of a weight is a step of a ``torch.optim`` optimizer, an in-place
            operation that PyTorch counts, or announced with :meth:`etp.EtpRuntime.mark_weights_changed`. PyTorch does
            not count writes by ``torch.distributed``, through NumPy, or through a tensor that was assigned to a
            weight's ``data``. Steps of all optimizers in the process count, so those of other models must also happen
            on all ranks or on none.
        timeout_s: seconds to wait for a collective before raising an error or, with CUDA, ending the process; None uses
            the process group's timeout.

    Raises:
        ValueError: for a value out of range, naming the option.
    """

    transport: TransportName = TransportName.AUTO
    prefetch_depth: int = 1
    resident_bytes: int = 0
    pad_for_alignment: int = 16
    grad_reduction: GradReduction = GradReduction.MEAN
    fp32_accumulation: bool = True
    reduce_once_per_iteration: bool = False
    reuse_across_forwards: bool = False
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "transport", _choice(TransportName, self.transport, "transport"))
        object.__setattr__(self, "grad_reduction", _choice(GradReduction, self.grad_reduction, "grad_reduction"))
        for name in ("prefetch_depth", "resident_bytes", "pad_for_alignment"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"EtpConfig.{name} is {value!r}; it must be an integer >= 0")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise ValueError(f"EtpConfig.timeout_s is {self.timeout_s!r}; it must be > 0 seconds and finite, or None")


def _choice(kind: type[Enum], value: object, field: str) -> Enum:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"EtpConfig.{field} is {value!r}; choose one of {allowed}") from None
