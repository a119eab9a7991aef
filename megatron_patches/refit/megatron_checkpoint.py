"""Opens a Megatron checkpoint (``torch_dist``) as a sharded model, for export without a training run.

The model is built from the arguments saved in the checkpoint, at the parallel sizes asked for here, which need not
be those it was trained at, and holds weights alone: no optimizer, no data, no gradient buffers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.errors import CheckpointReadError, ExportError

if TYPE_CHECKING:
    import torch

_TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """How the model is spread while it is exported; what is left of the world holds replicas.

    Attributes:
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.
        etp: extended-tensor-parallel size.
    """

    tensor: int = 1
    pipeline: int = 1
    etp: int = 1

    def check(self, world_size: int) -> None:
        """Whether ``world_size`` processes can be divided so.

        Raises:
            ExportError: if not.
        """
        product = self.tensor * self.pipeline * self.etp
        if min(self.tensor, self.pipeline, self.etp) < 1 or world_size % product:
            raise ExportError(
                f"{world_size} processes cannot be divided by tensor {self.tensor} x pipeline {self.pipeline} x ETP "
                f"{self.etp} = {product}; start a multiple of that with torchrun, or change the sizes"
            )


def find_iteration(load: Path, iteration: int | None) -> Path:
    """Directory of one iteration under ``load``, which may also be that directory itself.

    Args:
        load: directory given to Megatron's ``--save``, or one iteration in it.
        iteration: which; None for the latest.

    Raises:
        ExportError: if there is no such checkpoint, or it is not in the ``torch_dist`` format.
    """
    if iteration is not None:
        found = load / f"iter_{iteration:07d}"
    elif (load / _TRACKER).is_file():
        text = (load / _TRACKER).read_text().strip()
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
    """Joins the processes that torchrun started, or makes a group of this one alone, and Megatron's groups in it.

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
            gtp_remat_size=sizes.etp,
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
        ExportError: if the checkpoint cannot be read or holds none.
    """
    from megatron.core import dist_checkpointing

    with _readable(directory):
        state = dist_checkpointing.load_common_state_dict(str(directory))
    args = state.get("args")
    if not isinstance(args, argparse.Namespace):
        raise ExportError(f"{directory} holds no arguments; it was not written by a Megatron training script")
    return args


def vocabulary_of(args: argparse.Namespace) -> int:
    """Number of tokens without padding, from the tokenizer that the run used.

    Raises:
        ExportError: if the tokenizer is not at hand.
    """
    if args.tokenizer_type == "NullTokenizer" and args.vocab_size:
        return int(args.vocab_size)
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    try:
        return int(build_tokenizer(args).vocab_size)
    except (OSError, ImportError, ValueError, KeyError, AttributeError) as error:
        raise ExportError(
            f"cannot open the run's tokenizer {args.tokenizer_type} ({error}); pass --vocab-size with the number of "
            "its tokens"
        ) from error


def build_model(args: argparse.Namespace, sizes: ParallelSizes) -> torch.nn.Module:
    """The stage of the model that this rank holds, not yet loaded, wrapped for bf16 or fp16 if the run was."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    _for_export(args, sizes)
    config = gpt_config_from_args(args)
    model = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    if not args.use_cpu_initialization:
        model = model.cuda()
    wrapped: torch.nn.Module = Float16Module(config.transformer, model) if args.bf16 or args.fp16 else model
    return wrapped


def load_weights(model: torch.nn.Module, directory: Path) -> None:
    """Fills the model from the checkpoint, each rank its own part.

    Raises:
        ExportError: if a file is missing or damaged, or the checkpoint does not hold the model's weights.
    """
    from megatron.core import dist_checkpointing

    from megatron_patches.refit.source.describe import unwrapped

    inner: Any = unwrapped(model)
    with _readable(directory):
        metadata = dist_checkpointing.load_content_metadata(str(directory)) or {}
        state = {"model": inner.sharded_state_dict(prefix="", metadata=metadata)}
        loaded = dist_checkpointing.load(state, str(directory))
        inner.load_state_dict(loaded["model"], strict=True)


def _for_export(args: argparse.Namespace, sizes: ParallelSizes) -> None:
    """Changes the saved arguments to what a model that is only exported needs."""
    import torch

    from megatron_patches import cpu

    args.tensor_model_parallel_size = sizes.tensor
    args.pipeline_model_parallel_size = sizes.pipeline
    args.tensor_parallel_num_weight_shards = sizes.tensor * sizes.etp if sizes.etp > 1 else None
    args.gtp_weight_remat_size = sizes.etp
    plain: dict[str, object] = {
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": sizes.tensor,
        "expert_tensor_parallel_num_weight_shards": None,
        "expert_gtp_weight_remat_size": 1,
        "sequence_parallel": False,
        "tp_comm_overlap": False,
        "recompute_granularity": None,
        "defer_embedding_wgrad_compute": False,
        "delay_wgrad_compute": False,
        "gradient_accumulation_fusion": False,
        "cuda_graph_impl": "none",
        "fp8": None,
        "fp4": None,
        "fp8_param_gather": False,
        "fp4_param_gather": False,
        "perform_initialization": False,
        "init_model_with_meta_device": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
    }
    for name, value in plain.items():
        setattr(args, name, value)
    if args.padded_vocab_size is not None:
        args.padded_vocab_size = -(-args.padded_vocab_size // sizes.tensor) * sizes.tensor
    if importlib.util.find_spec("transformer_engine") is None:
        args.transformer_impl = "local"
    if cpu.needed():
        cpu.set_required_arguments(args)


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
