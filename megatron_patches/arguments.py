"""Defines the flags of Extended Tensor Parallelism, their effect on Megatron, and which settings they exclude.

:func:`add_arguments` adds the flags to any Megatron script's parser, :func:`apply_to_megatron` sets Megatron's own
settings from them, :func:`check` and :func:`check_graphs` raise for combinations that would train incorrectly, and
:func:`config_from_args` returns the engine's options. None of them imports Megatron; ``megatron_patches.command_line``
connects them to Megatron's parser.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etp.config import EtpConfig, GradReduction, TransportName
from megatron_patches.refusals import GRAPH_REFUSALS, REFUSALS, Refusal, dense_size, expert_size

_LATEST = "latest_checkpointed_iteration.txt"
"""The file that Megatron writes next to its checkpoints."""

_DIVISORS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "micro_batch_size",
    "eval_micro_batch_size",
)
"""Sizes that are divided by here, before Megatron checks them."""


class UnsupportedConfigurationError(ValueError):
    """A combination of settings that Extended Tensor Parallelism cannot train correctly."""


@dataclass(frozen=True, kw_only=True)
class MegatronEtpConfig:
    """Options of Extended Tensor Parallelism in a Megatron run.

    Attributes:
        engine: options of the engine; Megatron's loss normalisation determines its ``grad_reduction``.
        print_chains: print the order in which weights are gathered, once it is known.
        parameters_in_place: let peers read shards where they are, in symmetric memory, if the transport does so. Such
            memory cannot be shared with another process of this rank.
    """

    engine: EtpConfig = field(default_factory=EtpConfig)
    print_chains: bool = False
    parameters_in_place: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to ``parser`` and return it."""
    group = parser.add_argument_group(
        title="extended tensor parallelism (ETP)",
        description="Shards every linear weight, its gradient and its optimizer state over one more group of ranks, "
        "laid along data parallelism: the ranks of a group see different microbatches. This is NOT Megatron's expert "
        "tensor parallelism (--expert-tensor-parallel-size), which is also written ETP.",
    )
    _add_sizes(group)
    _add_gathering(group)
    _add_reducing(group)
    _add_diagnosis(group)
    return parser


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--etp-size",
        type=int,
        metavar="N",
        help="Shard each weight, on top of tensor parallelism, over N ranks; N divides the data-parallel size. "
        "Default: 1, a stock run.",
    )
    group.add_argument(
        "--expert-etp-size",
        type=int,
        metavar="N",
        help="Shard each expert's weights over N ranks, on top of expert tensor parallelism and apart from "
        "--etp-size. Default: 1.",
    )
    group.add_argument(
        "--etp-pad-for-alignment",
        type=int,
        default=EtpConfig().pad_for_alignment,
        metavar="ROWS",
        help="Pad weights so that each shard's rows are a multiple of this; 0 forbids padding, and a weight that does "
        "not divide is an error. --fp8-recipe blockwise raises it to a multiple of 128, mxfp8 of 32, tensorwise of 8. "
        "Padding never reaches a checkpoint. Default: %(default)s.",
    )


def _add_gathering(group: argparse._ArgumentGroup) -> None:
    defaults = EtpConfig()
    group.add_argument(
        "--etp-transport",
        choices=[name.value for name in TransportName],
        default=defaults.transport.value,
        help="What moves the shards: c10d is torch.distributed (NCCL, gloo), copy_engine is peer copies between GPUs "
        "of one host, hierarchical takes two steps over several hosts, between and within them, auto is the fastest "
        "one that every rank of a group can use. Default: %(default)s.",
    )
    group.add_argument(
        "--etp-prefetch-depth",
        type=int,
        default=defaults.prefetch_depth,
        metavar="N",
        help="Gather weights ahead of compute by up to N times the largest weight's bytes; 0 gathers each when it is "
        "needed. Default: %(default)s.",
    )
    group.add_argument(
        "--etp-resident-bytes",
        type=int,
        default=defaults.resident_bytes,
        metavar="BYTES",
        help="Bytes of gathered weights that may stay between forward and backward, to save gathers where there is "
        "memory to spare. Default: %(default)s.",
    )


def _add_reducing(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--etp-reduce-once-per-iteration",
        action="store_true",
        help="Add up the microbatches' weight gradients locally, at full size, and reduce-scatter once per iteration: "
        "less traffic, more memory. Default: one reduce-scatter per microbatch.",
    )
    group.add_argument(
        "--etp-fp32-accumulation",
        action=argparse.BooleanOptionalAction,
        default=EtpConfig().fp32_accumulation,
        help="Sum the ranks' gradients in fp32 and in rank order; otherwise in the gradients' own type, by the "
        "backend's reduce-scatter. copy_engine sums those of shards in fp32 anyway. Default: in fp32.",
    )


