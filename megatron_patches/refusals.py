"""Lists the Megatron settings that Extended Tensor Parallelism does not support, each with the alternative.

:mod:`megatron_patches.arguments` raises for the first one that is set.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass

from etp.formats import MXFP8, NVFP4, Float8Block
from etp.te import GROUPED_TENSOR_VARIABLE, OVERRIDE_VARIABLE, grouped_tensors_are_default, too_old_for

FP8_RECIPES = {
    "blockwise": Float8Block.row_alignment,
    # The format needs none, but Transformer Engine checks the rows of a shard as if it multiplied with the shard.
    "tensorwise": 8,
    "mxfp8": MXFP8.row_alignment,
}
"""The values of ``--fp8-recipe`` that are supported, each with the row alignment of shards that it needs."""

FP4_ALIGNMENT = NVFP4.row_alignment
"""The row alignment of shards that ``--fp4-format`` needs."""

FOUR_OVER_SIX_VARIABLE = "NVTE_NVFP4_4OVER6"
"""Says which tensors Transformer Engine quantizes to FP4 with a choice of two scales for each block."""

MUON_RELEASE = "0.3"
"""The release of emerging-optimizers whose step :class:`megatron_patches.muon.ShardedMuon` reproduces."""


def has_muon() -> bool:
    """Whether emerging-optimizers is installed in that release."""
    try:
        return importlib.metadata.version("emerging-optimizers").startswith(f"{MUON_RELEASE}.")
    except importlib.metadata.PackageNotFoundError:
        return False


@dataclass(frozen=True)
class Refusal:
    """A setting that Extended Tensor Parallelism does not support, and the alternative.

    Attributes:
        culprit: what to call it, with the names of arguments in braces in place of their values.
        applies: whether it is set.
        way_out: what to do instead, and why.
    """

    culprit: str
    applies: Callable[[argparse.Namespace], bool]
    way_out: str


def _get(args: argparse.Namespace, name: str) -> object:
    return getattr(args, name, None)


def _is_set(name: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: bool(_get(args, name))


def dense_size(args: argparse.Namespace) -> int:
    """Number of ranks that hold one copy of the dense weights, without sharding."""
    size: int = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    return size


def expert_size(args: argparse.Namespace) -> int:
    """Number of ranks that hold one copy of the experts, without sharding."""
    tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    size: int = tensor * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    return size


def _stages_with_mtp(args: argparse.Namespace) -> list[list[bool]]:
    """For each rank of the pipeline and each of its stages in ``--pipeline-model-parallel-layout``, if it has MTP."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = PipelineParallelLayerLayout(args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size)
    return [[LayerType.mtp in stage for stage in rank] for rank in layout.layout]


def _has_mtp_apart_from_the_embeddings(args: argparse.Namespace) -> bool:
    """Whether a later stage of the first pipeline rank, which has the embeddings in another chunk, has MTP layers."""
    return bool(_get(args, "pipeline_model_parallel_layout")) and any(_stages_with_mtp(args)[0][1:])


def _saves_tied_embeddings_with_mtp(args: argparse.Namespace) -> bool:
    """Whether checkpoints are saved of a last stage with embeddings, for MTP layers, and an output layer besides."""
    has_mtp = bool(_get(args, "mtp_num_layers")) or "/" in str(_get(args, "hybrid_layer_pattern") or "")
    untied = bool(_get(args, "untie_embeddings_and_output_weights"))
    if not (_get(args, "save") and has_mtp and args.pipeline_model_parallel_size > 1) or untied:
        return False
    return not _get(args, "pipeline_model_parallel_layout") or _stages_with_mtp(args)[-1][-1]


def _has_sparse_attention(args: argparse.Namespace) -> bool:
    patterns = ("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern")
    return any("D" in str(_get(args, name) or "") for name in patterns)


def _fp8_recipe(args: argparse.Namespace) -> object:
    """The recipe of FP8; empty without FP8."""
    return _get(args, "fp8_recipe") if _get(args, "fp8") else ""


def _quantizes_apart(args: argparse.Namespace) -> bool:
    """Whether rows and columns of weights are quantized apart; see [Note: apart] in ``etp/formats/base.py``."""
    return bool(_get(args, "fp4")) or _fp8_recipe(args) == "mxfp8"


