"""The parallelization systems that the training benchmark compares: how each is built and stepped.

A step is forward and backward of every microbatch and the reduction of gradients, which add up over steps: no
zeroing, no optimizer. Sharded weights count as changed by every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.train_shapes import EXPERT_PARALLEL, GRAPH, PRECISIONS, Shape, expert_parallel, shards

# Long enough for the slowest first collective, and short enough that a hang ends well before the time limit of the run.
_TIMEOUT_MINUTES = 2


@dataclass(frozen=True)
class BuildOptions:
    """Options of a system.

    Attributes:
        prefetch_depth: of ETP.
        precision: of the linear layers' GEMMs: one of :data:`benchmarks.train_shapes.PRECISIONS`.
    """

    prefetch_depth: int = 1
    precision: str = "bf16"

    def quantization(self) -> dict[str, Any]:
        """Megatron's settings for the precision."""
        recipe = PRECISIONS[self.precision]
        return {"fp8": "e4m3" if recipe == "blockwise" else "hybrid", "fp8_recipe": recipe} if recipe else {}


class System:
    """One model, and how to step it; this class itself is the unsharded model that communicates nothing.

    Args:
        name: of :data:`benchmarks.train_shapes.SYSTEMS`.
        shape: the model and one microbatch.
        options: what can be chosen.
    """

    splits_tensors = False
    shards_weights = False

    def __init__(self, name: str, shape: Shape, options: BuildOptions) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        self.name, self.shape, self.options = name, shape, options
        cut = shards(name, dist.get_world_size())
        self.expert_ranks = expert_parallel(name, dist.get_world_size())
        self.tensor_ranks = cut if self.splits_tensors else 1
        self.weight_shards = cut if self.shards_weights else 1
        self.graphed = name.endswith(GRAPH)
        # DistributedDataParallel keeps autograd nodes that belong to the stream on which it is built. A graph can be
        # captured on that stream only.
        self.stream = torch.cuda.Stream() if self.graphed else torch.cuda.current_stream()
        torch.cuda.synchronize()
        self._before = torch.cuda.memory_allocated()
        self._parallel_state = self._new_parallel_state()
        model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        self.loss = torch.zeros(())
        with torch.cuda.stream(self.stream):
            self.config = self._config()
            self.model = self._wrap()
            # The ranks of a tensor-parallel group see the same data.
            generator = torch.Generator().manual_seed(17 + dist.get_rank() // self.tensor_ranks)
            size = (shape.micro_batch, shape.sequence + 1)
            tokens = torch.randint(0, shape.vocabulary, size, generator=generator).cuda()
            self.inputs, self.labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            positions = torch.arange(shape.sequence, device="cuda").expand(shape.micro_batch, -1)
            self.positions = positions.contiguous()
        torch.cuda.synchronize()

    # To be stepped -------------------------------------------------------------------------------------------

    def activate(self) -> None:
        """Give Megatron the process groups that this system was built with. Before steps, if another one ran."""
        from megatron.core import parallel_state

        vars(parallel_state).update(self._parallel_state)

    def step(self, microbatches: int) -> None:
        """Takes one step on the current stream, with this number of microbatches per GPU.

        All ranks of a tensor-parallel group work on the same microbatch, so a step of theirs has more microbatches, by
        the size of the group: every system computes the same number of tokens per GPU.
        """
        count = microbatches * self.tensor_ranks
        if self.options.precision != "bf16":
            # Transformer Engine keeps quantized weights until it is told that they have changed.
            for module in self.model.modules():
                if hasattr(module, "is_first_microbatch"):
                    module.is_first_microbatch = True
        for index in range(count):
            with contextlib.nullcontext() if self._reduces(last=index == count - 1) else self.model.no_sync():
                losses = self.model(self.inputs, self.positions, None, labels=self.labels)
                loss = losses.float().mean()
                (loss / count).backward()
                # Without its graph: a capture must not meet autograd nodes of earlier steps.
                self.loss = loss.detach()
        self._finish()

    def _reduces(self, *, last: bool) -> bool:
        """Whether the backward pass of a microbatch may reduce gradients over data-parallel ranks."""
        del last
        return False

    def _finish(self) -> None:
        """Complete the reduction of gradients."""

    # Memory --------------------------------------------------------------------------------------------------

    def allocated(self) -> int:
        """Bytes that PyTorch's allocator has given out since the system was begun."""
        return torch.cuda.memory_allocated() - self._before

    def peak(self) -> int:
        """The highest that :meth:`allocated` was since the statistics were reset."""
        return torch.cuda.max_memory_allocated() - self._before

    def other_memory(self) -> dict[str, int]:
        """Bytes that PyTorch's allocator does not know of, by purpose."""
        return {}

    # Traffic -------------------------------------------------------------------------------------------------

    def reset_traffic(self) -> None:
        """Count what moves from here on, if this system counts it."""

    def bytes_per_element(self, microbatches: int) -> float | None:
        """What a step of this many microbatches has moved since; see :func:`benchmarks.traffic.bytes_per_element`.

        None where nothing counts it. A replay of a CUDA graph is not counted, and moves what its capture has counted.
        """
        del microbatches
        return None

    # To be built ---------------------------------------------------------------------------------------------

    def _new_parallel_state(self) -> dict[str, Any]:
        """Make process groups, leave them current, and return what Megatron keeps of them."""
        from megatron.core import parallel_state

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        experts_cut = self.weight_shards > 1 and self.shape.experts > 0
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tensor_ranks,
            expert_model_parallel_size=self.expert_ranks,
            gtp_remat_size=self.weight_shards,
            expert_gtp_remat_size=self.weight_shards if experts_cut else 1,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=_TIMEOUT_MINUTES,
            high_priority_stream_groups=["gtp_remat", "expt_gtp_remat"] if self.weight_shards > 1 else None,
        )
        return dict(_state_of(parallel_state))

    def _config(self) -> Any:
        from megatron.core.transformer import TransformerConfig

        shape = self.shape
        return TransformerConfig(
            num_layers=shape.layers, hidden_size=shape.hidden, ffn_hidden_size=shape.ffn,
            num_attention_heads=shape.heads, num_query_groups=shape.kv_heads, gated_linear_unit=True,
            activation_func=F.silu, normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0,
            attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
            gradient_accumulation_fusion=False, bias_activation_fusion=True,
            tensor_model_parallel_size=self.tensor_ranks, sequence_parallel=self.tensor_ranks > 1,
            tensor_parallel_num_weight_shards=self.weight_shards * self.tensor_ranks,
            kv_channels=shape.head_elements(), **(self._expert_config() if shape.experts else {}),
            **self.options.quantization(),
        )  # fmt: skip

    def _expert_config(self) -> dict[str, Any]:
        """What a mixture of experts adds to the configuration: dropless, with an auxiliary loss."""
        shape = self.shape
        return {
            "num_moe_experts": shape.experts, "moe_ffn_hidden_size": shape.ffn, "moe_router_topk": shape.top_k,
            "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01, "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall", "qk_layernorm": True,
            "expert_model_parallel_size": self.expert_ranks, "expert_tensor_parallel_size": self.tensor_ranks,
            "expert_tensor_parallel_num_weight_shards": self.weight_shards * self.tensor_ranks,
        }  # fmt: skip

    def _gpt(self) -> Any:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        experts = {"num_experts": self.shape.experts, "moe_grouped_gemm": True, "qk_layernorm": True}
        spec = get_gpt_layer_with_transformer_engine_spec(**(experts if self.shape.experts else {}))
        model = GPTModel(
            self.config, spec, self.shape.vocabulary, self.shape.sequence,
            position_embedding_type="rope", share_embeddings_and_output_weights=False,
        )  # fmt: skip
        return model.cuda().bfloat16()

    def _wrap(self) -> Any:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        # Reductions over one replica, of weights that are cut over all ranks, would only take the host's time. In a
        # Megatron script, the flags of ETP leave the overlap out, too.
        replicas = dist.get_world_size() // self.weight_shards
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=replicas > 1)
        return DistributedDataParallel(self.config, ddp, self._gpt())


