"""What a session needs of a rank's weights, whatever holds them, and which source a model needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from megatron_patches.refit.control.messages import Held
from megatron_patches.refit.memory.ports import FlatMemory
from megatron_patches.refit.source.live import MegatronSource
from megatron_patches.refit.source.modules import ModuleSource

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class WeightSource(Protocol):
    """This rank's part of a model. No method but :meth:`settle` waits for another rank."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    def describe(self, rank: int) -> Held:
        """Describes what this rank holds now, and the whole model.

        Args:
            rank: this rank's source rank.

        Raises:
            RefitError: if a weight has no Hugging Face name, or cannot be described.
        """

    def settle(self) -> None:
        """Completes what changes the weights, such as a gather under way. All ranks call it before each push.

        What it raises fails the push on all ranks.
        """

    def look_up(self) -> FlatMemory:
        """The current memory of the storages that :meth:`describe` listed, by name.

        Raises:
            RefitError: if the weights differ from the description, or one has no memory now.
        """


def source_of(
    model: torch.nn.Module | Sequence[torch.nn.Module] | WeightSource,
    vocab_size: int | None,
    config: Mapping[str, Any] | None,
    tp_group: ProcessGroup | None,
) -> WeightSource:
    """The source for a model: Megatron's if ``vocab_size`` is given, otherwise that of a module with its own names.

    Args:
        model: a module; for Megatron, one per virtual pipeline stage. Or a source, which is returned.
        vocab_size: for Megatron, number of tokens.
        config: for other modules, content of ``config.json``; see :class:`ModuleSource`.
        tp_group: for Megatron, tensor-parallel group; None for Megatron's own.

    Raises:
        ValueError: if the arguments are of different kinds of models.
        UnsupportedModelError: see :class:`ModuleSource`.
    """
    from torch import nn

    if not isinstance(model, nn.Module | Sequence):
        return model
    if vocab_size is not None:
        if config is not None:
            raise ValueError(
                f"config is given, and vocab_size is {vocab_size}; the configuration of a model of Megatron follows "
                "from the model"
            )
        return MegatronSource([model] if isinstance(model, nn.Module) else model, vocab_size, tp_group)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__} of chunks, as Megatron has them; pass vocab_size too")
    if tp_group is not None:
        raise ValueError("tp_group is given without vocab_size; only models of Megatron have a tensor-parallel group")
    return ModuleSource(model, config)


class Once:
    """A value that several threads share, computed by whichever asks first. An error is raised to all."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute, self._lock = compute, threading.Lock()
        self._found: Future[Any] = Future()

    def compute(self) -> BaseException | None:
        """Computes the value now, if nobody has. Returns why that failed; None if it did not."""
        with self._lock:
            if not self._found.done():
                try:
                    self._found.set_result(self._compute())
                except Exception as error:  # noqa: BLE001 - returned, and raised to all who ask for the value
                    self._found.set_exception(error)
        return self._found.exception()

    def __call__(self) -> Any:
        """The value."""
        self.compute()
        return self._found.result()


def settled(source: WeightSource) -> Once:
    """Settles this rank's weights. What goes wrong is raised by what looks them up, for which the other ranks wait."""
    try:
        source.settle()
    except Exception as error:  # noqa: BLE001 - raised below
        failure = error  # Python deletes ``error`` after this block

        def look_up() -> FlatMemory:
            raise failure

        return Once(look_up)
    return Once(source.look_up)
