"""A training script one of whose ranks fails: ``--fail-rank R --fail-step S --fail-in forward --fail-signal KILL``.

The rank sends the signal to itself, so that nothing of it ends in an orderly way. Its peers are in the same step of
the same training, as they are when a machine is lost.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from examples.pretrain_gpt import Batch, build_datasets, forward_step


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this script's own flags."""
    parser.add_argument("--fail-rank", type=int, required=True, help="the rank that fails")
    parser.add_argument("--fail-step", type=int, required=True, help="the step it fails in, from 0")
    parser.add_argument("--fail-in", choices=("forward", "backward"), required=True, help="where in the step")
    parser.add_argument("--fail-signal", choices=("KILL", "STOP"), required=True, help="how: it ends, or hangs")
    return parser


def failing_step(data_iterator: Iterator[Batch] | None, model: torch.nn.Module) -> Any:
    """The example's forward step, in which one rank fails before a layer's forward, or backward, in mid-model."""
    args = get_args()
    if args.rank == args.fail_rank and args.curr_iteration == args.fail_step:
        number = signal.Signals[f"SIG{args.fail_signal}"]

        def fail(*_: Any) -> None:
            os.kill(os.getpid(), number)

        names = dict(model.named_modules(remove_duplicate=False))
        layer = next(module for name, module in names.items() if name.endswith("decoder.layers.1"))
        if args.fail_in == "forward":
            layer.register_forward_pre_hook(fail)
        else:
            layer.register_full_backward_pre_hook(fail)
    return forward_step(data_iterator, model)


def main() -> None:
    """Train as the command line says."""
    args = parse_and_validate_args(add_arguments, args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, failing_step)


if __name__ == "__main__":
    main()
