"""Lets Megatron train over gloo on a machine without CUDA. With CUDA, nothing here is used.

:func:`records` lists every replacement with its reason. :func:`required_arguments` lists Megatron settings that only
make sense with CUDA, with the values that a CPU run needs.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings

import torch

from megatron_patches.cpu import gloo_threads, latent_projections, megatron_code, torch_cuda, uneven_gathers
from megatron_patches.cpu.arguments import check, check_layers, required_arguments, set_required_arguments
from megatron_patches.registry import PatchRecord

__all__ = [
    "check",
    "check_layers",
    "needed",
    "prepare_environment",
    "records",
    "required_arguments",
    "set_required_arguments",
    "silence_inapplicable_warnings",
]


def needed() -> bool:
    """Whether this machine lacks CUDA, so that :func:`records` apply."""
    return not torch.cuda.is_available()


def prepare_environment() -> None:
    """Set environment variables that Megatron or torch read at import time. Values set by the user are kept."""
    # Megatron's fused element-wise functions use torch.compile, which costs seconds in a small CPU run.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # Megatron's validation requires it with tensor parallelism; it has no effect without CUDA.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


# Warnings about what only GPUs can use, and about a kind of model that Megatron imports in every run.
_INAPPLICABLE = (
    "Apex is not installed.",
    "Transformer Engine and Apex are not installed.",
    "Only transformer-engine>=1.7.0 supports MoE experts, but your version is 0.0.0.",
    "'pin_memory' argument is set as true but no accelerator is found",
    "MimoModelConfig is experimental and still under active development.",
)


def silence_inapplicable_warnings() -> None:
    """Suppress warnings about what a CPU run does not use; those of ``warnings`` also in processes that it spawns."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
    # Here the random-state tracker forks the CPU's generator.
    tracker = logging.getLogger("megatron.core.tensor_parallel.random")
    tracker.addFilter(lambda record: "CPU RNG state changed within GPU RNG context" not in record.getMessage())
    for beginning in _INAPPLICABLE:
        warnings.filterwarnings("ignore", re.escape(beginning))
        option = f"ignore:{beginning}"
        if option not in sys.warnoptions:  # passed on by multiprocessing
            sys.warnoptions.append(option)


def records() -> tuple[PatchRecord, ...]:
    """Every replacement that a CPU run needs, torch's first, so that they are in place when Megatron is imported."""
    return (
        gloo_threads.RECORD,
        *torch_cuda.records(),
        *megatron_code.records(),
        latent_projections.RECORD,
        uneven_gathers.RECORD,
    )