def _offloads_sharded_layers(args: argparse.Namespace) -> bool:
    """Whether a layer with sharded weights runs under fine-grained offloading's hooks on saved tensors."""
    dense = ("qkv_linear", "attn_proj") if args.etp_size > 1 else ()
    experts = ("expert_fc1",) if args.expert_etp_size > 1 else ()
    offloaded: list[str] = getattr(args, "offload_modules", None) or []
    return bool(_get(args, "fine_grained_activation_offloading")) and any(
        name in offloaded for name in (*dense, *experts)
    )


def _graph_modules(args: argparse.Namespace) -> set[str]:
    """The modules in ``--cuda-graph-modules``; Megatron converts the names to enum members."""
    modules: list[object] = getattr(args, "cuda_graph_modules", None) or []
    return {str(getattr(module, "name", module)) for module in modules}


def _splits_layers(args: argparse.Namespace) -> bool:
    """Whether attention, MLP and experts may be separate layers: in hybrid models, or with a specification."""
    return bool(_get(args, "hybrid_layer_pattern")) or _get(args, "spec") is not None


def _captures_any_number_of_tokens(args: argparse.Namespace) -> bool:
    """Whether captured experts have a token count that the host reads in each pass, which a capture forbids."""
    if not args.num_experts or _get(args, "moe_token_dispatcher_type") not in ("allgather", "alltoall"):
        return False
    if _get(args, "moe_expert_capacity_factor") is not None and _get(args, "moe_pad_expert_input_to_capacity"):
        return False
    if args.cuda_graph_impl == "full_iteration":
        return True
    modules = _graph_modules(args)
    routed = bool(modules & {"moe_router", "moe_preprocess"}) or ("attn" in modules and not _splits_layers(args))
    return args.cuda_graph_impl == "local" and (not modules or routed)


_FLAGS = {
    "delay_wgrad_compute": "drop it: the weight gradient must exist when its reduce-scatter starts",
    "defer_embedding_wgrad_compute": "drop it: the weight gradient must exist when its reduce-scatter starts",
    "tp_comm_overlap": "drop it: it has never been run with sharded weights, and its kernels wait for other ranks on "
    "the GPU, as gathers do, so they could block each other",
    "moe_single_grouped_weight": "drop it: experts are sharded one weight at a time",
    "use_transformer_engine_op_fuser": "drop it: fused operations read weights that nobody has gathered",
    "cpu_offloading_num_layers": "use --recompute-granularity: offloading replaces the shards that layers save for "
    "backward by plain tensors",
    "use_grouped_gemm_for_shared_expert": "drop it: fused operations read weights that nobody has gathered",
    "mtp_detach_heads": "drop it: the detached output weight is a shard that nobody can gather",
    "qk_clip": "drop it: it scales the rows of a shard as if they were those of the whole weight",
    "mla_down_proj_fusion": "drop it: its checkpoints divide the rows of a shard as if they were those of the whole "
    "weight",
    "moe_use_upcycling": "convert the checkpoint in a run without it first: experts are cut otherwise than the dense "
    "weights they copy",
    "use_megatron_fsdp": "choose one: both shard the same weights over the data-parallel ranks",
    "use_torch_fsdp2": "choose one: both shard the same weights over the data-parallel ranks",
    "distrib_optim_fully_reshardable_mem_efficient": "drop it: it does not know the shards' place in the full weight",
    "ddp_average_in_collective": "drop it: its average leaves out the shard group",
    "overlap_param_gather_with_optimizer_step": "drop it: megatron-core has it only for --ckpt-format torch, which "
    "does not record where each shard lies",
    "hybrid_context_parallel": "drop it: it spreads sequences over data-parallel ranks without regard to the shard "
    "group",
    "perform_rl_step": "push weights into vLLM with --refit-engines: Megatron's own inference reads weights that "
    "nobody has gathered",
    "data_parallel_random_init": "drop it: ranks of a shard group would draw different weights, and the broadcast from "
    "one replica leaves them different",
    "init_model_with_meta_device": "drop it: weights are cut as they are created",
    "inprocess_restart": "restart the processes, with torchrun --max-restarts: the model of before the fault outlives "
    "it in a process, and the next iteration would wait for its collectives",
    "reuse_grad_buf_for_mxfp8_param_ag": "drop it: parameters stay in bf16, and are gathered in MXFP8 without it",
    "fp8_output_proj": "drop it: the output layer gathers its weight in bf16",
    "fp8_param_gather": "drop it: weights are gathered in FP8 without it, and stay in bf16 as parameters",
    "fp4_param_gather": "drop it: weights are gathered in FP4 without it, and stay in bf16 as parameters",
    "te_precision_config_file": "drop it, and train in bf16 or fp32: it can quantize layers without --fp8-format",
    "kitchen_config_file": "drop it, and train in bf16 or fp32: its layers quantize without --fp8-format",
    "save_wgrads_interval": "drop it: it would write one rank's shards of the gradients under the names of the whole "
    "weights",
    "save_params_interval": "use --save-interval: it would write one rank's shards under the names of the whole "
    "weights",
}
"""Flags of Megatron that are refused wherever they are set, each with the alternative."""

