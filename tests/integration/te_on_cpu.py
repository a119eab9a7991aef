"""Megatron with Transformer Engine's layers on a CPU: their Python code is the real one, their kernels are a shim's.

The attention, the norms outside of fused layers and the optimizer are Megatron's and PyTorch's own: no weight of theirs
is sharded.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.integration.megatron_run import PRETRAIN_GPT, Trajectory
from tests.support import te_apart
from tests.support.te_site import add_fp8_kernels

_NORMS = ("rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd")
# As the shim replaces these for the whole process, Megatron would take it for one with GPUs.
_FOR_MEGATRON = ("is_available", "current_device", "get_device_properties", "get_device_capability", "current_stream")
_GPU = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
# What a run on a CPU must have otherwise, and here can have as on GPUs.
_AS_ON_GPUS = {"transformer_impl", "gradient_accumulation_fusion", "use_cpu_initialization"}


class _Instead:
    """An object with some attributes of its own, and all others of another object."""

    def __init__(self, other: object, **own: object) -> None:
        self.__dict__.update(own)
        self._other = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


def prepare(shim: str) -> None:
    """Make this process one that trains with Transformer Engine's layers; ``shim`` is the shim's folder.

    Only for a process of its own: nothing is undone.
    """
    if "te_cpu_shim" in sys.modules:
        return
    cuda = {name: getattr(torch.cuda, name) for name in _FOR_MEGATRON}
    sys.path.append(shim)
    import te_cpu_shim  # type: ignore[import-not-found]

    add_fp8_kernels()
    te_apart.add_kernels(te_cpu_shim)
    for name, function in cuda.items():
        setattr(torch.cuda, name, function)
    _let_layers_believe_in_a_gpu(te_cpu_shim)
    sys.modules["transformer_engine.pytorch.optimizers"] = None  # its kernels need a GPU
    _patch_megatron()


def _let_layers_believe_in_a_gpu(shim: Any) -> None:
    cuda = _Instead(
        torch.cuda,
        is_available=lambda: True,
        current_device=lambda: torch.device("cpu"),
        get_device_capability=lambda *_: (_GPU.major, _GPU.minor),
        get_device_properties=lambda *_: _GPU,
    )
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine."):
            if getattr(module, "torch", None) is torch:
                vars(module)["torch"] = _Instead(torch, cuda=cuda)
            vars(module).update({norm: getattr(shim, norm) for norm in _NORMS if hasattr(module, norm)})


def _patch_megatron() -> None:
    import megatron_patches
    from megatron_patches.cpu import arguments

    required = {name: value for name, value in arguments.required_arguments().items() if name not in _AS_ON_GPUS}
    mock.patch.object(arguments, "required_arguments", return_value=required).start()
    megatron_patches.apply()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    torch.cuda.get_device_capability = lambda *_: (_GPU.major, _GPU.minor)
    torch.cuda.is_current_stream_capturing = lambda: False
    # Gathers of a tensor's data and scales, which gloo cannot make together, are made one after the other.
    done = SimpleNamespace(wait=lambda: None)
    mock.patch.object(torch.distributed, "_coalescing_manager", return_value=contextlib.nullcontext(done)).start()
    TESpecProvider.core_attention = lambda _: DotProductAttention
    TESpecProvider.layer_norm = lambda _, *__, **___: WrappedTorchNorm
    gpt_layer_specs.TENorm = WrappedTorchNorm


def train(
    rank: int, world_size: int, arguments: tuple[str, ...], shim: str, script: Path = PRETRAIN_GPT
) -> tuple[Trajectory, set[str]]:
    """:func:`tests.integration.megatron_run.train`, and the classes of the layers that had sharded weights."""
    prepare(shim)
    from megatron.training import training

    from etp import ETPShardedParam
    from tests.integration import megatron_run

    classes: set[str] = set()
    setup = training.setup_model_and_optimizer

    def noting_setup(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        for module in (module for chunk in result[0] for module in chunk.modules()):
            if any(isinstance(parameter, ETPShardedParam) for parameter in module.parameters(recurse=False)):
                classes.add(type(module).__name__)
        return result

    with mock.patch.object(training, "setup_model_and_optimizer", noting_setup):
        return megatron_run.train(rank, world_size, arguments, script), classes
