"""`--rope-scaling-factor` is ignored: a GPT model's rotary positions are scaled by 8 whatever the flag says.

A checkpoint that was not written by this package's launcher was trained with 8, and is exported and pushed with 8: the
launcher's runs are told by their arguments, which have ``load_hf``. A run that continues such a checkpoint follows its
own flag, as the notice says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import PatchRecord


def _replace(gpt_config_from_args: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gpt_config_from_args)
    def replacement(args: Any, *rest: Any, **named: Any) -> Any:
        config = gpt_config_from_args(args, *rest, **named)
        if hasattr(args, "load_hf") and config.rope_scaling_factor != args.rope_scaling_factor:
            if args.use_rope_scaling:
                from megatron.training.utils import print_rank_0

                print_rank_0(
                    f"rotary positions are scaled by {args.rope_scaling_factor:g}, as --rope-scaling-factor says; "
                    f"stock Megatron scales them by {config.rope_scaling_factor:g} whatever it says"
                )
            config.rope_scaling_factor = args.rope_scaling_factor
        return config

    return replacement


RECORD = PatchRecord(
    target="megatron.training.argument_utils:gpt_config_from_args",
    replace=_replace,
    reason="it does not pass --rope-scaling-factor on",
    sha256="1bf26f7a5bcbf89b",
)