REFUSALS = (
    *(Refusal(f"--{name.replace('_', '-')}", _is_set(name), way_out) for name, way_out in _FLAGS.items()),
    Refusal(
        "--vocab-size {vocab_size}",
        lambda args: (size := getattr(args, "vocab_size", None)) is not None and size < 1,
        "give the number of entries of the vocabulary, or leave it to the tokenizer",
    ),
    Refusal(
        "--overlap-dispatch-backward-with-experts-wgrad and sharded experts",
        lambda args: bool(_get(args, "overlap_dispatch_backward_with_experts_wgrad")) and args.expert_etp_size > 1,
        "drop it, or --expert-etp-size: the weight gradient must exist when its reduce-scatter starts",
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm and --overlap-grad-reduce",
        lambda args: (
            bool(_get(args, "overlap_moe_expert_parallel_comm"))
            and bool(_get(args, "overlap_grad_reduce"))
            and not (args.pipeline_model_parallel_size > 1 and _get(args, "align_grad_reduce"))
        ),
        "drop --overlap-grad-reduce: each part of a layer has a backward pass of its own, and Megatron would count "
        "gradients whose reduction ends in the next as missing",
    ),
    Refusal(
        f"{GROUPED_TENSOR_VARIABLE} in the environment and sharded experts",
        lambda args: grouped_tensors_are_default() and args.expert_etp_size > 1,
        "unset it: Transformer Engine would not ask for the experts' weights again, and they would silently not train",
    ),
    Refusal(
        f"{OVERRIDE_VARIABLE}=high_precision in the environment",
        lambda _: os.environ.get(OVERRIDE_VARIABLE) == "high_precision",
        "unset it: Transformer Engine's backward pass would compute with shards in place of weights",
    ),
    Refusal(
        f"{OVERRIDE_VARIABLE}=dequantized in the environment with --fp8-recipe mxfp8 or --fp4-format",
        lambda args: os.environ.get(OVERRIDE_VARIABLE) == "dequantized" and _quantizes_apart(args),
        "unset it: in these formats, backward passes gather columns, not what the forward pass multiplied",
    ),
    Refusal(
        f"{FOUR_OVER_SIX_VARIABLE}=weights or all in the environment with --fp4-format",
        lambda args: bool(_get(args, "fp4")) and os.environ.get(FOUR_OVER_SIX_VARIABLE) in ("weights", "all"),
        "unset it, or set it to activations: of weights it is not implemented",
    ),
    Refusal(
        "--offload-modules with sharded weights (qkv_linear, attn_proj, and expert_fc1 with --expert-etp-size)",
        _offloads_sharded_layers,
        "drop those modules: offloading replaces the shards that they save for backward by plain tensors",
    ),
    Refusal(
        "--transformer-impl inference_optimized",
        lambda args: args.transformer_impl == "inference_optimized",
        "use --transformer-impl transformer_engine: these layers read weights that nobody has gathered",
    ),
    Refusal(
        "--experimental-attention-variant dsa",
        lambda args: _get(args, "experimental_attention_variant") == "dsa",
        "drop it: it reads an up-projection that nobody has gathered",
    ),
    Refusal(
        "layers of DeepSeek sparse attention (D) in --hybrid-layer-pattern",
        _has_sparse_attention,
        "use another attention: it reads an up-projection that nobody has gathered",
    ),
    Refusal(
        "--pipeline-model-parallel-layout {pipeline_model_parallel_layout}",
        _has_mtp_apart_from_the_embeddings,
        "put the MTP layers (m) on another rank than the first: Megatron shares the embeddings between ranks, so those "
        "of a later stage of the first one would stay zero",
    ),
    Refusal(
        "--save, MTP layers on the last pipeline stage and tied embeddings",
        _saves_tied_embeddings_with_mtp,
        "add --untie-embeddings-and-output-weights, or put the MTP layers (m) on another stage than the last with "
        "--pipeline-model-parallel-layout: megatron-core could not save the unused output layer of that stage",
    ),
    Refusal(
        "--ckpt-format {ckpt_format}",
        lambda args: args.ckpt_format != "torch_dist",
        "use --ckpt-format torch_dist, which records where each shard lies",
    ),
    Refusal(
        "--ckpt-convert-format torch",
        lambda args: _get(args, "ckpt_convert_format") == "torch",
        "convert in a run with --etp-size 1, which loads the same checkpoint: that format would keep one shard of each "
        "weight only",
    ),
    Refusal(
        "--non-persistent-ckpt-type local",
        lambda args: args.non_persistent_ckpt_type == "local",
        "use --non-persistent-ckpt-type global",
    ),
    Refusal(
        "--num-distributed-optimizer-instances {num_distributed_optimizer_instances}",
        lambda args: getattr(args, "num_distributed_optimizer_instances", 1) > 1,
        "drop it: Megatron shards the optimizer's state over all replicas of a shard",
    ),
    Refusal(
        "--use-tp-pp-dp-mapping and --pipeline-model-parallel-size {pipeline_model_parallel_size}",
        lambda args: (
            bool(_get(args, "use_tp_pp_dp_mapping"))
            and args.pipeline_model_parallel_size > 1
            and args.world_size // (dense_size(args) * args.etp_size)
            != args.world_size // (expert_size(args) * args.expert_etp_size)
        ),
        "drop --use-tp-pp-dp-mapping: with it, Megatron needs as many replicas of experts as of dense weights, even in "
        "a model without experts",
    ),
    Refusal(
        "--use-cpu-initialization with --transformer-impl transformer_engine",
        lambda args: args.use_cpu_initialization and args.transformer_impl == "transformer_engine",
        "drop one: Transformer Engine's weights are filled after they were cut",
    ),
    Refusal(
        "--fp8-recipe {fp8_recipe}",
        lambda args: _fp8_recipe(args) not in ("", *FP8_RECIPES),
        "use --fp8-recipe blockwise, tensorwise or mxfp8: weights are gathered in FP8 with these",
    ),
    Refusal(
        "--fp8-recipe mxfp8 on a GPU before Blackwell",
        lambda args: _fp8_recipe(args) == "mxfp8" and bool(too_old_for(MXFP8)),
        "use --fp8-recipe blockwise: below compute capability 10.0, Transformer Engine's quantization writes nothing",
    ),
    Refusal(
        "--fp8-format without Transformer Engine",
        lambda args: bool(_get(args, "fp8")) and _get(args, "transformer_impl") != "transformer_engine",
        "use --transformer-impl transformer_engine, which needs GPUs",
    ),
    Refusal(
        "--fp4-format on a GPU before Blackwell",
        lambda args: bool(_get(args, "fp4")) and bool(too_old_for(NVFP4)),
        "use --fp8-format e4m3 --fp8-recipe blockwise: NVFP4 needs compute capability 10.0",
    ),
    Refusal(
        "--fp4-recipe {fp4_recipe}",
        lambda args: bool(_get(args, "fp4")) and _get(args, "fp4_recipe") != "nvfp4",
        "use --fp4-recipe nvfp4: weights are gathered in FP4 with it",
    ),
    Refusal(
        "--fp4-format without Transformer Engine",
        lambda args: bool(_get(args, "fp4")) and _get(args, "transformer_impl") != "transformer_engine",
        "use --transformer-impl transformer_engine, which needs GPUs",
    ),
    Refusal(
        "--kitchen-recipe-number",
        # 0 is a recipe.
        lambda args: _get(args, "kitchen_recipe_number") is not None,
        "drop it, and train in bf16 or fp32: its layers quantize without --fp8-format",
    ),
    Refusal(
        "--optimizer {optimizer}",
        lambda args: args.optimizer not in ("adam", "lion", "sgd", "muon"),
        "use --optimizer adam, lion, sgd or muon: the others would take each shard for a whole matrix",
    ),
    Refusal(
        "--optimizer muon or lion and --use-distributed-optimizer",
        lambda args: args.optimizer in ("lion", "muon") and args.use_distributed_optimizer,
        "drop --use-distributed-optimizer, which gives each replica of a shard other weights to step; their state is "
        "sharded without it",
    ),
    Refusal(
        f"--optimizer muon without emerging-optimizers {MUON_RELEASE}",
        lambda args: args.optimizer == "muon" and not has_muon(),
        f"pip install 'emerging-optimizers=={MUON_RELEASE}.*', whose step the one of sharded weights follows",
    ),
)

