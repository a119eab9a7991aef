"""A training script that trains part of a model: ``--freeze PATTERN`` holds the parameters whose names match.

What a user writes who fine-tunes: the script of examples/, and ``requires_grad`` set as soon as a model is built.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from examples.pretrain_gpt import build_datasets, forward_step


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this script's own flag."""
    parser.add_argument("--freeze", required=True, metavar="PATTERN", help="freeze parameters whose names match")
    return parser


class Freezer:
    """Freezes parameters of models as they are built, and can tell afterwards that they stayed as they were.

    Args:
        pattern: a regular expression, searched for in the names that parameters have in a model chunk.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)
        self._frozen: list[tuple[str, torch.nn.Parameter, torch.Tensor]] = []

    def freeze(self, chunks: list[Any]) -> list[Any]:
        """For ``pre_wrap_hooks``, which are called before DistributedDataParallel is built."""
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if self._pattern.search(name):
                    parameter.requires_grad = False
                    self._frozen.append((name, parameter, parameter.detach().clone()))
        return chunks

    def check(self) -> None:
        """Raise if nothing was frozen on any rank, or if something that was has changed or has a gradient."""
        count = torch.tensor([len(self._frozen)], device="cuda")
        torch.distributed.all_reduce(count)
        if not count.item():
            raise RuntimeError(f"no parameter matches {self._pattern.pattern!r}")
        for name, parameter, before in self._frozen:
            gradient = getattr(parameter, "main_grad", parameter.grad)
            if gradient is not None or not torch.equal(
                parameter, before.to(device=parameter.device, dtype=parameter.dtype)
            ):
                raise RuntimeError(f"{name} is frozen, and was trained")


def main() -> None:
    """Train as the command line says."""
    args = parse_and_validate_args(add_arguments, args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    freezer = Freezer(args.freeze)
    config.model.pre_wrap_hooks.append(freezer.freeze)
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)
    freezer.check()


if __name__ == "__main__":
    main()
