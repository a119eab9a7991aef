"""Rules by which a destination converts elements from the trainer's form into its own.

A rule lists, operation by operation, what the engine's own loader does to each element of a checkpoint. Rules are data:
a destination records them, its plan and the plan's digest contain them, and it replays them (``target/replay.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.boxes import Box
from megatron_patches.refit.layout.dtypes import holds

if TYPE_CHECKING:
    import torch

CONVERT = "to"
"""The operation that only changes the dtype."""

Scalar = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class ElementOp:
    """One elementwise operation.

    Attributes:
        operation: :data:`CONVERT`, or name and overload of an ATen operation, such as ``exp.default``.
        dtype: torch's name of the result's dtype.
        arguments: positional arguments after the elements.
        named: keyword arguments, sorted by name.
    """

    operation: str
    dtype: str
    arguments: tuple[Scalar, ...] = ()
    named: tuple[tuple[str, Scalar], ...] = ()

    def __str__(self) -> str:
        if self.operation == CONVERT:
            return f"to {self.dtype}"
        given = [*map(repr, self.arguments), *(f"{name}={value!r}" for name, value in self.named)]
        name = self.operation.removesuffix(".default")
        return f"{name}({', '.join(given)})" if given else name


@dataclass(frozen=True, slots=True)
class Rule:
    """How the elements of a storage are converted: each goes to the same index of another memory.

    Attributes:
        target: name of the memory that receives the results; as long as the storage.
        steps: at least one; the last result has the dtype of ``target``.

    Raises:
        ValueError: if there are no steps.
    """

    target: str
    steps: tuple[ElementOp, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError(f"the rule for {self.target} has no step")

    @property
    def dtype(self) -> str:
        """Dtype of ``target``."""
        return self.steps[-1].dtype

    def narrowed_to(self, dtype: str) -> str | None:
        """The first dtype of the steps that cannot hold every value of ``dtype``; None if the rule loses nothing.

        Only dtypes are compared: rounding of an operation's result is not a loss of what was sent.
        """
        return next((step.dtype for step in self.steps if not holds(step.dtype, dtype)), None)

    def __str__(self) -> str:
        return ", ".join(map(str, self.steps))


@dataclass(frozen=True, slots=True)
class Conversion:
    """A rule of one destination.

    Attributes:
        rank: the destination.
        storage: name of the storage that elements arrive in.
        dtype: their dtype there, which is the trainer's.
        rule: how they are converted.
    """

    rank: int
    storage: str
    dtype: str
    rule: Rule

    def __str__(self) -> str:
        return f"{self.rule.target} of destination rank {self.rank}: {self.dtype}, {self.rule}"


def check_none_overflowed(values: torch.Tensor, converted: torch.Tensor, box: Box) -> None:
    """Checks that a conversion has made no finite number infinite. Rounding is no error.

    Args:
        values: elements of a floating-point dtype.
        converted: the same in another one; may be on another device.
        box: the elements, for the message.

    Raises:
        RefitError: with the first such number.
    """
    infinite = converted.isinf()
    if not infinite.any():
        return
    lost = infinite.to(values.device) & values.isfinite()
    if lost.any():
        dtype = str(converted.dtype).removeprefix("torch.")
        raise RefitError(
            f"{box} has a weight of {float(values[lost][0])}, which is too large for {dtype}; take bfloat16 or float32"
        )
