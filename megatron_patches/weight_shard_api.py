"""Megatron's weight-shard seam, implemented with the engine.

Megatron-core 0.19.2 imports 17 names from ``megatron.core.tensor_parallel.gtp_api``. :class:`WeightShardApi` creates a
module with these names whose functions are bound to it, so options and runtimes live on an object, and two such objects
never interact. Each model chunk has its own runtime: virtual pipeline stages share no chain and no slot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import types
import weakref
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from etp import GradReduction, ShardLayout
from etp.group import WeightGroup
from etp.runtime import EtpRuntime
from etp.te import is_te_grouped_linear, is_te_linear, refuse_quantized, refuse_unsupported_te
from megatron_patches.arguments import MegatronEtpConfig, UnsupportedConfigurationError
from megatron_patches.checkpoint.model_state import is_sharded
from megatron_patches.refusals import FP4_ALIGNMENT, FP8_RECIPES
from megatron_patches.sharded_weight import EmbeddingWeight, MegatronShardedParam, shard_parameter
from megatron_patches.symmetric_parameters import move_into_symmetric_memory


class WeightChain(StrEnum):
    """Megatron's names for prefetch chains. The engine distinguishes captured work by itself."""

    GRAPHED = "graphed"
    UNGRAPHED = "eager"


GRAPH_IMPLEMENTATIONS = ("none", "local", "full_iteration")
"""The values of ``--cuda-graph-impl`` that sharded weights work with."""


