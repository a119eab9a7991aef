"""Which transports can be tested here."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from megatron_patches.refit.transports.base import TransportName

NEEDS = {"nixl": "nixl"}
"""The module that a transport needs, by name."""


def usable() -> list[Any]:
    """All transports that move host memory, as parameters of a test; skipped where a module is missing."""
    found = []
    for name in TransportName:
        needed = NEEDS.get(name.value)
        missing = needed is not None and importlib.util.find_spec(needed) is None
        found.append(pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"{needed} is not installed")))
    return found
