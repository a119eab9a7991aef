"""What the subscriptions of one trainer rank have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_patches.refit.control.messages import Held
from megatron_patches.refit.trainer.telemetry import Telemetry

if TYPE_CHECKING:
    import torch


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
