"""The errors of refit. Each message names the tensor, box, rank or file concerned, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class RefitError(RuntimeError):
    """Base of every error that refit raises on purpose."""


class UnsupportedModelError(RefitError):
    """The model, or what an engine's loader does with it, cannot be expressed, split or read."""


class UnmappedParameterError(RefitError):
    """A parameter of the trainer or of an engine has no Hugging Face tensor, or a tensor has no parameter."""


class CoverageError(RefitError):
    """No rank holds some part of what a destination wants."""


class ProofError(RefitError):
    """A plan would leave an element unwritten, write one twice, read padding, or change a dtype unasked."""


class PlanMismatchError(RefitError):
    """Two parties computed different plans."""


class DigestError(RefitError):
    """What was read back differs from what was sent."""


class TransferError(RefitError):
    """What arrived, or the memory that it should go to, differs from the plan."""


class StaleVersionError(RefitError):
    """A version other than the one being received, or one that is not newer than what an engine has served."""


class StagingError(RefitError):
    """Packets would exceed their memory limit."""


class ExportError(RefitError):
    """An export failed on some rank. Nothing that looks like a checkpoint was left behind."""


class CheckpointReadError(ExportError):
    """One rank found a Megatron checkpoint damaged or incomplete; other ranks may not know."""


class LoadError(RefitError):
    """A Hugging Face checkpoint cannot be read, or does not fit the model that is to be loaded from it."""


class PartyFailedError(RefitError):
    """Another party of the refit failed, left, or did not answer in time. Carries its reason.

    Attributes:
        engines: names of the engines that failed, if any.
        digests_differ: whether a party failed with a :class:`DigestError`.
    """

    def __init__(self, message: str, engines: Iterable[str] = (), *, digests_differ: bool = False) -> None:
        super().__init__(message)
        self.engines, self.digests_differ = tuple(engines), digests_differ


class ModelMismatchError(RefitError):
    """Trainer and engine have settings that make them different models, even with the same weights."""


class UnsupportedEngineError(RefitError):
    """An engine has options with which new weights would not reach everything that serves."""


class LostWeightsError(RefitError):
    """A worker cannot restore the old weights, or does not know what others serve; its engine must not continue."""


def first_of(texts: Sequence[str], separator: str = ", ") -> str:
    """The first three of some texts, for a message, and how many more there are."""
    more = len(texts) - 3
    return separator.join(texts[:3]) + (f"{separator.strip(', ')} and {more} more" if more > 0 else "")
