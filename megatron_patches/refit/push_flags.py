"""Flags that configure pushes: of training scripts, with the prefix ``--refit-``, and of ``refit push``."""

from __future__ import annotations

import argparse

from megatron_patches.refit.engines import PauseMode
from megatron_patches.refit.memory_mode import MemoryMode
from megatron_patches.refit.session import RefitOptions
from megatron_patches.refit.transports.base import AUTO, TransportName, named_transport


def add_flags(parser: argparse._ActionsContainer, prefix: str = "") -> None:
    """Adds them.

    Args:
        parser: what to add them to.
        prefix: what their names begin with, such as ``refit-``.
    """
    defaults = RefitOptions()
    parser.add_argument(
        f"--{prefix}transport",
        choices=[AUTO, *(name.value for name in TransportName)],
        default=AUTO,
        help="how weights travel: shm and cuda_ipc within one host, the others everywhere; by default the fastest that "
        "reaches all engines",
    )
    parser.add_argument(
        f"--{prefix}staging-bytes",
        type=int,
        default=defaults.staging_bytes,
        metavar="BYTES",
        help="the most memory that packets take in one process, on either side; %(default)s by default",
    )
    parser.add_argument(
        f"--{prefix}pause",
        choices=[mode.value for mode in PauseMode],
        default=defaults.pause.value,
        help="what becomes of requests under way when new weights take effect: wait lets them end first, abort ends "
        "them, keep lets them go on with the new weights; %(default)s by default",
    )
    parser.add_argument(
        f"--{prefix}memory",
        choices=[mode.value for mode in MemoryMode],
        default=defaults.memory.value,
        help="where engines receive new weights: beside those that serve, which takes memory for a second copy, or "
        "in_place, which pauses the engines from before the first byte; %(default)s by default",
    )
    parser.add_argument(
        f"--{prefix}host",
        default=defaults.host,
        metavar="ADDRESS",
        help="address of the trainer's first machine that engines reach; %(default)s by default",
    )
    parser.add_argument(
        f"--{prefix}allow-narrowing",
        action="store_true",
        help="push also where an engine keeps a weight in a narrower type than the trainer, and rounds it",
    )


def options_from(args: argparse.Namespace, timeout_s: float, prefix: str = "") -> RefitOptions:
    """What they say.

    Args:
        args: with what :func:`add_flags` added.
        timeout_s: seconds that a step may take after its first party has finished.
        prefix: the same as there.

    Raises:
        ValueError: on a value out of range.
    """
    start = prefix.replace("-", "_")
    given = {name.removeprefix(start): value for name, value in vars(args).items() if name.startswith(start)}
    return RefitOptions(
        transport=named_transport(given["transport"]),
        staging_bytes=given["staging_bytes"],
        timeout_s=timeout_s,
        pause=PauseMode(given["pause"]),
        memory=MemoryMode(given["memory"]),
        host=given["host"],
        allow_narrowing=given["allow_narrowing"],
    )
