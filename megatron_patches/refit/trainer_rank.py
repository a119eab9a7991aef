"""What the subscriptions of one trainer rank have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.parties.messages import Held
from megatron_patches.refit.telemetry import Telemetry

if TYPE_CHECKING:
    import torch

    from megatron_patches.refit.ports import Memory
    from megatron_patches.refit.source.weight_source import WeightSource


@dataclass(frozen=True)
class Trainer:
    """One rank of the trainer.

    Attributes:
        rank: rank of this process.
        name: name of this process, for messages.
        device: device of its weights: ``cpu``, or torch's name of a GPU.
        stream: CUDA stream on which subscriptions work; None on a CPU.
        describe: describes what this rank holds.
        telemetry: receives, on the first rank, what each version cost.
    """

    rank: int
    name: str
    device: str
    stream: torch.cuda.Stream | None
    describe: Callable[[], Held]
    telemetry: Telemetry

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Makes the stream, which follows what writes the weights, the calling thread's own."""
        import torch

        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.stream is not None:
                stack.enter_context(torch.cuda.device(self.stream.device))
                stack.enter_context(torch.cuda.stream(self.stream))
            yield


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

        def look_up() -> Memory:
            raise failure

        return Once(look_up)
    return Once(source.look_up)
