"""`--rope-scaling-factor` is ignored: a GPT model's rotary positions are scaled by 8 whatever the flag says.

A checkpoint that was not written by this package's launcher was trained with 8, and is built with 8: the launcher's
runs are told by their arguments, which have ``load_hf``.
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
        if hasattr(args, "load_hf"):
            config.rope_scaling_factor = args.rope_scaling_factor
        return config

    return replacement


RECORD = PatchRecord(
    target="megatron.training.argument_utils:gpt_config_from_args",
    replace=_replace,
    reason="it does not pass --rope-scaling-factor on",
    sha256="1bf26f7a5bcbf89b",
)