class DataParallel(System):
    """Unsharded weights; gradients are reduce-scattered as the distributed optimizer wants them."""

    def _reduces(self, *, last: bool) -> bool:
        return last

    def _finish(self) -> None:
        self.model.finish_grad_sync()
        self._reduce_replicated()
        for group in (*self.model.bucket_groups, *self.model.expert_parallel_bucket_groups):
            group.reset()
        for p in self.model.params_with_grad:
            p.grad_added_to_main_grad = False

    def _reduce_replicated(self) -> None:
        """Reduce the gradients of norms over ranks that are no data-parallel replicas, as Megatron does last."""


class TensorParallel(DataParallel):
    """Every matrix split over all GPUs, activations between the layers split along the sequence."""

    splits_tensors = True

    def _reduce_replicated(self) -> None:
        from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

        _allreduce_non_tensor_model_parallel_grads([self.model], self.config)


class WeightSharded(DataParallel):
    """Megatron's own sharded weights (GTP)."""

    shards_weights = True

    def _wrap(self) -> Any:
        from megatron.core.tensor_parallel.gtp_api import classify_gtp_remat_chains, configure_gtp_remat_from_recipe

        quantization = self.options.quantization()
        configure_gtp_remat_from_recipe(fp8=bool(quantization), fp8_recipe=quantization.get("fp8_recipe"))
        model = super()._wrap()
        classify_gtp_remat_chains([model])
        return model

    def _finish(self) -> None:
        from megatron.core.tensor_parallel.gtp_api import wait_for_gtp_grad_reduction_on_current_stream

        wait_for_gtp_grad_reduction_on_current_stream()
        super()._finish()

    def _reduce_replicated(self) -> None:
        from megatron.core.distributed.finalize_model_grads import _allreduce_replicated_grads_over_gtp_remat_group

        _allreduce_replicated_grads_over_gtp_remat_group([self.model])


