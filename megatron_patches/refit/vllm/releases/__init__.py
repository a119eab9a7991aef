"""The releases of vLLM that weights are pushed into: one adapter each, and the refusal of all others.

Refit reaches below vLLM's documented interface: to its layerwise reloading, to what attention derives from weights, and
to options that keep weights elsewhere. All of that is behind a
:class:`~megatron_patches.refit.vllm.releases.release.Release`, whose file for a release of vLLM holds what that release
does in its own way. An adapter is only written for a release that the live tests run on, so a release without one is
refused, by name.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from megatron_patches.refit.errors import UnsupportedEngineError

if TYPE_CHECKING:
    from megatron_patches.refit.vllm.releases.release import Release

ADAPTERS: Mapping[str, str] = MappingProxyType({"0.26.0": "v0_26", "0.32.0": "v0_32"})
"""By release of vLLM: the module of its adapter."""

_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "0.33": "there was no build of it for CPUs to test; its layerwise reloading is that of 0.32.0, but it can put "
        "other experts in the place of a model's, and refuses requests during a pause",
    }
)
"""What is known of releases without an adapter, by their first two numbers."""


def check_known(version: str) -> str:
    """The adapter's name for a release of vLLM.

    Args:
        version: as vLLM states it, such as ``0.32.0`` or ``0.32.0+cpu``.

    Raises:
        UnsupportedEngineError: naming the release, what is known of it, and the releases that have an adapter.
    """
    public = version.partition("+")[0]
    if public in ADAPTERS:
        return ADAPTERS[public]
    known = next((f" ({note})" for first, note in _OTHERS.items() if public.startswith(f"{first}.")), "")
    raise UnsupportedEngineError(
        f"weights cannot be pushed into vLLM {version}{known}; this package was tested with "
        f"{' and '.join(ADAPTERS)}: pip install vllm=={list(ADAPTERS)[-1]}"
    )


@functools.cache
def installed() -> Release:
    """The adapter of the installed vLLM.

    Raises:
        UnsupportedEngineError: if that release has none, or lacks a name that the adapter uses.
    """
    from vllm.version import __version__ as version

    module = check_known(str(version))
    try:
        release: Release = importlib.import_module(f"{__name__}.{module}").ADAPTER
    except ImportError as error:
        raise UnsupportedEngineError(
            f"this vLLM {version} is not as it was released: {error}; install it unmodified"
        ) from error
    missing = release.missing_names()
    if missing:
        raise UnsupportedEngineError(
            f"this vLLM {version} is not as it was released: it has no {', '.join(missing)}; install it unmodified"
        )
    return release
