"""Moves a training run's weight shards to where they are served, without ever building a full tensor.

Every region of every weight is a :class:`~megatron_patches.refit.boxes.Box` in the global coordinates of a Hugging Face
tensor. A trainer rank lists the boxes that it holds (``source``), an engine worker lists those that it wants, ``plan``
matches the two, ``proof`` shows that nothing is missing, duplicated or padding, a transport moves the bytes, and
``digest`` compares what arrived with what was sent.

Programs publish weights with :class:`WeightPublisher`, which needs neither Megatron nor a launcher. The names below are
imported when they are first used, so that the pure modules (``boxes``, ``manifest``, ``plan``, ``proof``) can be used
without torch, and engines need nothing of the trainer's side.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_patches.refit.adapters import AdapterPublisher
    from megatron_patches.refit.kv_scales import KVScales
    from megatron_patches.refit.publisher import PublishHandle, WeightPublisher
    from megatron_patches.refit.push_options import EngineReport, Fate, OnEngineFailure, PushReport, RefitOptions

__all__ = [
    "AdapterPublisher",
    "EngineReport",
    "Fate",
    "KVScales",
    "OnEngineFailure",
    "PublishHandle",
    "PushReport",
    "RefitOptions",
    "WeightPublisher",
]

if not TYPE_CHECKING:  # a type checker takes the names from above, and knows that there are no others

    def __getattr__(name: str) -> Any:
        """Imports what is exported when it is first used."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        homes = {
            "AdapterPublisher": "adapters",
            "KVScales": "kv_scales",
            "PublishHandle": "publisher",
            "WeightPublisher": "publisher",
        }
        home = homes.get(name, "push_options")
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
