"""What the engine knows about Transformer Engine's modules. TE is imported only where a TE module is built."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch
from torch import nn

from etp.formats import MXFP8, NVFP4, ApartFormat, Float8Block, Float8PerTensor, WeightFormat

GROUPED_TENSOR_VARIABLE = "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"
"""Makes TE compute all experts in one kernel, from weights that it does not request again in the backward pass."""

OVERRIDE_VARIABLE = "NVTE_BACKWARD_OVERRIDE"
"""Sets the default of ``backward_override`` in TE's recipes."""

FP32_SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""With 1, TE's ``Float8BlockScaling`` has fp32 scales by default, otherwise powers of two."""

_SQUARE = 2

_UNSUPPORTED = {
    "DelayedScaling": "its scales come from a history that each rank would keep of its own",
    "Float8BlockScaling": "blocks of 1 x 128 of a weight cannot be transposed",
    "MXFP8BlockScaling": "enable_2d_quantization and backward_override are not implemented",
    "NVFP4BlockScaling": "nvfp4_4over6 of weights and backward_override are not implemented",
    "CustomRecipe": "its quantizers are unknown",
}
"""Why sharded weights do not support a recipe of Transformer Engine, by the name of its class."""

_FUSES = {
    "fuse_wgrad_accumulation": "fuse_wgrad_accumulation",
    "_accumulate_into_main_grad": "accumulate_into_main_grad",
}
"""Attributes of TE's modules, and of its operations, that say whether gradients bypass autograd; their options."""


def te_available() -> bool:
    """Whether Transformer Engine is installed and has a device to run on."""
    if not torch.cuda.is_available():
        return False
    try:
        import transformer_engine  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def te_pytorch() -> Any:
    """The module ``transformer_engine.pytorch``."""
    import transformer_engine.pytorch as te  # heavy, and absent without the extra

    return te


def te_is_capturing() -> bool:
    """Whether TE's ``make_graphed_callables`` is capturing now; it captures backward passes into ``grad``."""
    graphs = sys.modules.get("transformer_engine.pytorch.graph")
    return graphs is not None and bool(graphs.is_graph_capturing())


def _is_te(module: nn.Module, *names: str) -> bool:
    return any(
        cls.__name__ in names and cls.__module__.startswith("transformer_engine.pytorch.module")
        for cls in type(module).__mro__
    )


def is_te_linear(module: nn.Module) -> bool:
    """Whether it is TE's Linear or LayerNormLinear (or derives from them)."""
    return _is_te(module, "Linear", "LayerNormLinear")


def is_te_grouped_linear(module: nn.Module) -> bool:
    """Whether it is TE's GroupedLinear (or derives from it)."""
    return _is_te(module, "GroupedLinear")


def kept_for_backward() -> Any:
    """What Transformer Engine's layer that is being differentiated has kept of its forward pass; maybe not TE's at all.

    Each use of a weight has its own: ``activation_dtype``, ``fp8``, ``backward_override`` and so on.
    """
    node = torch._C._current_autograd_node()
    # Its Linear keeps them in an object, so that torch.compile can pass them on.
    return getattr(node, "backward_objects", node)


def overwrites_main_grad(kept: Any, weight: torch.Tensor) -> bool:
    """Whether the gradient that TE computes takes the place of ``main_grad``, rather than being added to it.

    Args:
        kept: see :func:`kept_for_backward`.
        weight: whose gradient it is.
    """
    if not getattr(kept, "fuse_wgrad_accumulation", False):
        return False
    return bool(kept.is_first_microbatch or getattr(weight, "overwrite_main_grad", False))


