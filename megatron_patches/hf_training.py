"""Starts a Megatron training run from a Hugging Face checkpoint, with ``--load-hf`` in any Megatron script."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patches.arguments import UnsupportedConfigurationError, has_checkpoint
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit_training import end_with
from megatron_patches.registry import PatchRecord

if TYPE_CHECKING:
    from megatron_patches.refit.checkpoints.load_hf import LoadReport

# Settings that load, build or save weights while Megatron sets the model up, before this module loads them.
_IN_CONFLICT = ("pretrained_checkpoint", "moe_use_upcycling", "ckpt_convert_format")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flag to ``parser`` and return it."""
    group = parser.add_argument_group(title="Hugging Face")
    group.add_argument(
        "--load-hf",
        metavar="DIR",
        help="Start from the weights of a Hugging Face checkpoint (config.json and safetensors files), read straight "
        "into the shards of this run. A checkpoint in --load is preferred, so a restarted run continues.",
    )
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuse settings with which the checkpoint cannot be loaded. Call before Megatron's own checks.

    Raises:
        UnsupportedConfigurationError: naming the flag.
    """
    if args.load_hf is None:
        return
    for name in _IN_CONFLICT:
        if getattr(args, name, None):
            raise UnsupportedConfigurationError(
                f"--load-hf does not work with --{name.replace('_', '-')}, which needs other weights; drop one of them"
            )
    is_read = args.load is None or ("://" not in args.load and not has_checkpoint(args, Path(args.load)))
    if is_read and not (Path(args.load_hf) / "config.json").is_file():
        raise UnsupportedConfigurationError(
            f"--load-hf {args.load_hf} has no config.json; name the folder of a Hugging Face checkpoint"
        )


class Loader:
    """Loads the weights of one training run; does nothing without ``--load-hf``."""

    def __init__(self) -> None:
        self._resumes = False

    def saw_checkpoint(self) -> None:
        """Record that Megatron has found a checkpoint in ``--load``."""
        self._resumes = True

    def load(self, model: Sequence[Any], optimizer: Any) -> None:
        """Load the weights into the model, and from there into the optimizer's own copies of them."""
        args = _args()
        resumes, self._resumes = self._resumes, False
        if args.load_hf is None:
            return
        if resumes:
            _print(f"load-hf: the run continues from the checkpoint in --load {args.load}; {args.load_hf} is not read")
            return
        if args.load is not None:
            _print(f"load-hf: --load {args.load} has no checkpoint; the weights come from {args.load_hf}")
        try:
            report = self._load(args, model)
        except RefitError as error:
            end_with(error)
        if optimizer is not None:
            optimizer.reload_model_params()
        for line in report.lines():
            _print(f"load-hf: {line}")

    def _load(self, args: argparse.Namespace, model: Sequence[Any]) -> LoadReport:
        from megatron_patches.refit.checkpoints.load_hf import load_hf_checkpoint
        from megatron_patches.refit.checkpoints.megatron_checkpoint import vocabulary_of
        from megatron_patches.refit.progress import LoggedProgress

        progress = LoggedProgress(sys.stdout, "load-hf: ") if args.rank == 0 else None
        return load_hf_checkpoint(model, Path(args.load_hf), tokens=vocabulary_of(args), progress=progress)


def _args() -> argparse.Namespace:
    from megatron.training.global_vars import get_args

    args: argparse.Namespace = get_args()
    return args


def _print(text: str) -> None:
    from megatron.training.utils import print_rank_0

    print_rank_0(text)


def records() -> tuple[PatchRecord, ...]:
    """The replacements in Megatron's set-up of a training run."""
    loader = Loader()

    def around_setup(setup: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(setup)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            model, optimizer, scheduler = setup(*args, **kwargs)
            loader.load(model, optimizer)
            return model, optimizer, scheduler

        return replacement

    def around_reading(load_base_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load_base_checkpoint)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            result = load_base_checkpoint(*args, **kwargs)
            if result[0] is not None:
                loader.saw_checkpoint()
            return result

        return replacement

    return (
        PatchRecord(
            target="megatron.training.training:setup_model_and_optimizer",
            replace=around_setup,
            reason="loads a Hugging Face checkpoint into the model",
            sha256="566575af25f10acc",
        ),
        PatchRecord(
            target="megatron.training.checkpointing:_load_base_checkpoint",
            replace=around_reading,
            reason="tells whether there is a checkpoint to continue from",
            sha256="9cea3821104a16ce",
        ),
    )
