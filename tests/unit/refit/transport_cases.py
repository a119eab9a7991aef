"""Which transports can be tested here."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from megatron_patches.refit.transports.base import TransportName

NEEDS = {TransportName.NIXL: ("nixl", "nixl_cu13", "nixl_cu12")}
"""Modules of which a transport needs one."""


def usable() -> list[Any]:
    """All transports that move host memory, as parameters of a test; skipped where a module is missing."""
    found = []
    for name in (name for name in TransportName if name not in (TransportName.CUDA_IPC, TransportName.C10D)):
        needed = NEEDS.get(name, ())
        missing = bool(needed) and not any(importlib.util.find_spec(module) for module in needed)
        reason = f"none of {', '.join(needed)} is installed"
        found.append(pytest.param(name, id=name.value, marks=pytest.mark.skipif(missing, reason=reason)))
    return found
