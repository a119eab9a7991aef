"""A training script for Megatron's hybrid models, whose layers are attention, MLP, experts or Mamba, each alone."""

from __future__ import annotations

from unittest import mock

from megatron.training.argument_utils import hybrid_config_from_args

from examples import pretrain_gpt


def main() -> None:
    """Train as the command line says."""
    with mock.patch.object(pretrain_gpt, "gpt_config_from_args", hybrid_config_from_args):
        pretrain_gpt.main()


if __name__ == "__main__":
    main()