def _add_diagnosis(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--etp-print-chains",
        action="store_true",
        help="Print, after the first iteration, the order in which weights are gathered.",
    )
    group.add_argument(
        "--etp-timeout",
        type=float,
        metavar="SECONDS",
        help="Wait this long for a collective before ending with an error that names it and the weight. Default: the "
        "process group's own, see --distributed-timeout-minutes.",
    )


def apply_to_megatron(args: argparse.Namespace) -> None:
    """Set ``args.etp_size``, ``args.expert_etp_size``, and the Megatron settings that follow from them.

    These are the shard counts, the only distributed-optimizer checkpoint layout that supports shards, the batch size if
    the user gave none, and no overlap of reductions over a single replica.

    A user may pass either the flags of this package or Megatron's ``--[expert-]tensor-parallel-num-weight-shards``.

    Raises:
        UnsupportedConfigurationError: if a size is below 1, both are given and disagree, or a number of shards is not a
            multiple of tensor parallelism.
    """
    for name in _DIVISORS:
        if (value := getattr(args, name)) is not None and value < 1:
            raise UnsupportedConfigurationError(f"{_option(name)} is {value}; it must be at least 1")
    expert_tensor_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    for flag, shards_flag, tensor_size in (
        ("etp_size", "tensor_parallel_num_weight_shards", args.tensor_model_parallel_size),
        ("expert_etp_size", "expert_tensor_parallel_num_weight_shards", expert_tensor_size),
    ):
        size = _size(args, flag, shards_flag, tensor_size)
        setattr(args, flag, size)
        if size > 1:
            setattr(args, shards_flag, size * tensor_size)
    if not is_active(args):
        return
    if args.use_distributed_optimizer:
        # Megatron's default layout stores flat buffers that contain the shards' padding; this one stores no padding.
        args.dist_ckpt_optim_fully_reshardable = True
    if args.global_batch_size is None and args.micro_batch_size is not None:
        # Megatron's default is one microbatch per replica; with shards, each rank of a shard group also reads its own.
        args.global_batch_size = args.micro_batch_size * (args.world_size // dense_size(args))
    if _has_one_replica(args):
        # There is nothing to reduce or gather, but Megatron would start a collective for each bucket.
        args.overlap_grad_reduce = args.overlap_param_gather = False


def _size(args: argparse.Namespace, flag: str, shards_flag: str, tensor_size: int) -> int:
    """Ranks of a shard group, by either flag; 1 without both."""
    size: int | None = getattr(args, flag)
    shards: int | None = getattr(args, shards_flag)
    if size is None:
        size, rest = divmod(tensor_size if shards is None else shards, tensor_size)
        if rest or size < 1:
            raise UnsupportedConfigurationError(
                f"{_option(shards_flag)} is {shards}; it must be a positive multiple of tensor parallelism "
                f"{tensor_size}"
            )
    elif size < 1:
        raise UnsupportedConfigurationError(f"{_option(flag)} is {size}; it must be at least 1")
    elif shards is not None and shards != size * tensor_size:
        raise UnsupportedConfigurationError(
            f"{_option(flag)} {size} with tensor parallelism {tensor_size} means {size * tensor_size} shards, but "
            f"{_option(shards_flag)} is {shards}; give one of the two"
        )
    return size


def config_from_args(args: argparse.Namespace) -> MegatronEtpConfig:
    """The engine's options as parsed.

    Raises:
        UnsupportedConfigurationError: on a value out of range, naming it.
    """
    try:
        engine = EtpConfig(
            transport=TransportName(args.etp_transport),
            prefetch_depth=args.etp_prefetch_depth,
            resident_bytes=args.etp_resident_bytes,
            pad_for_alignment=args.etp_pad_for_alignment,
            grad_reduction=GradReduction.SUM if args.calculate_per_token_loss else GradReduction.MEAN,
            fp32_accumulation=args.etp_fp32_accumulation,
            reduce_once_per_iteration=args.etp_reduce_once_per_iteration,
            timeout_s=args.etp_timeout,
        )
    except ValueError as error:
        raise UnsupportedConfigurationError(_with_flags(str(error))) from error
    # With --async-save, another process copies the parameters from the GPU.
    in_place = not getattr(args, "async_save", False)
    return MegatronEtpConfig(engine=engine, print_chains=args.etp_print_chains, parameters_in_place=in_place)


def _with_flags(message: str) -> str:
    """An error message of the engine in which each option is replaced by the name of its flag."""
    return re.sub(r"EtpConfig\.(\w+)", lambda found: _option(f"etp_{found[1].removesuffix('_s')}"), message)


def is_active(args: argparse.Namespace) -> bool:
    """Whether any weight is sharded, dense or expert."""
    return bool(args.etp_size > 1 or args.expert_etp_size > 1)


def check(args: argparse.Namespace) -> None:
    """Refuse settings that would train incorrectly. Call after :func:`apply_to_megatron`, before Megatron's own checks.

    Raises:
        UnsupportedConfigurationError: naming the first conflicting setting and the alternative.
    """
    if not is_active(args):
        return
    _check_sizes(args)
    _check_evaluation(args)
    _check_folders(args)
    _refuse(args, REFUSALS)


def check_graphs(args: argparse.Namespace) -> None:
    """Refuse settings that cannot be captured into CUDA graphs. Call after Megatron's own checks.

    Raises:
        UnsupportedConfigurationError: naming the first conflicting setting and the alternative.
    """
    if is_active(args):
        _refuse(args, GRAPH_REFUSALS)


def _refuse(args: argparse.Namespace, refusals: Sequence[Refusal]) -> None:
    for refusal in refusals:
        if refusal.applies(args):
            flag = "--etp-size" if args.etp_size > 1 else "--expert-etp-size"
            culprit = refusal.culprit.format(**vars(args))
            raise UnsupportedConfigurationError(f"{flag} does not work with {culprit}; {refusal.way_out}")


def _has_one_replica(args: argparse.Namespace) -> bool:
    """Whether no two ranks hold the same shard of a dense weight, or of an expert."""
    dense = dense_size(args) // args.context_parallel_size * args.etp_size
    experts = expert_size(args) * args.expert_etp_size if args.num_experts else dense
    return bool(args.world_size == dense == experts)


def _check_sizes(args: argparse.Namespace) -> None:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    _check_divides(
        "--etp-size",
        args.etp_size,
        args.world_size,
        dense_size(args),
        f"tensor {tensor} x pipeline {pipeline} x context {args.context_parallel_size}",
    )
    if not args.num_experts:  # Megatron takes 0 for None
        if args.expert_etp_size > 1:
            raise UnsupportedConfigurationError(
                "--expert-etp-size is set but the model has no experts; set --num-experts or drop it"
            )
        return
    expert_tensor = args.expert_tensor_parallel_size or tensor
    _check_divides(
        "--expert-etp-size",
        args.expert_etp_size,
        args.world_size,
        expert_size(args),
        f"expert tensor {expert_tensor} x expert {args.expert_model_parallel_size} x pipeline {pipeline}",
    )


def _check_evaluation(args: argparse.Namespace) -> None:
    """Megatron's own check ignores the shard group, and an evaluation would then skip the remainder of the batch."""
    flag, micro_flag = (
        name if getattr(args, f"eval_{name}") is None else f"eval_{name}"
        for name in ("global_batch_size", "micro_batch_size")
    )
    batch, microbatch = getattr(args, flag), getattr(args, micro_flag)
    if batch is None or microbatch is None:
        return
    data_parallel = args.world_size // dense_size(args)
    if batch % (microbatch * data_parallel):
        raise UnsupportedConfigurationError(
            f"{_option(flag)} {batch} does not divide by {_option(micro_flag)} {microbatch} x data-parallel size "
            f"{data_parallel}; use a multiple of {microbatch * data_parallel}"
        )


def _check_folders(args: argparse.Namespace) -> None:
    """Refuse folders that would fail at the first checkpoint, hours later, or that would silently restart training."""
    save, load = (getattr(args, name, None) for name in ("save", "load"))
    if save is not None and "://" not in save:
        existing = next(folder for folder in (Path(save), *Path(save).absolute().parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            reason = "must not be written" if existing.is_dir() else "is no folder"
            raise UnsupportedConfigurationError(f"--save {save} cannot be written: {existing} {reason}; name another")
    # With the same folder for both, the first run starts from scratch there, and a restarted run continues.
    starts_anew = load == save and not getattr(args, "exit_on_missing_checkpoint", False)
    if load is None or "://" in load or starts_anew or getattr(args, "pretrained_checkpoint", None) is not None:
        return
    if not has_checkpoint(args, Path(load)):
        raise UnsupportedConfigurationError(
            f"--load {load} has no checkpoint: there is no {_LATEST}; name the folder that --save named, or drop it to "
            "train from the start"
        )


def has_checkpoint(args: argparse.Namespace, folder: Path) -> bool:
    """Whether Megatron looks for a checkpoint of ``--load`` ``folder`` where there is one."""
    if getattr(args, "ckpt_step", None):
        return True  # Megatron needs no other file then, and the load itself names a missing iteration
    found = (folder / _LATEST).exists()
    if args.non_persistent_ckpt_type == "global":
        other = getattr(args, "non_persistent_global_ckpt_dir", None) or str(folder / "non_persistent")
        found = found or "://" in other or (Path(other) / _LATEST).exists()
    return found


def _check_divides(flag: str, size: int, world_size: int, model_size: int, factors: str) -> None:
    data_parallel, rest = divmod(world_size, model_size)
    if rest:
        raise UnsupportedConfigurationError(f"{world_size} ranks do not divide by {factors}; start a multiple of that")
    if data_parallel % size:
        divisors = ", ".join(str(n) for n in range(1, data_parallel + 1) if data_parallel % n == 0)
        raise UnsupportedConfigurationError(
            f"{flag} {size} does not divide the data-parallel size {data_parallel} "
            f"({world_size} ranks over {factors}); use one of {divisors}, or change the number of ranks"
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
