"""Megatron's arguments on a machine without CUDA: the values that it needs, and those that are refused."""

from __future__ import annotations

import argparse
import logging

from etp.config import TransportName
from megatron_patches.arguments import UnsupportedConfigurationError

logger = logging.getLogger(__name__)


def required_arguments() -> dict[str, object]:
    """Values that a CPU run needs for Megatron's parsed arguments; the defaults are for CUDA."""
    from megatron.core.transformer.enums import AttnBackend

    return {
        "distributed_backend": "gloo",
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "attention_backend": AttnBackend.unfused,
        "no_persist_layer_norm": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_gelu_fusion": False,
        "bias_swiglu_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "num_workers": 0,
    }


def check_layers(args: argparse.Namespace) -> None:
    """Refuse settings that need Transformer Engine's layers or kernels. Call before Megatron's own checks.

    Raises:
        UnsupportedConfigurationError: naming the flag.
    """
    if args.transformer_impl != "local":
        return
    megatrons = (args.spec or ["megatron."])[0].startswith("megatron.")
    megatrons_hybrid = args.hybrid_layer_pattern is not None and megatrons
    # Megatron frees the outputs of these, and asks Transformer Engine first whether FP8 is on.
    recomputed = sorted({"gdn_norm_out", "layernorm", "mla_up_proj", "moe_act"} & set(args.recompute_modules or ()))
    for wanted, flag, instead in (
        (args.context_parallel_size > 1, f"--context-parallel-size {args.context_parallel_size}", "use 1"),
        (args.moe_grouped_gemm, "--moe-grouped-gemm", "drop it, and each expert is a GEMM of its own"),
        (args.use_precision_aware_optimizer, "--use-precision-aware-optimizer", "drop it"),
        # Megatron's own norms are torch's: input and weight have one type, and the weight is not centred at zero.
        (args.fp32_residual_connection and megatrons, "--fp32-residual-connection", "drop it"),
        (args.layernorm_zero_centered_gamma and megatrons, "--apply-layernorm-1p", "drop it"),
        (bool(recomputed), f"--recompute-modules {' '.join(recomputed)}", "recompute others, such as mlp"),
        (megatrons_hybrid, "--hybrid-layer-pattern", "train a GPT model, or name layers of your own with --spec"),
    ):
        if wanted:
            raise UnsupportedConfigurationError(
                f"{flag} needs Transformer Engine's kernels, and with them CUDA, which this machine does not have; "
                f"{instead}"
            )


def check(args: argparse.Namespace) -> None:
    """Refuse settings that need CUDA and would fail, or hang, during training.

    Raises:
        UnsupportedConfigurationError: for CUDA graphs, and for checkpoints written by another process.
    """
    if args.cuda_graph_impl != "none":
        raise UnsupportedConfigurationError(
            f"--cuda-graph-impl {args.cuda_graph_impl} needs CUDA, which this machine does not have; use none"
        )
    if args.etp_transport == TransportName.COPY_ENGINE.value:
        raise UnsupportedConfigurationError(
            "--etp-transport copy_engine copies between GPUs, which this machine does not have; use c10d or auto"
        )
    if args.async_save:
        raise UnsupportedConfigurationError(
            "--async-save needs CUDA, which this machine does not have: the process that writes looks for its GPU, and "
            "the training waits for it; drop it"
        )


def set_required_arguments(args: argparse.Namespace) -> None:
    """Give ``args`` the values of :func:`required_arguments` and log, on rank 0, which of them changed."""
    changed = []
    for name, value in required_arguments().items():
        if getattr(args, name) != value:
            setattr(args, name, value)
            changed.append(f"{name}={getattr(value, 'name', value)}")
    if changed and getattr(args, "rank", 0) == 0:
        logger.warning("no CUDA device: running on CPU with %s", ", ".join(changed))
