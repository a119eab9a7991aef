"""Refuses adapters that an engine would not apply in full, before anything of them is sent.

vLLM checks the last part of modules' names and one rank. It leaves out modules of layers that it does not have, and
takes factors of a wrong size in part: it would answer, but not with the adapter that was trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear

from megatron_patches.refit.control.adapter_names import FACTOR_A, FACTOR_B, PREFIX, SCALE
from megatron_patches.refit.errors import ModelMismatchError, UnsupportedEngineError, first_of
from megatron_patches.refit.layout.boxes import TensorSpec
from megatron_patches.refit.vllm.releases import installed_release


def manager_of(model: nn.Module, config: VllmConfig) -> Any:
    """The manager of a model's adapters in vLLM.

    Raises:
        UnsupportedEngineError: if the engine has none, or runs in a way in which adapters would not reach all of it.
    """
    manager = getattr(model, "lora_manager", None)
    if config.lora_config is None or manager is None:
        raise UnsupportedEngineError("the engine was started without --enable-lora; start it with it")
    parallel = config.parallel_config
    for option, number in {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size,
        "--data-parallel-size": parallel.data_parallel_size,
        "--api-server-count": parallel._api_process_count,
    }.items():
        if number > 1:
            raise UnsupportedEngineError(
                f"adapters are not pushed to an engine with {option} {number}; start it with 1"
            )
    return manager


def check_adapter(manager: Any, tensors: Sequence[TensorSpec]) -> None:
    """Checks that an engine has each module of an adapter, in the size that the module's factors need.

    Args:
        manager: vLLM's manager of adapters.
        tensors: the adapter's tensors; see [Note: adapter tensors].

    Raises:
        ModelMismatchError: naming modules, and the rank or the sizes.
    """
    shapes = {spec.name: spec.shape for spec in tensors}
    reasons = []
    sizes = _sizes(manager)
    mapper = installed_release().adapter_names(manager.model)
    most = manager.lora_config.max_lora_rank
    for name in (name for name in shapes if name.endswith(SCALE)):
        prefix = name.removesuffix(SCALE)
        module, _ = parse_fine_tuned_lora_name(prefix + FACTOR_A, mapper)
        (rank, inputs), (outputs, _) = shapes[prefix + FACTOR_A], shapes[prefix + FACTOR_B]
        path = prefix.removeprefix(PREFIX)
        if module not in sizes:
            reasons.append(f"the engine has no module {path} to which an adapter can be added")
        elif rank > most:
            reasons.append(f"{path} has rank {rank}, and the engine takes at most {most} (--max-lora-rank)")
        elif sizes[module] != (inputs, outputs):
            wanted = "{} inputs and {} outputs".format(*sizes[module])
            reasons.append(f"{path} has {inputs} inputs and {outputs} outputs in the trainer, {wanted} in the engine")
    if reasons:
        raise ModelMismatchError(first_of(reasons, "; "))


def _sizes(manager: Any) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each linear module as adapters know it, over all workers, by vLLM's name."""
    found = {}
    for name, wrapper in manager.modules.items():
        layer = getattr(wrapper, "base_layer", None)
        if isinstance(layer, LinearBase):
            parts = manager.packed_modules.get(name)
            sizes = zip(parts, _outputs(layer), strict=False) if parts else [(name, layer.output_size)]
            found.update({part: (int(layer.input_size), int(outputs)) for part, outputs in sizes})
    return found


def _outputs(layer: Any) -> Iterator[int]:
    """Outputs of each part of a layer that stacks several, over all workers."""
    if isinstance(layer, QKVParallelLinear):
        yield layer.total_num_heads * layer.head_size
        yield layer.total_num_kv_heads * layer.head_size
        yield layer.total_num_kv_heads * layer.v_head_size
    elif isinstance(layer, MergedColumnParallelLinear):
        yield from layer.output_sizes
