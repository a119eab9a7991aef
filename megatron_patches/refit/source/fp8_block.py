"""Wraps a source so that it gives its weights in block FP8, quantized once per push for all engines."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.layout.weight_format import WeightFormat, quantization_config, with_scales
from megatron_patches.refit.source.block_quantizer import BlockQuantizer
from megatron_patches.refit.source.gemm_scales import why_other_numbers, why_other_scales
from megatron_patches.refit.source.live import MegatronSource
from megatron_patches.refit.source.weight_source import settled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from megatron_patches.refit.control.exchange import Exchange
    from megatron_patches.refit.control.messages import Held
    from megatron_patches.refit.memory.ports import FlatMemory
    from megatron_patches.refit.source.weight_source import WeightSource

logger = logging.getLogger(__name__)


class Fp8BlockSource:
    """Another source's weights in block FP8; a :class:`megatron_patches.refit.source.weight_source.WeightSource`.

    A push begins to quantize in :meth:`settle`. What goes wrong there is raised by :meth:`look_up`: a rank that left
    before the collective would keep the others waiting. On a GPU, a stream of its own quantizes while the push goes on.
    So the source is a :class:`megatron_patches.refit.memory.ports.Writing` too: readers wait for what they read, and a
    weight that is not a number is found at the end, by :meth:`confirm`.

    Args:
        source: the weights as they are trained.
        weight_format: a quantized format.
        exchange: all ranks that hold parts of the model.
    """

    def __init__(self, source: WeightSource, weight_format: WeightFormat, exchange: Exchange) -> None:
        self._source, self._format, self._exchange = source, weight_format, exchange
        self._quantizer: BlockQuantizer | None = None
        self._memory: FlatMemory = {}
        self._failure: Exception | None = None
        self._stream: torch.cuda.Stream | None = None  # once it is needed
        self._told = False  # whether the first rank has said that GEMMs quantize otherwise

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._source.device

    def describe(self, rank: int) -> Held:
        """Describes the other source's weights as they are once quantized, and their scales.

        Raises:
            RefitError: as the other source, and as :class:`BlockQuantizer`.
            UnsupportedModelError: if a Megatron model is trained in block FP8 with the other kind of scales.
        """
        self._quantizer, self._memory = None, {}  # their memory is needed again
        held = self._source.describe(rank)
        if isinstance(self._source, MegatronSource):
            self._compare(self._source.trained, rank)
        self._quantizer = BlockQuantizer(
            held.shapes,
            held.manifest,
            power_of_two=self._format.has_powers_of_two,
            device=self.device,
            exchange=self._exchange,
        )
        config = held.config and held.config | {"quantization_config": quantization_config(held.shapes)}
        return replace(held, config=config, shapes=with_scales(held.shapes), manifest=self._quantizer.manifest)

    def _compare(self, trained: object, rank: int) -> None:
        """Compares this format with that of the trainer's GEMMs."""
        if why := why_other_scales(trained, self._format, "weight_format"):
            raise UnsupportedModelError(why)
        known = why_other_numbers(trained, self._format, "weight_format")
        if known and rank == 0 and not self._told:
            logger.warning("refit: %s", known)
            self._told = True

    def settle(self) -> None:
        """Begins to quantize the current weights, after what the current stream has to do. Collective."""
        look_up, self._failure = settled(self._source), None
        if self._quantizer is not None:
            with self._on_stream():
                self._quantize(self._quantizer, look_up)

    def _quantize(self, quantizer: BlockQuantizer, look_up: Callable[[], FlatMemory]) -> None:
        memory: FlatMemory = {}
        try:
            memory = look_up()
            quantizer.measure(memory)
        except Exception as error:  # noqa: BLE001 - raised by look_up()
            self._failure = error
        quantizer.agree()
        if self._failure is not None:
            return
        try:
            quantizer.cast(memory)
        except Exception as error:  # noqa: BLE001 - as above
            self._failure = error
        else:
            kept = {name: memory[name] for name in quantizer.kept}
            self._memory = {**kept, **quantizer.quantized}

    def look_up(self) -> FlatMemory:
        """What :meth:`settle` quantizes, and the memory of all other weights.

        Raises:
            Exception: why that failed.
        """
        if self._failure is not None:
            raise self._failure
        return self._memory

    def await_written(self, ends: Mapping[str, int]) -> None:
        """See :class:`megatron_patches.refit.memory.ports.Writing`."""
        if self._quantizer is not None:
            self._quantizer.await_written(ends)

    def confirm(self) -> None:
        """Waits until the weights are quantized.

        Raises:
            RefitError: if a weight is infinite or not a number.
        """
        if self._quantizer is not None:
            self._quantizer.check()

    def finish(self) -> None:
        """Makes the current stream wait until the weights are quantized, so that they may change again, or be freed."""
        self._memory = {}
        if self._quantizer is not None and self._failure is None:
            self._quantizer.complete()
        if self._stream is not None:
            import torch

            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def stream(self) -> torch.cuda.Stream:
        """The stream on which a GPU quantizes."""
        import torch

        self._stream = self._stream or torch.cuda.Stream(self.device)
        return self._stream

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Makes this stream the current one, after the work of the current one."""
        if self.device.type != "cuda":
            return nullcontext()
        import torch

        self.stream().wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream())
