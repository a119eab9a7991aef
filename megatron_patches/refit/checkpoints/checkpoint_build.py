"""Builds the model of a checkpoint's arguments with Megatron's own builders, at other parallel sizes.

The model has only weights: no optimizer, no data, no gradient buffers. Training settings with which it cannot be built
are refused first, each with its flag, its value and a remedy.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.checkpoints.checkpoint_sizes import SIZE_FLAGS, ParallelSizes, main_pattern
from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.errors import ExportError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

# Settings that affect training but not the model, each with its neutral value.
_NOT_TRAINED: dict[str, object] = {
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "context_parallel_size": 1,
    "hierarchical_context_parallel_sizes": None,
    "sequence_parallel": False,
    "tp_comm_overlap": False,
    "recompute_granularity": None,
    "cpu_offloading": False,
    "fine_grained_activation_offloading": False,
    "defer_embedding_wgrad_compute": False,
    "delay_wgrad_compute": False,
    "gradient_accumulation_fusion": False,
    "overlap_moe_expert_parallel_comm": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_enable_deepep": False,
    "moe_flex_dispatcher_backend": "deepep",
    "moe_shared_expert_overlap": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_paged_stash": False,
    "use_transformer_engine_op_fuser": False,
    "cuda_graph_impl": "none",
    "cuda_graph_modules": [],
    "cuda_graph_scope": None,
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "te_precision_config_file": None,
    "fp8": None,
    "fp4": None,
    "fp8_param_gather": False,
    "fp4_param_gather": False,
    "moe_router_padding_for_fp8": False,
    "moe_router_padding_for_quantization": False,
    "perform_initialization": False,
    "init_model_with_meta_device": False,
}


def build_chunks(args: argparse.Namespace, sizes: ParallelSizes) -> list[torch.nn.Module]:
    """This rank's part of the model, not yet loaded.

    Args:
        args: arguments saved in the checkpoint; changed to those of the model that is built.
        sizes: parallel sizes; Megatron's groups must have been made for them.

    Returns:
        One module per virtual pipeline stage, wrapped for bf16 or fp16 if the run was.

    Raises:
        ExportError: if Megatron refuses to build it.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
    from megatron.training.models import GPTModelBuilder, HybridModelBuilder, build_virtual_pipeline_stages

    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks: list[torch.nn.Module]
    try:
        _ask_for_weights_alone(args, sizes)
        hybrid = args.hybrid_layer_pattern is not None
        config = hybrid_config_from_args(args) if hybrid else gpt_config_from_args(args)
        builder = HybridModelBuilder(config) if hybrid else GPTModelBuilder(config)
        with _attention_that_can_be_built(config.transformer):
            chunks = build_virtual_pipeline_stages(
                builder.build_model, groups, args.virtual_pipeline_model_parallel_size
            )
    except (AssertionError, AttributeError, ImportError, NotImplementedError, TypeError, ValueError) as error:
        spread = ", ".join(
            f"{SIZE_FLAGS[name]} {getattr(sizes, name)}" for name in SIZE_FLAGS if getattr(sizes, name) is not None
        )
        raise ExportError(
            f"Megatron cannot build the model of these arguments at {spread}: {describe_error(error)}; change "
            "the sizes, or the setting that it names"
        ) from error
    if not args.use_cpu_initialization:
        chunks = [chunk.cuda() for chunk in chunks]
    if args.bf16 or args.fp16:
        chunks = [Float16Module(config.transformer, chunk) for chunk in chunks]
    return chunks


