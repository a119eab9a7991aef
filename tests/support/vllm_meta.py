"""vLLM models without memory, as some rank of a tensor- or expert-parallel group builds them, without GPUs.

Whatever keeps a model from being built here, though its parameters do not depend on it, is answered as on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def start_vllm() -> None:
    """One process that is a world of its own, with vLLM's groups."""
    import vllm.distributed.parallel_state as groups
    from vllm.config import VllmConfig, set_current_vllm_config

    store = f"file://{tempfile.mkdtemp()}/store"
    with set_current_vllm_config(VllmConfig()):
        groups.init_distributed_environment(1, 0, store, 0, "gloo")
        groups.ensure_model_parallel_initialized(1, 1)
    _answer_as_on_gpus()


def _answer_as_on_gpus() -> None:
    """The kernels of latent attention, and of experts that are not gated, exist for GPUs alone."""
    import vllm.v1.attention.backends.fa_utils as flash
    from vllm.model_executor.layers.fused_moe import config as experts
    from vllm.platforms.cpu import CpuPlatform

    for name in ("compile_flash_attn_varlen_func_from_specs", "flash_attn_varlen_func"):
        if getattr(flash, name, None) is None:
            setattr(flash, name, lambda *_, **__: None)
    import vllm.v1.attention.backends.mla.prefill.flash_attn as prefill

    prefill.flash_attn_varlen_func = lambda *_, **__: None
    plain = CpuPlatform.get_attn_backend_cls

    def backend(selected: Any, attn_selector_config: Any, *rest: Any, **named: Any) -> str:
        if attn_selector_config.use_mla:
            return "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"
        return str(plain(selected, attn_selector_config, *rest, **named))

    CpuPlatform.get_attn_backend_cls = staticmethod(backend)
    experts.current_platform = SimpleNamespace(**{
        name: getattr(experts.current_platform, name)
        for name in dir(experts.current_platform)
        if not name.startswith("__")
    } | {"is_xpu": lambda: True})  # fmt: skip


@contextlib.contextmanager
def as_rank(tp: int, rank: int, expert_parallel: bool) -> Iterator[None]:
    """Makes vLLM's groups of one process look like larger ones."""
    import vllm.distributed.parallel_state as groups

    seen = [groups.get_tp_group(), *([groups.get_ep_group()] if expert_parallel else [])]
    before = [(group, group.world_size, group.rank_in_group) for group in seen]
    for group in seen:
        group.world_size, group.rank_in_group = tp, rank
    try:
        yield
    finally:
        for group, size, place in before:
            group.world_size, group.rank_in_group = size, place


@contextlib.contextmanager
def built(folder: Path, tp: int, rank: int, expert_parallel: bool) -> Iterator[Any]:
    """The model that ``config.json`` in ``folder`` describes, on the meta device; loads as that rank while open."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        tensor_parallel_size=tp,
        enable_expert_parallel=expert_parallel,
        enforce_eager=True,
        max_model_len=64,
        dtype="bfloat16",
        distributed_executor_backend="mp",
    )
    config = arguments.create_engine_config()
    config.parallel_config.rank = rank
    with as_rank(tp, rank, expert_parallel), set_current_vllm_config(config):
        with torch.device("meta"), _expert_maps_with_memory():
            torch.set_default_dtype(torch.bfloat16)
            try:
                model = initialize_model(config)
            finally:
                torch.set_default_dtype(torch.float32)
        yield model


@contextlib.contextmanager
def _expert_maps_with_memory() -> Iterator[None]:
    """Which experts are here is read while the model is built, so it needs memory."""
    import vllm.model_executor.layers.fused_moe.expert_map_manager as maps

    names = [name for name in dir(maps) if "expert_map" in name and callable(getattr(maps, name))]
    functions = {name: getattr(maps, name) for name in names if not isinstance(getattr(maps, name), type)}
    classes: list[Any] = [
        item for item in vars(maps).values() if isinstance(item, type) and item.__module__ == maps.__name__
    ]
    constructors: dict[Any, Any] = {item: item.__init__ for item in classes if "__init__" in vars(item)}

    def on_cpu(function: Any) -> Any:
        @functools.wraps(function)
        def inner(*arguments: Any, **named: Any) -> Any:
            with torch.device("cpu"):
                return function(*arguments, **named)

        return inner

    for name, function in functions.items():
        setattr(maps, name, on_cpu(function))
    for item, constructor in constructors.items():
        item.__init__ = on_cpu(constructor)
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(maps, name, function)
        for item, constructor in constructors.items():
            item.__init__ = constructor
