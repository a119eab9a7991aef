"""Refuses engines whose weights are not where, or not in the form in which, their loaders put them.

In such an engine new weights could be committed, and the answers would still be of the old ones, or of neither.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.device_allocator.cumem import CuMemAllocator

from megatron_patches.refit.errors import RefitError, UnmappedParameterError, UnsupportedEngineError
from megatron_patches.refit.vllm.releases import installed
from megatron_patches.refit.vllm.swap import span_of

_WEIGHTS = "weights"  # vLLM's tag of the memory that a sleeping engine keeps or discards weights of


def check_options(config: VllmConfig) -> None:
    """Refuses options of vLLM with which new weights would not reach all that serves.

    Raises:
        UnsupportedEngineError: naming every such option.
    """
    reasons = list(installed().refusals(config))
    if reasons:
        raise UnsupportedEngineError(f"weights cannot be pushed into this engine: {'; '.join(reasons)}")


def check_derivations(model: nn.Module) -> None:
    """Refuses models that derive from their weights what nothing would derive anew.

    Raises:
        UnsupportedEngineError: naming the layer.
    """
    vllm = installed()
    for path, layer in model.named_modules():
        if vllm.derives_by_itself(layer):
            raise UnsupportedEngineError(
                f"{path or 'the model'} ({type(layer).__name__}) derives something from weights once they are loaded, "
                "in a way that is not known here; new weights would not reach it"
            )


def check_all_loaded(model: nn.Module, wanted: Collection[str], written: Collection[str]) -> None:
    """Every parameter of the model gets something from the trainer's.

    Args:
        model: as it serves.
        wanted: names of the parameters that weight loaders know, by module path and attribute.
        written: those that the loader wrote to.

    Raises:
        UnmappedParameterError: naming one that would keep what it holds.
    """
    serving = dict(model.named_parameters(remove_duplicate=False))
    reached = {span_of(serving[name]) for name in written if name in serving}
    for name in wanted:
        parameter = serving.get(name)
        if name in written or (parameter is not None and span_of(parameter) in reached):
            continue
        raise UnmappedParameterError(
            f"the engine has a parameter {name} that no tensor of the trainer's model would ever reach; start it with "
            "the configuration that `refit export` writes"
        )


def check_awake() -> None:
    """Refuses to touch weights whose memory vLLM has given back meanwhile.

    Raises:
        RefitError: if the engine sleeps, in vLLM's sleep mode.
    """
    allocator: Any = CuMemAllocator.instance  # of this process; none where the engine cannot sleep
    if allocator is None:
        return
    if any(data.is_asleep and data.tag == _WEIGHTS for data in tuple(allocator.pointer_to_data.values())):
        raise RefitError("the engine sleeps, without memory for weights: POST /wake_up?tags=weights, and push again")