def refuse_modified_weight(name: str, kept: Any) -> None:
    """Raise ValueError if a debug feature (nvidia-dlfw-inspect) modifies the weight ``name`` for the backward pass.

    TE lets it do so in the forward pass, and multiplies the weight that is gathered again as it is.

    Args:
        name: names the weight in messages.
        kept: see :func:`kept_for_backward`.
    """
    quantizer = kept.weight_quantizers[0] if hasattr(kept, "weight_quantizers") else kept.weight_quantizer
    if quantizer is not None and quantizer.columnwise_tensor_plan == "modify_tensor()":
        raise ValueError(
            f"a debug feature of Transformer Engine modifies {name} for the gradient of the input (dgrad), which would "
            "be computed with the weight as it is: leave out the feature's gemm dgrad, or its tensor weight"
        )


def refuse_unsupported_te(path: str, module: nn.Module) -> None:
    """Raise ValueError, naming module and option, for a TE module whose sharded form would be wrong.

    TE's ``LayerNormMLP`` does not support ``DistributedWeight``. A delayed weight gradient is computed after the
    hook that reduces it. A split weight and a single grouped weight hold several weights in one parameter. For grouped
    tensors, ``GroupedLinear`` keeps the gathered weights and reduces no gradient (``_forward_grouped_tensor``).
    """
    if _is_te(module, "LayerNormMLP"):
        raise ValueError(
            f"{path}: LayerNormMLP cannot be sharded; use LayerNormLinear followed by Linear, or pass it in "
            "replicated_modules of etp.shard_module"
        )
    if not (is_te_linear(module) or is_te_grouped_linear(module)):
        return
    _refuse_delayed_wgrad(path, module)
    if getattr(module, "single_grouped_weight", False):
        raise ValueError(f"{path}: single_grouped_weight cannot be sharded; build it with single_grouped_weight=False")
    if is_te_grouped_linear(module) and getattr(module, "use_grouped_tensor", grouped_tensors_are_default()):
        raise ValueError(
            f"{path}: with use_grouped_tensor=True its experts would silently not train; build it with "
            f"use_grouped_tensor=False and without {GROUPED_TENSOR_VARIABLE} in the environment"
        )
    if os.environ.get(OVERRIDE_VARIABLE) == "high_precision":
        raise ValueError(
            f"{path}: {OVERRIDE_VARIABLE}=high_precision makes its backward pass compute with this rank's shard in "
            "place of the weight; unset it"
        )
    names = getattr(module, "weight_names", ["weight"])
    if is_te_linear(module) and names != ["weight"]:
        raise ValueError(f"{path}: parameters_split gives {names}; a sharded module needs one weight, without a split")


def refuse_quantized(name: str, weight: torch.Tensor) -> None:
    """Raise ValueError for a weight that TE keeps quantized: its shards would silently have higher precision."""
    for cls in type(weight).__mro__:
        if cls.__name__ == "QuantizedTensor" and cls.__module__.startswith("transformer_engine.pytorch"):
            raise ValueError(
                f"{name} is a {type(weight).__name__}, and its shards would be {weight.dtype}: build the model without "
                "quantized_model_init; under te.autocast, weights are gathered as its recipe quantizes them"
            )


def grouped_tensors_are_default() -> bool:
    """Whether the environment lets TE's ``GroupedLinear`` use grouped tensors."""
    return os.environ.get(GROUPED_TENSOR_VARIABLE, "0") not in ("", "0")


def block_scales_are_powers_of_two() -> bool:
    """Whether TE's ``Float8BlockScaling`` has scales that are powers of two by default, as Megatron uses it.

    TE reads the variable when it is imported. Once it has been, a later change of the environment changes nothing.
    """
    recipes = sys.modules.get("transformer_engine.common.recipe")
    if recipes is None:
        return os.environ.get(FP32_SCALES_VARIABLE) != "1"
    return bool(recipes.Float8BlockScaling.fp8_quant_fwd_weight.power_2_scale)


@functools.cache
def _one[F](kind: type[F], *arguments: Any) -> F:
    """The same object each time, which the engine recognizes without comparing."""
    return kind(*arguments)