class Etp(WeightSharded):
    """ETP in Megatron; `megatron_patches.apply()` has run."""

    def _wrap(self) -> Any:
        from etp import EtpConfig, TransportName
        from megatron_patches import MegatronEtpConfig
        from megatron_patches.seam import installed_api

        transport = TransportName(self.name.removeprefix("etp_").removesuffix(GRAPH).removesuffix(EXPERT_PARALLEL))
        engine = EtpConfig(transport=transport, prefetch_depth=self.options.prefetch_depth)
        api = installed_api()
        if api is None:
            raise RuntimeError("megatron_patches.apply() has not run")
        api.configure(MegatronEtpConfig(engine=engine))
        return super()._wrap()

    def reset_traffic(self) -> None:
        """As in the base class."""
        from etp.wrap import runtimes_of

        for runtime in runtimes_of(self.model):
            runtime.counters.reset()

    def bytes_per_element(self, microbatches: int) -> float | None:
        """As in the base class."""
        from benchmarks.traffic import bytes_per_element
        from etp.wrap import runtimes_of

        return bytes_per_element(runtimes_of(self.model), microbatches)

    def other_memory(self) -> dict[str, int]:
        """Symmetric memory: shards and gradients' receive ring."""
        from etp.wrap import runtimes_of

        sizes: dict[str, int] = {}
        for runtime in runtimes_of(self.model):
            for transport in runtime.routes.transports.values():
                for what, nbytes in transport.nbytes().items():
                    sizes[what] = sizes.get(what, 0) + nbytes
        return sizes


class Fsdp2(System):
    """PyTorch's FSDP2 in Megatron's wrapper. It reduces every microbatch's gradients, as ETP and GTP do."""

    def _reduces(self, *, last: bool) -> bool:
        del last
        return True

    def _wrap(self) -> Any:
        from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel

        return TorchFullyShardedDataParallel(self.config, DistributedDataParallelConfig(), self._gpt())


class MegatronFsdp(System):
    """Megatron-FSDP as it comes with megatron-core: weights, gradients and optimizer states sharded.

    Main weights are the bf16 weights themselves, as in the other systems; fp32 ones belong to an optimizer.
    """

    def _reduces(self, *, last: bool) -> bool:
        return last

    def _finish(self) -> None:
        self.model.finish_grad_sync()

    def _wrap(self) -> Any:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True,
            use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params",
            megatron_fsdp_main_params_dtype=None,
        )  # fmt: skip
        return FullyShardedDataParallel(self.config, ddp, self._gpt())


_CLASSES: dict[str, type[System]] = {
    "none": System,
    "dp": DataParallel,
    "ep": DataParallel,
    "tp": TensorParallel,
    "upstream_gtp": WeightSharded,
    "fsdp2": Fsdp2,
    "megatron_fsdp": MegatronFsdp,
    "etp_c10d": Etp,
    "etp_copy_engine": Etp,
    "etp_c10d_ep2": Etp,
    "etp_copy_engine_ep2": Etp,
}


def build(name: str, shape: Shape, options: BuildOptions) -> System:
    """Build one of :data:`benchmarks.train_shapes.SYSTEMS`. Collective."""
    return _CLASSES[name.removesuffix(GRAPH)](name, shape, options)


def _state_of(module: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name.startswith("_") and not name.startswith("__") and not callable(value):
            yield name, value
