"""Flags that configure pushes, for training scripts (with the prefix ``--refit-``) and for ``refit push``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_patches.refit.credentials import Credentials
from megatron_patches.refit.delta import PayloadKind
from megatron_patches.refit.engines import PauseMode, SleepMode
from megatron_patches.refit.memory_mode import MemoryMode
from megatron_patches.refit.session import RefitOptions
from megatron_patches.refit.transports.base import AUTO, TransportName, named_transport
from megatron_patches.refit.weight_format import WeightFormat


def add_flags(parser: argparse._ActionsContainer, prefix: str = "") -> None:
    """Adds the flags.

    Args:
        parser: parser to add them to.
        prefix: prefix of their names, such as ``refit-``.
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
        f"--{prefix}sleeping",
        choices=[mode.value for mode in SleepMode],
        default=defaults.sleeping.value,
        help="what a push does with an engine that sleeps at level 1 or 2: refuse it, wake it, or wake it and restore "
        "its sleep, at level 1; %(default)s by default",
    )
    parser.add_argument(
        f"--{prefix}payload",
        choices=[kind.value for kind in PayloadKind],
        default=defaults.payload.value,
        help="what travels: whole versions, or delta, which sends only elements that changed since the version that an "
        "engine serves and keeps a copy of the weights in every rank, beside them; %(default)s by default",
    )
    parser.add_argument(
        f"--{prefix}weight-format",
        choices=[kind.value for kind in WeightFormat],
        default=defaults.weight_format.value,
        help="format of the weights that engines load and receive: as they are trained, or fp8_block, which quantizes "
        "linear layers with a scale for each block of 128 x 128; %(default)s by default",
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
    parser.add_argument(
        f"--{prefix}lease",
        type=float,
        default=defaults.lease_s,
        metavar="SECONDS",
        help="how long engines wait for a sign of life of the trainer before they go on without it; %(default)s by "
        "default",
    )
    parser.add_argument(
        f"--{prefix}secret-file",
        type=Path,
        metavar="FILE",
        help="file with the secret of the engines, read by the first rank; by default ETP_REFIT_SECRET, or the file "
        "that ETP_REFIT_SECRET_FILE names, or that in the home directory to which an engine writes one",
    )
    parser.add_argument(
        f"--{prefix}headers-file",
        type=Path,
        metavar="FILE",
        help="file with further headers of requests to engines, such as a proxy wants, one 'Name: value' a line; with "
        "VLLM_API_KEY set, that key is sent without being told to",
    )


def credentials_from(args: argparse.Namespace, prefix: str = "") -> Credentials:
    """The credentials that the flags select; arguments as for :func:`options_from`."""
    start = prefix.replace("-", "_")
    given = vars(args)
    return Credentials(secret_file=given[f"{start}secret_file"], headers_file=given[f"{start}headers_file"])


def options_from(
    args: argparse.Namespace, timeout_s: float, prefix: str = "", timeout_flag: str = "timeout"
) -> RefitOptions:
    """The options that the flags select.

    Args:
        args: parsed arguments, with those of :func:`add_flags`.
        timeout_s: seconds that a step may take after its first party has finished.
        prefix: prefix given to :func:`add_flags`.
        timeout_flag: name, without the prefix, of the flag for ``timeout_s``.

    Raises:
        ValueError: with the flag's name if a value is out of range.
    """
    start = prefix.replace("-", "_")
    given = {name.removeprefix(start): value for name, value in vars(args).items() if name.startswith(start)}
    values: dict[str, tuple[str, Any]] = {
        "transport": ("transport", named_transport(given["transport"])),
        "staging_bytes": ("staging-bytes", given["staging_bytes"]),
        "timeout_s": (timeout_flag, timeout_s),
        "pause": ("pause", PauseMode(given["pause"])),
        "memory": ("memory", MemoryMode(given["memory"])),
        "sleeping": ("sleeping", SleepMode(given["sleeping"])),
        "payload": ("payload", PayloadKind(given["payload"])),
        "weight_format": ("weight-format", WeightFormat(given["weight_format"])),
        "host": ("host", given["host"]),
        "allow_narrowing": ("allow-narrowing", given["allow_narrowing"]),
        "lease_s": ("lease", given["lease"]),
    }
    for name, (flag, value) in values.items():
        try:
            RefitOptions(**{name: value})
        except ValueError as error:
            raise ValueError(f"--{prefix}{flag}: {error}") from error
    return RefitOptions(**{name: value for name, (_, value) in values.items()})