def active_format(name: str, former: WeightFormat | None = None) -> WeightFormat | None:
    """The format in which Transformer Engine quantizes the weight ``name`` now; None if it does not.

    Args:
        name: names the weight in messages.
        former: the weight's last format; whether this GPU has it is not asked again.

    Raises:
        ValueError: if sharded weights do not support the recipe, with the way out.
    """
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization is None or not quantization.FP8GlobalStateManager.is_fp8_enabled():
        return None
    recipe = quantization.FP8GlobalStateManager.get_fp8_recipe()
    kind = type(recipe).__name__
    if getattr(recipe, "backward_override", None) == "high_precision":
        raise ValueError(
            f"{name} is used with a {kind} recipe of backward_override='high_precision', whose backward pass would "
            "compute with this rank's shard in place of the weight; leave backward_override out, and "
            f"{OVERRIDE_VARIABLE} out of the environment"
        )
    if recipe.float8_block_scaling() and recipe.w_block_scaling_dim == _SQUARE:
        weight = recipe.fp8_quant_fwd_weight
        block: WeightFormat = _one(Float8Block, weight.power_2_scale, weight.amax_epsilon)
        return block
    if recipe.float8_current_scaling():
        weight = recipe.fp8_quant_fwd_weight
        per_tensor: WeightFormat = _one(Float8PerTensor, weight.power_2_scale, weight.amax_epsilon)
        return per_tensor
    # Under backward_override="dequantized", the backward pass reads what the forward pass has: rows.
    if recipe.mxfp8() and not recipe.enable_2d_quantization and recipe.backward_override is None:
        found: ApartFormat = _one(MXFP8)
        return found if found is former else _on_this_gpu(found, name, kind)
    if recipe.nvfp4() and recipe.nvfp4_4over6 in ("none", "activations") and recipe.backward_override is None:
        found = _one(NVFP4, recipe.fp4_quant_fwd_weight.fp4_2d_quantization)
        return found if found is former else _on_this_gpu(found, name, kind)
    why = _UNSUPPORTED.get(kind, "sharded weights do not know it")
    raise ValueError(
        f"{name} is used with a {kind} recipe: {why}. Use Float8BlockScaling with w_block_scaling_dim=2, "
        "Float8CurrentScaling, MXFP8BlockScaling() or NVFP4BlockScaling(), or keep the module whole with "
        "replicated_modules of etp.shard_module"
    )


def too_old_for(format_: type[ApartFormat]) -> str:
    """Why this process's GPU cannot multiply in the format; empty if it can, or if there is none.

    Transformer Engine's own quantization does not say so: for MXFP8 it writes nothing, for NVFP4 it is a CUDA error.
    """
    if not torch.cuda.is_available() or (found := torch.cuda.get_device_capability()) >= format_.capability:
        return ""
    needed, there = (".".join(map(str, version)) for version in (format_.capability, found))
    return f"{format_.name} needs GPUs of compute capability {needed} (Blackwell), and this one has {there}"


def _on_this_gpu(format_: ApartFormat, name: str, kind: str) -> ApartFormat:
    if why := too_old_for(type(format_)):
        raise ValueError(f"{name} is used with a {kind} recipe: {why}. Use Float8BlockScaling or Float8CurrentScaling")
    return format_


def refuse_hidden_gradients(path: str, module: nn.Module) -> None:
    """Raise ValueError for a module or operation of TE whose replicated weights' gradients would bypass autograd."""
    if not any(cls.__module__.startswith("transformer_engine.pytorch.") for cls in type(module).__mro__):
        return
    _refuse_delayed_wgrad(path, module)
    for attribute, option in _FUSES.items():
        if getattr(module, attribute, False):
            raise ValueError(
                f"{path}: {option} hides the gradients of replicated weights, which would not be combined over the "
                "ranks; build it without"
            )


def _refuse_delayed_wgrad(path: str, module: nn.Module) -> None:
    store = getattr(module, "wgrad_store", None)
    if store is not None and store.delay_wgrad_compute():
        raise ValueError(
            f"{path}: delay_wgrad_compute computes gradients after they are combined over the ranks; build it without"
        )
