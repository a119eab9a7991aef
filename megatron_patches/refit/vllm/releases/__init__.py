"""The supported releases of vLLM: one adapter each. All other releases are refused.

Refit reaches below vLLM's documented interface: to its layerwise reloading, to what attention derives from weights, and
to options that keep weights elsewhere. All of this is behind a
:class:`~megatron_patches.refit.vllm.releases.release.Release`; the file of a release holds what is specific to it.
Adapters exist only for releases that the live tests run on.
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

ADAPTERS: Mapping[str, str] = MappingProxyType({"0.26.0": "v0_26", "0.32.0": "v0_32", "0.33.0": "v0_33"})
"""Module of the adapter, by vLLM release."""


def check_known(version: str) -> str:
    """The name of the adapter for a vLLM release.

    Args:
        version: version string of vLLM, such as ``0.33.0`` or ``0.32.0+cpu``.

    Raises:
        UnsupportedEngineError: with the release, and those that have an adapter.
    """
    public = version.partition("+")[0]
    if public in ADAPTERS:
        return ADAPTERS[public]
    raise UnsupportedEngineError(
        f"weights cannot be pushed into vLLM {version}; this package was tested with {', '.join(ADAPTERS)}: "
        f"pip install vllm=={list(ADAPTERS)[-1]}"
    )


@functools.cache
def installed_release() -> Release:
    """The adapter of the installed vLLM.

    Raises:
        UnsupportedEngineError: if the release has no adapter, or lacks a name that the adapter uses.
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
