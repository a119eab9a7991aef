"""Rules by which a destination converts elements from the trainer's form into its own.

A rule is what the engine's own loader does to each element on the way from a checkpoint, operation by operation. It is
data: recorded on the destination, compared by all parties, and replayed there (``target/replay.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patches.refit.dtypes import holds

CONVERT = "to"
"""The operation that changes the element type and nothing else."""

Scalar = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on each element by itself.

    Attributes:
        operation: :data:`CONVERT`, or name and overload of an ATen operation, such as ``exp.default``.
        dtype: torch's name of the element type of its result.
        arguments: what the operation takes after the elements.
        named: what it takes by name, in the order of names.
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
    """What becomes of the elements of a storage: each goes, changed, to the same index of another.

    Attributes:
        target: name of the memory that they end up in; as long as the storage.
        steps: at least one; their last result has the type that ``target`` keeps.

    Raises:
        ValueError: without steps.
    """

    target: str
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError(f"the rule for {self.target} has no step")

    @property
    def dtype(self) -> str:
        """Element type of ``target``."""
        return self.steps[-1].dtype

    def narrowed_to(self, dtype: str) -> str | None:
        """The first type on the way that cannot hold every value of ``dtype``, or None: such a rule loses nothing.

        Rounding of what an operation computed is no loss of what was sent: the types are held against ``dtype``.
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
        dtype: their type there, which is the trainer's.
        rule: what becomes of them.
    """

    rank: int
    storage: str
    dtype: str
    rule: Rule

    def __str__(self) -> str:
        return f"{self.rule.target} of destination rank {self.rank}: {self.dtype}, {self.rule}"
