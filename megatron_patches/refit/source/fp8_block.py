"""Wraps a source so that it gives its weights in block FP8, quantized once per push for all engines."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from megatron_patches.refit.source.block_quantizer import BlockQuantizer
from megatron_patches.refit.source.live import memory_of
from megatron_patches.refit.weight_format import WeightFormat, quantization_config, with_scales

if TYPE_CHECKING:
    import torch

    from megatron_patches.refit.exchange import Exchange
    from megatron_patches.refit.parties.messages import Held
    from megatron_patches.refit.ports import Memory
    from megatron_patches.refit.source.weight_source import WeightSource


class Fp8BlockSource:
    """Another source's weights in block FP8; a :class:`megatron_patches.refit.source.weight_source.WeightSource`.

    A push quantizes in :meth:`settle`. What goes wrong there is raised by :meth:`look_up`: a rank that left before the
    collective would keep the others waiting.

    Args:
        source: the weights as they are trained.
        weight_format: a quantized format.
        exchange: all ranks that hold parts of the model.
    """

    def __init__(self, source: WeightSource, weight_format: WeightFormat, exchange: Exchange) -> None:
        self._source, self._format, self._exchange = source, weight_format, exchange
        self._quantizer: BlockQuantizer | None = None
        self._memory: Memory = {}
        self._failure: Exception | None = None

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._source.device

    def describe(self, rank: int) -> Held:
        """Describes the other source's weights as they are once quantized, and their scales.

        Raises:
            RefitError: as the other source, and as :class:`BlockQuantizer`.
        """
        self._quantizer, self._memory = None, {}  # their memory is needed again
        held = self._source.describe(rank)
        self._quantizer = BlockQuantizer(
            held.shapes,
            held.manifest,
            power_of_two=self._format.has_powers_of_two,
            device=self.device,
            exchange=self._exchange,
        )
        config = held.config and held.config | {"quantization_config": quantization_config(held.shapes)}
        return replace(held, config=config, shapes=with_scales(held.shapes), manifest=self._quantizer.manifest)

    def settle(self) -> None:
        """Quantizes the current weights. Collective."""
        self._source.settle()
        quantizer, self._failure = self._quantizer, None
        if quantizer is None:
            return
        memory: Memory = {}
        try:
            memory = self._source.look_up()
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
            quantized = memory_of((name, name, tensor) for name, tensor in quantizer.quantized.items())
            self._memory = cast("Memory", {**memory, **quantized})  # both on the host, or both on the device

    def look_up(self) -> Memory:
        """What :meth:`settle` has quantized, and the memory of all other weights.

        Raises:
            Exception: why that failed, such as a RefitError for a weight that is not a number.
        """
        if self._failure is not None:
            raise self._failure
        return self._memory
