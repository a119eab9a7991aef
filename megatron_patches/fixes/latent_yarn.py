"""The `--yarn-` flags are ignored with multi-latent attention, whose YaRN has DeepSeek-V3's values whatever they say.

These are 4096 original positions, and 32 and 1 for `--yarn-beta-fast` and `--yarn-beta-slow`. A checkpoint that was not
written by this package's launcher was trained with them, and is exported and pushed with them: the launcher's runs are
told by their arguments, which have ``load_hf``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import PatchRecord

_FIELDS = ("original_max_position_embeddings", "beta_fast", "beta_slow")


def _replace(apply_yarn_config: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(apply_yarn_config)
    def replacement(config: Any, args: Any) -> None:
        apply_yarn_config(config, args)
        if not (hasattr(args, "load_hf") and args.multi_latent_attention):
            return
        for name in _FIELDS:
            value = getattr(args, f"yarn_{name}")
            if value is not None:
                setattr(config, name, value)

    return replacement


RECORD = PatchRecord(
    target="megatron.training.argument_utils:_apply_yarn_config_from_args",
    replace=_replace,
    reason="it passes the --yarn- flags on to models without latent attention only",
    sha256="363205e76483b885",
)
