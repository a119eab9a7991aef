"""Refuses engines whose weights are not where, or not in the form in which, their weight loaders put them.

Such an engine would commit new weights and still answer with the old ones, or with a mixture.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from megatron_patches.refit.errors import RefitError, UnmappedParameterError, UnsupportedEngineError
from megatron_patches.refit.vllm.layers import join
from megatron_patches.refit.vllm.releases import installed_release
from megatron_patches.refit.vllm.releases.release import tensors_of
from megatron_patches.refit.vllm.swap import span_of

_KEEP_NOTHING = frozenset(
    {
        *("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"),
        *("DecodeBenchConnector", "ExampleHiddenStatesConnector", "HiSparseConnector"),
    }
)
"""KV connectors that pass a request's entries on and keep none for others, or from which requests take none."""
_OFFLOADS = frozenset({"CPUOffloadingSpec", "TieringOffloadingSpec"})  # vLLM's, whose memory a reset empties
_WEIGHTS = "weights"  # vLLM's tag of the memory of weights that a sleeping engine keeps or discards


def check_options(config: VllmConfig) -> None:
    """Refuses vLLM options with which new weights would not reach everything that serves.

    Raises:
        UnsupportedEngineError: with every such option.
    """
    reasons = [*installed_release().refusals(config), *_connector_refusals(config)]
    if reasons:
        raise UnsupportedEngineError(f"weights cannot be pushed into this engine: {'; '.join(reasons)}")


def _connector_refusals(config: VllmConfig) -> Iterator[str]:
    """Which connectors would still have what older weights computed, after all caches were emptied."""
    if config.kv_transfer_config is not None:
        for name in _keepers(config.kv_transfer_config):
            yield (
                f"{name} keeps KV cache entries of older weights when the prefix cache is reset "
                "(--kv-transfer-config); start it without, or with a connector that vLLM can empty, such as "
                "OffloadingConnector without secondary_tiers"
            )
    if config.ec_transfer_config is not None and config.ec_transfer_config.ec_connector is not None:
        yield (
            f"{config.ec_transfer_config.ec_connector} keeps what encoders with older weights have computed "
            "(--ec-transfer-config); start it without"
        )


def _keepers(transfer: KVTransferConfig) -> Iterator[str]:
    """Names of the connectors that keep entries and cannot be emptied. vLLM counts their reset as a success."""
    connector, more = KVConnectorFactory.get_connector_class(transfer), transfer.kv_connector_extra_config
    if issubclass(connector, MultiConnector):
        for one in more["connectors"]:
            yield from _keepers(KVTransferConfig(**{"engine_id": transfer.engine_id, **one}))
        return
    can_be_emptied = connector.reset_cache is not KVConnectorBase_V1.reset_cache
    if transfer.kv_connector == "OffloadingConnector":
        can_be_emptied = more.get("spec_name", "CPUOffloadingSpec") in _OFFLOADS and not more.get("secondary_tiers")
    if not can_be_emptied and transfer.kv_connector not in _KEEP_NOTHING:
        yield str(transfer.kv_connector)


def check_derivations(model: nn.Module) -> None:
    """Refuses models that derive values from their weights that would not be derived again from new weights.

    Raises:
        UnsupportedEngineError: with the layer.
    """
    vllm = installed_release()
    for path, layer in model.named_modules():
        if vllm.derives_by_itself(layer):
            raise UnsupportedEngineError(
                f"{path or 'the model'} ({type(layer).__name__}) derives something from weights once they are loaded, "
                "in a way that is not known here; new weights would not reach it"
            )
        serving = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(layer).values()}
        for name, scale in vllm.scales_of_kernel(vllm.method(layer)).items():
            if scale.untyped_storage().data_ptr() not in serving:
                raise UnsupportedEngineError(
                    f"{path} computes with a {name} that is none of its parameters, which new scales would not reach; "
                    "start the engine with another --moe-backend"
                )


def wanted_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that a model in loader form must receive.

    Scales of its KV cache are not among them: an engine keeps those that it has.
    """
    vllm = installed_release()
    return {
        join(path, name)
        for path, layer in model.named_modules()
        if not vllm.is_cache_scale(layer)
        for name, tensor in layer.named_parameters(recurse=False, remove_duplicate=False)
        if tensor.numel()
    }


def check_all_loaded(model: nn.Module, wanted: Collection[str], written: Collection[str]) -> None:
    """Checks that the trainer's tensors reach every parameter of the model.

    Args:
        model: the serving model.
        wanted: names of the parameters known to weight loaders, by module path and attribute.
        written: names of those that the loader wrote to.

    Raises:
        UnmappedParameterError: with the name of one that would never be written.
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


def check_stays_awake() -> None:
    """Refuses engines that may sleep: the memory of their weights could go while another thread reads it.

    Raises:
        UnsupportedEngineError: if vLLM's sleep mode is on.
    """
    if CuMemAllocator.instance is not None:
        raise UnsupportedEngineError(
            "an engine with vLLM's sleep mode sends nothing to other engines, as its weights' memory may be taken away "
            "meanwhile; start it without --enable-sleep-mode"
        )


def check_awake() -> None:
    """Checks that vLLM has not released the memory of the weights.

    Raises:
        RefitError: if the engine sleeps, in vLLM's sleep mode.
    """
    allocator: Any = CuMemAllocator.instance  # of this process; None if the engine cannot sleep
    if allocator is None:
        return
    if any(data.is_asleep and data.tag == _WEIGHTS for data in tuple(allocator.pointer_to_data.values())):
        raise RefitError(
            "the engine sleeps, without memory for weights: POST /wake_up?tags=weights and push again, or push with "
            "the option sleeping=wake or sleeping=restore"
        )
