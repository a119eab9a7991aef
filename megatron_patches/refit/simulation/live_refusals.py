"""Entries of a ``config.json`` that no trainer's model supports, so that a live engine with them would be refused.

None of them changes the shape of a tensor, so a plan could still be made and proved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.layout.weight_format import WeightFormat, is_block_fp8

_USUAL_ROTARY = (None, "default")
# What Megatron computes with --use-rope-scaling or YaRN, and the architectures that are exported with less.
_SCALED_ROTARY = ("llama3", "yarn")
_OTHER_ROTARY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"DeepseekV3ForCausalLM": ("yarn",), "NemotronHForCausalLM": ()}
)


def check_live(config: Mapping[str, object], architecture: str) -> None:
    """Refuses a configuration whose engines could not receive any trainer's weights, or not in the type of training.

    Args:
        config: content of ``config.json``.
        architecture: class in ``transformers``.

    Raises:
        UnsupportedModelError: with each entry and the remedy.
    """
    reasons = [*_quantized(config), *_rotary(config, architecture), *_windowed(config)]
    if reasons:
        raise UnsupportedModelError(f"an engine of this configuration takes no trainer's weights: {'; '.join(reasons)}")
    if is_block_fp8(config.get("quantization_config")):
        raise UnsupportedModelError(
            "quantization_config (fp8): plans are of weights in the type in which they are trained; take it out to "
            f"plan for the same model. A push sends such an engine weights in the format {WeightFormat.FP8_BLOCK} "
            "(--weight-format)"
        )


def _quantized(config: Mapping[str, object]) -> Iterator[str]:
    method = config.get("quantization_config")
    if method and not is_block_fp8(method):
        name = method.get("quant_method", "unknown") if isinstance(method, Mapping) else method
        yield (
            f"quantization_config ({name}): only the engine knows the form of quantized weights; take it out, and "
            "serve in the trainer's type"
        )


def _rotary(config: Mapping[str, object], architecture: str) -> Iterator[str]:
    known = (*_USUAL_ROTARY, *_OTHER_ROTARY.get(architecture, _SCALED_ROTARY))
    for name in ("rope_scaling", "rope_parameters"):
        entry = config.get(name)
        if not isinstance(entry, Mapping):
            continue
        kind = entry.get("rope_type", entry.get("type"))
        if kind not in known:
            yield (
                f"{name} ({kind}): no model that Megatron exports has such positions; take it out to plan for the same "
                "model without"
            )


def _windowed(config: Mapping[str, object]) -> Iterator[str]:
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        yield "sliding_window: the trainer's layers attend to all that comes before; take it out"