def _ask_for_weights_alone(args: argparse.Namespace, sizes: ParallelSizes) -> None:
    """Reduces the saved arguments to what a model needs that is only exported, and sets the given sizes."""
    import torch

    from megatron_patches import cpu

    spread: dict[str, object] = {
        "tensor_model_parallel_size": sizes.tensor,
        "tensor_parallel_num_weight_shards": sizes.tensor * sizes.etp if sizes.etp > 1 else None,
        "gtp_weight_remat_size": sizes.etp,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.chunks if sizes.chunks > 1 else None,
        "decoder_first_pipeline_num_layers": sizes.first,
        "decoder_last_pipeline_num_layers": sizes.last,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.experts_tensor,
        "expert_tensor_parallel_num_weight_shards": (
            sizes.experts_tensor * sizes.expert_etp if sizes.expert_etp > 1 else None
        ),
        "expert_gtp_weight_remat_size": sizes.expert_etp,
        "use_cpu_initialization": not torch.cuda.is_available(),
    }
    for name, value in (spread | _NOT_TRAINED).items():
        setattr(args, name, value)
    if args.padded_vocab_size is not None:
        args.padded_vocab_size = -(-args.padded_vocab_size // sizes.tensor) * sizes.tensor
    if importlib.util.find_spec("transformer_engine") is None:
        args.transformer_impl = "local"
    if cpu.needed():
        cpu.set_required_arguments(args)
    if args.hybrid_layer_pattern is not None:
        args.hybrid_layer_pattern = _staged(args.hybrid_layer_pattern, sizes)
        # The pattern already contains these, and Megatron rejects both.
        args.decoder_first_pipeline_num_layers = args.decoder_last_pipeline_num_layers = None


def _staged(pattern: str, sizes: ParallelSizes) -> str:
    """A hybrid model's layers, with Megatron's separator between the chunks of pipeline stages."""
    layers, slash, mtp = main_pattern(pattern), *pattern.partition("/")[1:]
    ends = accumulate(sizes.chunk_layers(len(layers)), initial=0)
    return "|".join(layers[low:high] for low, high in pairwise(ends)) + slash + mtp


@contextlib.contextmanager
def _attention_that_can_be_built(config: Any) -> Iterator[None]:
    """Allows building a model with multi-latent attention where Transformer Engine is not installed.

    Megatron's own attention product supports no heads whose keys are wider than their values, so that the parameters
    around it could not be created either. The product has no parameters, and nothing is computed here.
    """
    if not config.multi_latent_attention or config.transformer_impl != "local":
        yield
        return
    import torch
    from megatron.core.models.backends import LocalSpecProvider

    class ProductLeftOut(torch.nn.Module):
        """Replaces a product that is never computed."""

        def __init__(self, **settings: object) -> None:  # noqa: ARG002 - settings of the product
            super().__init__()

    original = LocalSpecProvider.core_attention
    LocalSpecProvider.core_attention = lambda _self: ProductLeftOut
    try:
        yield
    finally:
        LocalSpecProvider.core_attention = original


_NO_FORM = "train without it: no Hugging Face architecture that is written here has it"
# Megatron's arguments: name, flag, remedy. A model that can be built has none of them set.
_SETTINGS: Sequence[tuple[str, str, str]] = (
    ("yaml_cfg", "--yaml-cfg", "train with flags: the file replaces the arguments that the model is built from"),
    ("heterogeneous_layers_config_path", "--heterogeneous-layers-config-path", _NO_FORM),
    ("experimental_attention_variant", "--experimental-attention-variant", _NO_FORM),
    ("mla_down_proj_fusion", "--mla-down-proj-fusion", "train without it: the fused projection has no mapping"),
    ("moe_single_grouped_weight", "--moe-single-grouped-weight", "train without it: experts are mapped one by one"),
    (
        "moe_expert_rank_capacity_factor",
        "--moe-expert-rank-capacity-factor",
        "train without it: no Hugging Face architecture drops tokens",
    ),
)


def refuse_unbuildable(args: argparse.Namespace) -> None:
    """Raises if the model of these arguments cannot be built, before any of it is built.

    Args:
        args: arguments saved in the checkpoint.

    Raises:
        UnsupportedModelError: with each setting, its value and the remedy.
    """
    found = [*_set_clauses(args), *_spec_clauses(args), *_latent_clauses(args), *_hybrid_clauses(args)]
    if found:
        raise UnsupportedModelError("cannot build this model: " + "; ".join(found))


def _set_clauses(args: argparse.Namespace) -> Iterator[str]:
    for name, flag, way_out in _SETTINGS:
        value = getattr(args, name, None)
        if value:
            yield f"{flag} {value}: {way_out}"


def _spec_clauses(args: argparse.Namespace) -> Iterator[str]:
    """Megatron silently builds another model if it cannot import the layers of --spec, so this checks the import."""
    spec = getattr(args, "spec", None)
    if not spec:
        return
    shown = " ".join(spec)
    if len(spec) != 2:
        yield f"--spec {shown}: train with a module and a name in it"
        return
    module, name = spec
    try:
        if not hasattr(importlib.import_module(module), name):
            yield f"--spec {shown}: {module} has no {name}; install the version that the run was trained with"
    except ImportError as error:
        yield f"--spec {shown}: {error}; make it importable, for example through PYTHONPATH"


def _latent_clauses(args: argparse.Namespace) -> Iterator[str]:
    whole_query = getattr(args, "multi_latent_attention", False) and getattr(args, "q_lora_rank", None) is None
    if whole_query and getattr(args, "qk_layernorm", False) and not _importable("transformer_engine"):
        yield (
            "--q-lora-rank None: Megatron builds multi-latent attention without a compressed query with "
            "transformer_engine only, and it cannot be imported; install it, or run this where it is"
        )


def _hybrid_clauses(args: argparse.Namespace) -> Iterator[str]:
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern is None:
        return
    spec = getattr(args, "spec", None)
    if spec and not spec[0].startswith("megatron."):
        return  # the user's own layers
    needed = ["transformer_engine", *(["mamba_ssm"] if "M" in pattern else [])]
    missing = [name for name in needed if not _importable(name)]
    if missing:
        yield (
            f"--hybrid-layer-pattern {pattern}: Megatron builds such layers with {' and '.join(needed)} only, and "
            f"{' and '.join(missing)} cannot be imported; install it, or run this where it is"
        )


def _importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
