"""Installs an implementation of sharded weights in place of Megatron's own.

Megatron-core accesses its sharded-weight engine through one module, ``megatron.core.tensor_parallel.gtp_api``, and
imports from it at the call sites. A module of the same name that is installed first therefore replaces it. Three
modules import from it at their top level; if they are already loaded, their names are set too.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_patches.weight_shard_api import WeightShardApi

SEAM = "megatron.core.tensor_parallel.gtp_api"

_USERS = ("megatron.core.transformer.cuda_graphs", "megatron.core.ssm.mamba_mixer", "megatron.training.training")
"""The modules that import from it at their top level."""

_OWNER = "weight_shard_api"


def installed_api() -> WeightShardApi | None:
    """The installed implementation, or None while Megatron's own is in use."""
    return getattr(sys.modules.get(SEAM), _OWNER, None)


def install_api(api: WeightShardApi) -> None:
    """Replace Megatron's own module with that of ``api``."""
    module = api.as_module()
    setattr(module, _OWNER, api)
    sys.modules[SEAM] = module
    package, _, name = SEAM.rpartition(".")
    if package in sys.modules:
        setattr(sys.modules[package], name, module)
    for user in _USERS:
        held = vars(sys.modules[user]) if user in sys.modules else {}
        held.update({name: getattr(module, name) for name in module.__all__ if name in held})
