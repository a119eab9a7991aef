"""Installs an implementation of sharded weights in place of Megatron's own.

Megatron-core accesses its sharded-weight engine through one module, ``megatron.core.tensor_parallel.gtp_api``, and
imports from it at the call sites. A module of the same name that is installed first therefore replaces it. Three
modules import from it at their top level; if they are already loaded, their names are set too.
"""

from __future__ import annotations

import sys
import types
from typing import Protocol

from megatron_patches.arguments import MegatronEtpConfig

SEAM = "megatron.core.tensor_parallel.gtp_api"

SEAM_NAMES = (
    "HAVE_GTP",
    "GTPChain",
    "GTPEmbeddingWeight",
    "attach_gtp_to_presharded_module",
    "classify_gtp_remat_chains",
    "configure_gtp_remat_from_recipe",
    "dequantize_gtp_native_fp8",
    "get_ag_stream",
    "get_rs_stream",
    "gtp_native_fp8_load_context",
    "gtp_remat_shard_dim0",
    "is_gtp_param",
    "make_sharded_tensors_for_checkpoint_with_gtp_remat",
    "set_cuda_graph_mempool",
    "wait_async_comms",
    "wait_for_gtp_grad_reduction_on_current_stream",
    "wrap_module_params_gtp",
)
"""What a replacement must define: ``HAVE_GTP`` and the names that Megatron imports where it is True."""

_TOP_LEVEL_IMPORTS = {
    "megatron.core.transformer.cuda_graphs": (
        "HAVE_GTP",
        "GTPChain",
        "get_ag_stream",
        "get_rs_stream",
        "set_cuda_graph_mempool",
        "wait_async_comms",
    ),
    "megatron.core.ssm.mamba_mixer": ("HAVE_GTP", "is_gtp_param"),
    "megatron.training.training": ("HAVE_GTP",),
}
_OWNER = "weight_shard_api"


class WeightShardSeam(Protocol):
    """An implementation of Megatron's sharded weights."""

    def as_module(self) -> types.ModuleType:
        """A module with :data:`SEAM_NAMES`, whose functions are bound to this object."""

    def configure(self, config: MegatronEtpConfig) -> None:
        """Take the options of the run, before Megatron builds a model."""


def installed_api() -> WeightShardSeam | None:
    """The installed implementation, or None while Megatron's own is in use."""
    return getattr(sys.modules.get(SEAM), _OWNER, None)


def install_api(api: WeightShardSeam) -> None:
    """Replace Megatron's own module with ``api``.

    Raises:
        AttributeError: if its module lacks one of :data:`SEAM_NAMES`.
    """
    module = api.as_module()
    missing = [name for name in SEAM_NAMES if not hasattr(module, name)]
    if missing:
        raise AttributeError(f"{type(api).__name__}.as_module() lacks {', '.join(missing)}")
    setattr(module, _OWNER, api)
    sys.modules[SEAM] = module
    package, _, name = SEAM.rpartition(".")
    if package in sys.modules:
        setattr(sys.modules[package], name, module)
    for user, names in _TOP_LEVEL_IMPORTS.items():
        if user in sys.modules:
            for imported in names:
                setattr(sys.modules[user], imported, getattr(module, imported))
