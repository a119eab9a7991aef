"""The engine's options. Frozen and passed in: nothing here is global."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum


class TransportName(StrEnum):
    """Which collectives move the shards."""

    AUTO = "auto"
    """The fastest that every rank of the group can use."""
    C10D = "c10d"
    """``torch.distributed`` collectives: NCCL on CUDA, gloo on CPU."""
    COPY_ENGINE = "copy_engine"
    """Peer copies from symmetric memory inside one NVLink domain; CUDA only."""


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
            weight group, and by at least one group; 0 gathers each weight when it is needed.
        resident_bytes: bytes of gathered weights that may stay between forward and backward, on top of the
            ``prefetch_depth + 1`` slots that each shape has anyway.
        pad_for_alignment: a shard's rows are a multiple of this; 0 forbids padding.
        grad_reduction: mean or sum over the shard group.
        fp32_accumulation: sum the ranks' gradients in fp32, in rank order, rounding once; otherwise in the
            gradient's own dtype by the backend's reduce-scatter.
        reduce_once_per_iteration: add the microbatches' weight gradients up locally (at full size) and
            reduce-scatter once, when :func:`etp.wait_async_comms` is called. ``zero_grad()`` before that, of either
            kind, drops what was added up: the iteration was given up.
        reuse_across_forwards: a forward may use a gathered weight that an earlier pass left in its slot. Gathers then
            also run ahead beyond the end of a pass, be it a forward or a backward pass, to what began the next one at
            the same place of the iteration before; an iteration ends with a step of an optimizer or an announced
            change. Safe only if every change of a weight is a step of a ``torch.optim`` optimizer, an in-place
            operation that PyTorch counts, or announced with :meth:`etp.EtpRuntime.mark_weights_changed`; writes
            through ``.data`` are not counted.
        timeout_s: seconds to wait for a collective before an error; None takes the process group's own.

    Raises:
        ValueError: on a value out of range, naming it.
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
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"EtpConfig.timeout_s is {self.timeout_s!r}; it must be > 0 seconds, or None")


def _choice(kind: type[Enum], value: object, field: str) -> Enum:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"EtpConfig.{field} is {value!r}; choose one of {allowed}") from None