class WeightShardApi:
    """State and functions behind the seam.

    Args:
        config: options of the run; :meth:`configure` replaces them.
    """

    def __init__(self, config: MegatronEtpConfig) -> None:
        self.config = config
        self._engine = config.engine
        self._shard_multiple = 1
        # In order of creation, which is the same on all ranks: they finish their collectives in this order.
        self._runtimes: list[weakref.ref[EtpRuntime]] = []
        self._chains_to_print: list[tuple[str, weakref.ref[EtpRuntime]]] = []
        self._graph_streams: dict[tuple[str, dist.ProcessGroup | None], torch.cuda.Stream] = {}
        # Weak references: a runtime lives as long as the weights that it drives.
        self._unannounced: dict[dist.ProcessGroup, weakref.ref[EtpRuntime]] = {}

    def configure(self, config: MegatronEtpConfig) -> None:
        """Take the options of the run, before Megatron builds a model."""
        self.config = config
        self._engine = config.engine
        self._unannounced.clear()

    def as_module(self) -> types.ModuleType:
        """The module that replaces ``megatron.core.tensor_parallel.gtp_api``."""
        from megatron_patches.checkpoint.model_state import make_sharded_tensors_for_checkpoint_with_gtp_remat

        module = types.ModuleType("megatron.core.tensor_parallel.gtp_api", doc=__doc__)
        names: dict[str, Any] = {
            "HAVE_GTP": True,
            "GTPChain": WeightChain,
            "GTPEmbeddingWeight": EmbeddingWeight,
            "attach_gtp_to_presharded_module": _refuse_presharded,
            "classify_gtp_remat_chains": self.classify_chains,
            "configure_gtp_remat_from_recipe": self.configure_from_recipe,
            "dequantize_gtp_native_fp8": _no_fp8,
            "get_ag_stream": partial(self._graph_stream, "gather"),
            "get_rs_stream": partial(self._graph_stream, "reduce"),
            "gtp_native_fp8_load_context": _nothing_to_convert,
            "gtp_remat_shard_dim0": self.shard_rows,
            "is_gtp_param": is_sharded,
            "make_sharded_tensors_for_checkpoint_with_gtp_remat": make_sharded_tensors_for_checkpoint_with_gtp_remat,
            "set_cuda_graph_mempool": _no_pool_needed,
            "wait_async_comms": self.wait_async_comms,
            "wait_for_gtp_grad_reduction_on_current_stream": self.finish_gradients,
            "wrap_module_params_gtp": self.wrap_module,
        }
        vars(module).update(names)
        module.__all__ = list(names)  # type: ignore[attr-defined]
        return module

    # Building a model ----------------------------------------------------------------------------------------

    def configure_from_recipe(
        self,
        *,
        fp4: bool = False,
        fp8_recipe: str | None = None,
        fp8: bool = False,
        calculate_per_token_loss: bool = False,
    ) -> None:
        """Take the loss (and thus gradient) normalisation, which Megatron decides before it builds the model.

        The recipe of FP8 or FP4 decides how shards are aligned; Transformer Engine passes it at each forward pass.

        Raises:
            UnsupportedConfigurationError: for FP8 recipes in which weights cannot be gathered.
        """
        if fp8 and fp8_recipe not in FP8_RECIPES:
            raise UnsupportedConfigurationError(
                f"sharded weights with --fp8-recipe {fp8_recipe} are not supported; use "
                f"--fp8-recipe {' or '.join(FP8_RECIPES)}, or train in bf16"
            )
        engine = self.config.engine
        self._shard_multiple = FP4_ALIGNMENT if fp4 else FP8_RECIPES[fp8_recipe] if fp8 and fp8_recipe else 1
        alignment = math.lcm(engine.pad_for_alignment, self._shard_multiple)
        reduction = GradReduction.SUM if calculate_per_token_loss else GradReduction.MEAN
        self._engine = dataclasses.replace(engine, grad_reduction=reduction, pad_for_alignment=alignment)
        self._unannounced.clear()

    def shard_rows(self, dim0: int, group: dist.ProcessGroup) -> tuple[int, int]:
        """Rows per shard of ``dim0`` rows, including padding, and the total padding rows of all shards."""
        layout = ShardLayout((dim0,), dist.get_world_size(group), self._engine.pad_for_alignment)
        return layout.shard_rows, layout.pad_rows

    def wrap_module(
        self,
        module: torch.nn.Module,
        weight_names: Sequence[str],
        group: dist.ProcessGroup,
        is_grouped: bool | None = None,
    ) -> None:
        """Shard the full weights of a layer that was just built, in place.

        Args:
            module: the layer.
            weight_names: names of its parameters to shard; those that it lacks, and shards, are skipped.
            group: the shard group; with one rank, nothing is changed.
            is_grouped: whether the weights are experts, which are gathered together.

        Raises:
            ValueError: if it is a Transformer Engine layer whose sharded form would be wrong, for example because its
                weight gradients are delayed, a weight is quantized, or cut where it could not be quantized.
        """
        if dist.get_world_size(group) == 1:
            return
        refuse_unsupported_te(type(module).__name__, module)
        is_quantized = is_te_linear(module) or is_te_grouped_linear(module)
        shards: list[MegatronShardedParam] = []
        for name in weight_names:
            param = getattr(module, name, None)
            if param is None or is_sharded(param):
                continue
            fqn = f"{type(module).__name__}.{name}"
            refuse_quantized(fqn, param)
            shard = shard_parameter(param, group, self._engine.pad_for_alignment, fqn)
            if is_quantized and shard.layout.shard_rows % self._shard_multiple:
                raise ValueError(
                    f"{fqn} is cut into shards of {shard.layout.shard_rows} rows, and to be multiplied in FP8 or FP4 "
                    f"they must be multiples of {self._shard_multiple}; give --etp-pad-for-alignment "
                    f"{self._shard_multiple}"
                )
            module._parameters[name] = shard
            shard.attach(self._unannounced_runtime(group), fqn)
            shard.is_routed_expert = bool(is_grouped)
            shards.append(shard)
        for together in [shards] if is_grouped and shards else [[shard] for shard in shards]:
            self._unannounced_runtime(group).add(WeightGroup(together, group))

    def _unannounced_runtime(self, group: dist.ProcessGroup) -> EtpRuntime:
        """The runtime of models that are never passed to classify_chains; it finishes with each backward pass.

        There is one per shard group: its ranks have built and visited the same weights, so they prefetch the same ones.
        Ranks that also have models over other groups would not.
        """
        ref = self._unannounced.get(group)
        runtime = None if ref is None else ref()
        if runtime is None:
            runtime = self._new_runtime(finish_with_backward=True)
            self._unannounced[group] = weakref.ref(runtime)
        return runtime

    def classify_chains(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        *,
        cuda_graph_modules: Any = None,
        moe_shared_expert_overlap: bool = False,
        cuda_graph_impl: str = "none",
    ) -> None:
        """Give each model chunk its own runtime, once the model is built and wrapped.

        Raises:
            UnsupportedConfigurationError: for CUDA graphs made by Transformer Engine.
        """
        del cuda_graph_modules, moe_shared_expert_overlap
        if cuda_graph_impl not in GRAPH_IMPLEMENTATIONS:
            raise UnsupportedConfigurationError(
                f"sharded weights with --cuda-graph-impl {cuda_graph_impl} are not supported; use one of "
                f"{', '.join(GRAPH_IMPLEMENTATIONS)}"
            )
        chunks = list(model) if isinstance(model, Sequence) else [model]
        # finish_gradients is collective over all live runtimes, so deleted models must be gone on all ranks, regardless
        # of when each rank's garbage collector runs.
        gc.collect()
        self._chains_to_print.clear()
        for index, chunk in enumerate(chunks):
            runtime = self._new_runtime(finish_with_backward=False)
            prefix = f"chunk {index}: " if len(chunks) > 1 else ""
            runtime.adopt(_innermost(chunk), prefix)
            if cuda_graph_impl == "local":
                _prepare_for_layer_graphs(runtime)
            elif cuda_graph_impl == "full_iteration":
                _prepare_for_whole_graphs(runtime)
            _gather_after_parameter_sync(chunk, runtime)
            if self.config.parameters_in_place:
                move_into_symmetric_memory(chunk, runtime)
            if self.config.print_chains:
                self._chains_to_print.append((f"model chunk {index}", weakref.ref(runtime)))

    def _new_runtime(self, *, finish_with_backward: bool) -> EtpRuntime:
        # finish_gradients announces once per iteration that a trained model's weights have changed. Nothing announces
        # this for a model outside a training loop.
        engine = dataclasses.replace(self._engine, reuse_across_forwards=not finish_with_backward)
        runtime = EtpRuntime(engine, finish_with_backward=finish_with_backward)
        self._runtimes = [ref for ref in self._runtimes if ref() is not None]
        self._runtimes.append(weakref.ref(runtime))
        return runtime

    # Training ------------------------------------------------------------------------------------------------

    def runtimes(self) -> Iterator[EtpRuntime]:
        """The live runtimes, in order of creation."""
        for ref in self._runtimes:
            runtime = ref()
            if runtime is not None:
                yield runtime

    def wait_async_comms(
        self, chain_id: str | None = None, skip_rs: bool = False, finalize_after_drain: bool = False
    ) -> None:
        """Finish all communication of sharded weights; in a graph, all communication that the graph has started."""
        del chain_id, finalize_after_drain
        capturing = [runtime for runtime in self.runtimes() if runtime.modes.capturing]
        for runtime in capturing:
            runtime.drain()
        if not capturing and not skip_rs:
            self.finish_gradients()

    def _graph_stream(
        self, direction: str, chain_id: str = WeightChain.GRAPHED, group: dist.ProcessGroup | None = None
    ) -> torch.cuda.Stream:
        """A stream that Megatron joins to its graphs and runs hooks on. The engine's own streams join by themselves."""
        del chain_id
        key = (direction, group)
        if key not in self._graph_streams:
            self._graph_streams[key] = torch.cuda.Stream()
        return self._graph_streams[key]

    def finish_gradients(self) -> None:
        """Complete every shard's gradient before Megatron reduces it over the data-parallel replicas."""
        join_replays()
        for runtime in self.runtimes():
            runtime.wait()
            # The optimizer writes through `.data` next, which PyTorch does not count.
            runtime.mark_weights_changed()
        while self._chains_to_print:
            label, ref = self._chains_to_print.pop(0)
            printed = ref()
            if printed is not None:
                _print_chain(label, printed)


