"""Reads a Megatron checkpoint (``torch_dist``): its arguments, and its weights into a model of any parallel sizes."""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.checkpoints.checkpoint_sizes import ParallelSizes
from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.errors import CheckpointReadError, ExportError

if TYPE_CHECKING:
    import torch

_TRACKER = "latest_checkpointed_iteration.txt"
# Names of norms in Transformer Engine's layers and in Megatron's own.
_NAMES_OF_NORMS = (
    (".self_attention.linear_qkv.layer_norm_weight", ".input_layernorm.weight"),
    (".self_attention.linear_q_up_proj.layer_norm_weight", ".self_attention.q_layernorm.weight"),
    (".self_attention.linear_kv_up_proj.layer_norm_weight", ".self_attention.kv_layernorm.weight"),
    (".mlp.linear_fc1.layer_norm_weight", ".pre_mlp_layernorm.weight"),
)


def find_iteration(load: Path, iteration: int | None) -> Path:
    """Directory of one iteration under ``load``, which may also be that directory itself.

    Args:
        load: directory given to Megatron's ``--save``, or one iteration in it.
        iteration: number of the iteration; None for the latest.

    Raises:
        ExportError: if there is no such checkpoint, or it is not in the ``torch_dist`` format.
    """
    if iteration is not None:
        found = load / f"iter_{iteration:07d}"
    elif (load / _TRACKER).is_file():
        text = (load / _TRACKER).read_text(encoding="ascii", errors="replace").strip()
        if not (text.isdigit() or text == "release"):
            raise ExportError(f"{load / _TRACKER} holds {text[:40]!r}, not an iteration; pass --iteration")
        found = load / (f"iter_{int(text):07d}" if text.isdigit() else "release")
    else:
        found = load
    if not found.is_dir():
        raise ExportError(f"{found} is not a directory; pass --load the directory that Megatron's --save wrote")
    if not (found / "metadata.json").is_file() or not (found / ".metadata").is_file():
        raise ExportError(
            f"{found} is not a complete checkpoint in the torch_dist format: metadata.json or .metadata is missing; "
            "pass --load a checkpoint saved with --ckpt-format torch_dist"
        )
    return found


@contextlib.contextmanager
def process_groups(sizes: ParallelSizes, timeout: timedelta) -> Iterator[None]:
    """Sets up torch.distributed, for torchrun's processes or this process alone, and Megatron's process groups.

    Raises:
        ExportError: if the processes cannot be divided as asked.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    sizes.check(world)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "nccl"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            virtual_pipeline_model_parallel_size=sizes.chunks if sizes.chunks > 1 else None,
            gtp_remat_size=sizes.etp,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.experts_tensor,
            expert_gtp_remat_size=sizes.expert_etp,
            distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def saved_arguments(directory: Path) -> argparse.Namespace:
    """The arguments of the run that wrote the checkpoint.

    Raises:
        ExportError: if the checkpoint cannot be read or contains no arguments.
    """
    from megatron.core import dist_checkpointing
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    with _readable(directory):
        state = dist_checkpointing.load_common_state_dict(str(directory))
    args = state.get("args")
    if not isinstance(args, argparse.Namespace):
        raise ExportError(f"{directory} holds no arguments; it was not written by a Megatron training script")
    if getattr(args, "hybrid_layer_pattern", None) is None:  # older versions used another name
        args.hybrid_layer_pattern = getattr(args, "hybrid_override_pattern", None)
    if args.padded_vocab_size is None and args.vocab_size is not None:  # `import` opens no tokenizer, which sets it
        args.padded_vocab_size = calculate_padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, logging_enabled=False
        )
    return args


def vocabulary_of(args: argparse.Namespace) -> int:
    """Number of tokens without padding, from the tokenizer that the run used.

    Raises:
        ExportError: if the tokenizer is not available.
    """
    if args.tokenizer_type == "NullTokenizer" and args.vocab_size:
        return int(args.vocab_size)
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    try:
        return int(build_tokenizer(args).vocab_size)
    except Exception as error:  # each library of tokenizers raises errors of its own
        raise ExportError(
            f"cannot open the run's tokenizer {args.tokenizer_type} ({describe_error(error)}); pass --vocab-size with "
            "the number of its tokens"
        ) from error


def load_weights(chunks: Sequence[torch.nn.Module], directory: Path) -> None:
    """Loads the model's weights from the checkpoint, each rank its own part.

    Args:
        chunks: this rank's part, one module per virtual pipeline stage, wrapped or not.
        directory: directory of the iteration.

    Raises:
        ExportError: if a file is missing or damaged, or the checkpoint lacks weights of the model.
    """
    from megatron.core import dist_checkpointing

    from megatron_patches.checkpoint.integrity import read_index
    from megatron_patches.refit.source.describe import unwrapped_chunk

    inner: list[Any] = [unwrapped_chunk(chunk) for chunk in chunks]
    with _readable(directory):
        _require_unchanged(directory)
        metadata = dist_checkpointing.load_content_metadata(str(directory)) or {}
        state = {f"model{n}": chunk.sharded_state_dict(prefix="", metadata=metadata) for n, chunk in enumerate(inner)}
        _name_norms_as_saved(state, frozenset(read_index(directory).state_dict_metadata))
        loaded = dist_checkpointing.load(state, str(directory))
        for number, chunk in enumerate(inner):
            chunk.load_state_dict(loaded[f"model{number}"], strict=True)


def _require_unchanged(directory: Path) -> None:
    """Raises ExportError on all ranks if a file is missing, or the bytes of a weight have changed. Collective."""
    import torch.distributed as dist

    from megatron_patches.checkpoint.integrity import find_changed
    from megatron_patches.checkpoint.verify import find_problem

    problem = find_problem(directory)
    if problem is None:
        changed = find_changed(directory, _is_of_model, dist.get_rank(), dist.get_world_size())
        problem = None if changed is None else f"{changed[1]}: {changed[0]} {changed[2]}; copy the checkpoint again"
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = next((one for one in problems if one is not None), None)
    if found is not None:
        raise CheckpointReadError(f"cannot read {directory}: {found}")


def _is_of_model(name: str) -> bool:
    return "optimizer" not in name.split(".")


def _name_norms_as_saved(state: dict[str, Any], saved: frozenset[str]) -> None:
    """Changes the key of each norm to its name in the checkpoint.

    Transformer Engine's layers keep some norms in the linear layer that follows, Megatron's own layers do not, and
    their names in checkpoints agree only for dense models. Without this, a checkpoint of one could not be loaded into
    the other.

    Args:
        state: entries of Megatron's sharded state dict, whose ``key`` is changed in place.
        saved: names of the checkpoint's entries.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    for entry in nested_values(state):
        key = getattr(entry, "key", None)
        if not isinstance(key, str) or key in saved:
            continue
        for pair in _NAMES_OF_NORMS:
            for mine, theirs in (pair, pair[::-1]):
                if key.endswith(mine) and (other := key.removesuffix(mine) + theirs) in saved:
                    entry.key = other


@contextlib.contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Turns the many ways in which reading a damaged checkpoint fails into one error."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        reasons = {str(reason).splitlines()[0] for reason, _ in error.failures.values()}
        raise CheckpointReadError(f"cannot read {directory}: {'; '.join(sorted(reasons))}") from error
    except (CheckpointingException, OSError, EOFError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        if isinstance(error, ExportError):
            raise
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointReadError(f"cannot read {directory}: {text}") from error
