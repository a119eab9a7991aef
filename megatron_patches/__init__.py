"""Extended Tensor Parallelism for an unmodified Megatron-core 0.19.2.

Run any Megatron script through the launcher::

    torchrun --nproc-per-node 4 -m megatron_patches SCRIPT.py ... --etp-size 2

or call this from a script, before it imports Megatron::

    import megatron_patches

    megatron_patches.apply()
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_patches.arguments import MegatronEtpConfig, UnsupportedConfigurationError
from megatron_patches.registry import IncompatibleMegatronError

if TYPE_CHECKING:
    from megatron_patches.registry import PatchRecord, SourceRecord
    from megatron_patches.weight_shard_api import WeightShardApi

__all__ = ["IncompatibleMegatronError", "MegatronEtpConfig", "UnsupportedConfigurationError", "apply"]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Skip the search for garbage among Megatron's modules and the trees of its sources, which takes a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_garbage_collection()
def apply(config: MegatronEtpConfig | None = None) -> WeightShardApi:
    """Verify the installed Megatron, patch it, and replace its implementation of sharded weights.

    On a machine without CUDA, also let Megatron run on CPU and gloo. A second call changes nothing.

    Args:
        config: options for a script that does not parse Megatron's command line; otherwise the flags set them.

    Returns:
        The implementation that Megatron now uses.

    Raises:
        IncompatibleMegatronError: if megatron-core or Transformer Engine has an unsupported version or modified
            sources, or if Megatron's process groups already exist.
    """
    from megatron_patches import cpu, registry, seam

    present = seam.installed_api()
    if present is not None:
        return present
    registry.check_versions()
    registry.check_not_initialized()
    if cpu.needed():
        cpu.prepare_environment()
        cpu.silence_inapplicable_warnings()
    from megatron_patches.weight_shard_api import WeightShardApi

    api = WeightShardApi(config or MegatronEtpConfig())
    relied_upon, patches = records(api)
    registry.verify((*relied_upon, *patches))
    seam.install_api(api)
    registry.install_records(patches)
    return api


def records(api: WeightShardApi) -> tuple[tuple[SourceRecord, ...], tuple[PatchRecord, ...]]:
    """What :func:`apply` relies upon in Megatron without replacing it, and what it replaces.

    Args:
        api: the implementation of sharded weights.
    """
    from megatron_patches import command_line, contract, cpu, fixes, hf_training, refit_training
    from megatron_patches.checkpoint import patches as checkpoint

    relied_upon = (*contract.records(), *checkpoint.sources())
    patches = (
        *(cpu.records() if cpu.needed() else ()),
        *fixes.records(),
        *checkpoint.records(),
        *command_line.records(api),
        *hf_training.records(),
        *refit_training.records(),
    )
    return relied_upon, patches