def _innermost(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel and Float16Module, whose parameter names users know."""
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def _gather_after_parameter_sync(chunk: torch.nn.Module, runtime: EtpRuntime) -> None:
    """With overlapped parameter gathers, finish a weight's parameter gather before a prefetch reads its shard.

    DistributedDataParallel waits for it in a hook of the module that owns the weight, but a prefetch runs earlier
    (NVIDIA/Megatron-LM#6388).
    """
    if not getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
        return
    for group in runtime.groups:
        for shard in group.shards:
            group.before_gather.append(partial(_finish_parameter_sync, weakref.ref(chunk), shard))


def _finish_parameter_sync(chunk_ref: weakref.ref[Any], shard: Any) -> None:
    chunk = chunk_ref()
    # The handles are removed while Megatron disables the overlap (first iteration, evaluation, checkpoints).
    if chunk is None or not chunk.remove_forward_pre_hook_handles or shard not in chunk.param_to_bucket_group:
        return
    skip_next = chunk.ddp_config.align_param_gather or chunk.overlap_param_gather_with_optimizer_step
    with torch.no_grad():
        chunk.param_to_bucket_group[shard].finish_param_sync(skip_next_bucket_dispatch=skip_next)


def _print_chain(label: str, runtime: EtpRuntime) -> None:
    from megatron.core import parallel_state

    first = (
        parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
    if first:
        stage = parallel_state.get_pipeline_model_parallel_rank()
        print(f"pipeline stage {stage}, {label}: {runtime.gathers.describe_chain()}", flush=True)  # noqa: T201


def _refuse_presharded(*_: Any, **__: Any) -> None:
    # Called only by what megatron_patches/fixes/te_construction.py replaces.
    raise UnsupportedConfigurationError("a layer was built with the size of a shard; build it at full size")


def _no_fp8(*_: Any, **__: Any) -> None:
    raise UnsupportedConfigurationError("parameters in FP8 are not supported: drop --fp8-param-gather")


def _prepare_for_layer_graphs(runtime: EtpRuntime) -> None:
    """Let Megatron capture, one by one, the layers whose weights ``runtime`` drives."""
    # Megatron calls wait_async_comms at the end of each graph.
    runtime.modes.drained_after_parts = True
    _capture_leaves_on(torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream, runtime)


def _prepare_for_whole_graphs(runtime: EtpRuntime) -> None:
    """Let Megatron capture whole iterations of the model whose weights ``runtime`` drives."""
    from megatron.core.full_cuda_graph import get_shared_capture_stream

    _capture_leaves_on(get_shared_capture_stream(), runtime)


def _capture_leaves_on(stream: torch.cuda.Stream | None, runtime: EtpRuntime) -> None:
    """Associate the shards that ``runtime`` drives with the stream that Megatron captures on.

    At its end, a backward pass waits for the streams on which its leaves were first used. In a capture, these must be
    the capture's own stream. Megatron keeps earlier passes alive, whose leaves would belong to another stream: the
    warm-up passes of layer graphs, and the state that a layer with experts keeps from its last pass. Other leaves join
    the capture through their gradients, but shards do not get gradients from autograd.
    """
    with torch.cuda.stream(stream):
        for group in runtime.groups:
            for shard in group.shards:
                shard.belong_to_current_stream()  # type: ignore[attr-defined]


def join_replays() -> None:
    """Make the current stream wait for the replays of Megatron's layer graphs, which run on their own streams."""
    if not torch.cuda.is_available():
        return
    from megatron.core.transformer.cuda_graphs import get_gtp_runner_streams

    for stream in get_gtp_runner_streams():
        torch.cuda.current_stream().wait_stream(stream)


def _no_pool_needed(device: Any, mempool: Any) -> None:
    """Megatron passes the memory pool of its graphs; the engine allocates its own buffers before a capture."""
    del device, mempool


def _nothing_to_convert(module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Megatron converts FP8 shards before and after a load; there are none here."""
    del module
    return contextlib.nullcontext()
