"""Flags that configure pushes, for training scripts (with the prefix ``--refit-``) and for ``refit push``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_patches.refit.control.credentials import Credentials
from megatron_patches.refit.parties.choosing import why_not_here
from megatron_patches.refit.trainer.session import RefitOptions
from megatron_patches.refit.transports.base import AUTO, TransportName

_HELP: Mapping[str, str] = MappingProxyType(
    {
        "transport": "how weights travel: shm and cuda_ipc within one host, the others everywhere, auto the fastest "
        "that reaches all engines",
        "staging_bytes": "the most memory that packets take in one process, on either side",
        "pause": "what happens to requests in flight when new weights take effect: wait lets them finish first, "
        "abort aborts them, keep continues them with the new weights",
        "memory": "where engines receive new weights: beside those that serve, which takes memory for a second copy, "
        "or in_place, which pauses the engines from before the first byte",
        "sleeping": "what a push does with an engine that sleeps at level 1 or 2: refuse it, wake it, or wake it and "
        "restore its sleep, at level 1",
        "payload": "what travels: whole versions, or delta, which sends only elements that changed since the version "
        "that an engine serves and keeps a copy of the weights in every rank, beside them",
        "weight_format": "format of the weights that engines load and receive: as they are trained, or fp8_block, "
        "which quantizes linear layers with a scale for each block of 128 x 128",
        "nics": "which network interfaces nixl may use on the trainer's side: auto for the RDMA NICs closest to each "
        "GPU, all for those that UCX chooses, a list such as mlx5_0,mlx5_1, or one for each GPU such as "
        "0=mlx5_0+mlx5_1,1=mlx5_2",
        "host": "address at which engines can reach the trainer's first machine",
        "allow_narrowing": "also push weights that an engine keeps in a narrower type than the trainer, which rounds "
        "them",
        "lease_s": "how long engines wait for a heartbeat from the trainer before they continue without it",
    }
)
"""Help of the flag of each option of :class:`RefitOptions`. A flag is named as its option, without the unit."""


def add_flags(parser: argparse._ActionsContainer, prefix: str = "") -> None:
    """Adds the flags.

    Args:
        parser: parser to add them to.
        prefix: prefix of their names, such as ``refit-``.
    """
    for option, text in _HELP.items():
        name, default = f"--{prefix}{_flag_of(option)}", getattr(RefitOptions(), option)
        kind = TransportName if option == "transport" else type(default)
        told = f"{text}; %(default)s by default"
        if kind is bool:
            parser.add_argument(name, action="store_true", help=text)
        elif issubclass(kind, StrEnum):
            choices = [AUTO] * (default is None) + [each.value for each in kind]
            parser.add_argument(
                name, choices=choices, default=choices[0] if default is None else default.value, help=told
            )
        else:
            unit = {"staging_bytes": "BYTES", "lease_s": "SECONDS", "host": "ADDRESS", "nics": "NICS"}[option]
            parser.add_argument(name, type=kind, default=default, metavar=unit, help=told)
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
        help="file with extra headers for requests to engines, such as those that a proxy requires, one 'Name: value' "
        "per line; if VLLM_API_KEY is set, that key is sent as well",
    )


def credentials_from(args: argparse.Namespace, prefix: str = "") -> Credentials:
    """The credentials that the flags select; arguments as for :func:`options_from`."""
    start = prefix.replace("-", "_")
    given = vars(args)
    return Credentials(secret_file=given[f"{start}secret_file"], headers_file=given[f"{start}headers_file"])


def options_from(
    args: argparse.Namespace,
    timeout_s: float,
    prefix: str = "",
    more: Mapping[str, tuple[str, object]] = MappingProxyType({}),
) -> RefitOptions:
    """The options that the flags select.

    Args:
        args: parsed arguments, with those of :func:`add_flags`.
        timeout_s: seconds that a step may take after its first party has finished.
        prefix: prefix given to :func:`add_flags`.
        more: further options by name: each the name of its flag, without the prefix, and its value.

    Raises:
        ValueError: with the flag's name if a value is out of range, or the transport cannot be used in this process.
    """
    start, given = prefix.replace("-", "_"), vars(args)
    values: dict[str, tuple[str, Any]] = {
        "timeout_s": ("timeout", timeout_s),
        **{option: (_flag_of(option), given[start + option.removesuffix("_s")]) for option in _HELP},
        **more,
    }
    options = RefitOptions()
    for name, (flag, value) in values.items():
        try:
            options = replace(options, **{name: value})
        except ValueError as error:
            raise ValueError(f"--{prefix}{flag}: {error}") from error
    if why := why_not_here(options.transport):
        raise ValueError(f"--{prefix}transport: {why}")
    return options


def _flag_of(option: str) -> str:
    return option.removesuffix("_s").replace("_", "-")