GRAPH_REFUSALS = (
    Refusal(
        "--cuda-graph-impl transformer_engine",
        lambda args: args.cuda_graph_impl == "transformer_engine",
        "use --cuda-graph-impl full_iteration or local: megatron-core joins the communication of sharded weights to "
        "the graphs of these two alone",
    ),
    Refusal(
        "--cuda-graph-impl full_iteration and stages that wait for each other",
        lambda args: (
            args.cuda_graph_impl == "full_iteration"
            and args.pipeline_model_parallel_size > 1
            and not args.overlap_p2p_comm
        ),
        "set --num-layers-per-virtual-pipeline-stage and leave --no-overlap-p2p-communication out: otherwise "
        "megatron-core waits for the device in each exchange, which a capture forbids",
    ),
    Refusal(
        "--cuda-graph-impl full_iteration and --overlap-param-gather",
        lambda args: args.cuda_graph_impl == "full_iteration" and args.overlap_param_gather,
        "drop --overlap-param-gather: its gathers begin in the optimizer step, outside of the graph that uses them",
    ),
    Refusal(
        "--cuda-graph-impl local and pipeline stages",
        lambda args: args.cuda_graph_impl == "local" and args.pipeline_model_parallel_size > 1,
        "use --cuda-graph-impl full_iteration with --num-layers-per-virtual-pipeline-stage: megatron-core frees the "
        "output of a stage, and asserts that it is not a view, which the output of a layer's graph is",
    ),
    Refusal(
        "--cuda-graph-impl local and --etp-reduce-once-per-iteration",
        lambda args: args.cuda_graph_impl == "local" and args.etp_reduce_once_per_iteration,
        "drop one: each layer's graph finishes its own gradients; full_iteration graphs do go with it",
    ),
    Refusal(
        "--cuda-graph-impl local where only experts are sharded",
        lambda args: args.cuda_graph_impl == "local" and args.etp_size == 1,
        "use --cuda-graph-impl full_iteration, or shard the dense weights as well",
    ),
    Refusal(
        "--cuda-graph-modules moe outside of a hybrid model",
        lambda args: args.cuda_graph_impl == "local" and "moe" in _graph_modules(args) and not _splits_layers(args),
        "drop it: megatron-core captures the experts of a layer only in models of --hybrid-layer-pattern",
    ),
    Refusal(
        "CUDA graphs of experts that take any number of tokens",
        _captures_any_number_of_tokens,
        "set --moe-expert-capacity-factor and --moe-pad-expert-input-to-capacity, or capture none of the experts: "
        "--cuda-graph-impl local with --cuda-graph-modules attn in a model of --hybrid-layer-pattern",
    ),
)
"""Checked after Megatron's own checks, because these turn older flags into ``--cuda-graph-impl``."""
