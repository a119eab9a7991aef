"""Extended Tensor Parallelism in an unmodified Megatron-core 0.19.2.

Any Megatron script runs with it through the launcher::

    torchrun --nproc-per-node 4 -m megatron_patches SCRIPT.py ... --etp-size 2

and a script can ask for it itself, before it imports Megatron::

    import megatron_patches

    megatron_patches.apply()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_patches.arguments import MegatronEtpConfig, UnsupportedConfigurationError
from megatron_patches.registry import IncompatibleMegatronError

if TYPE_CHECKING:
    from megatron_patches.seam import WeightShardSeam

__all__ = ["IncompatibleMegatronError", "MegatronEtpConfig", "UnsupportedConfigurationError", "apply"]


def apply(config: MegatronEtpConfig | None = None, *, api: WeightShardSeam | None = None) -> WeightShardSeam:
    """Verify the installed Megatron, patch it, and put sharded weights in the place of its own.

    On a machine without CUDA it also lets Megatron run on CPU and gloo. A second call changes nothing.

    Args:
        config: options for a script that does not parse Megatron's command line; one that does takes the options
            from its flags.
        api: the implementation of sharded weights; this package's own by default.

    Returns:
        The implementation that Megatron now uses.

    Raises:
        IncompatibleMegatronError: if megatron-core or Transformer Engine is not a version that this package was
            written for, or its sources were changed, or Megatron's process groups exist already.
    """
    from megatron_patches import command_line, contract, cpu, fixes, refit_training, registry, seam
    from megatron_patches.checkpoint import patches as checkpoint

    present = seam.installed()
    if present is not None:
        return present
    registry.check_versions()
    registry.check_not_initialized()
    if cpu.needed():
        cpu.prepare_environment()
        cpu.silence_random_state_warning()
    if api is None:
        from megatron_patches.weight_shard_api import WeightShardApi

        api = WeightShardApi(config or MegatronEtpConfig())
    patches = (
        *(cpu.records() if cpu.needed() else ()),
        *fixes.records(),
        *checkpoint.records(),
        *command_line.records(api),
        *refit_training.records(),
    )
    registry.verify((*contract.records(), *checkpoint.sources(), *patches))
    seam.install(api)
    registry.install(patches)
    return api
