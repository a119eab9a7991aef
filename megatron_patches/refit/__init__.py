"""Moves a training run's weight shards to where they are served, without ever building a full tensor.

Every region of every weight is a :class:`~megatron_patches.refit.layout.boxes.Box` in the global coordinates of a
Hugging Face tensor. A trainer rank lists the boxes that it holds (``source``), an engine worker lists those that it
wants (``target``), ``planning`` matches the two and proves that nothing is missing, duplicated or padding, one of the
``transports`` moves the bytes, and digests of what arrived are compared with those of what was sent.

Programs publish weights with :class:`WeightPublisher`, which needs neither Megatron nor a launcher. The names below are
imported when they are first used, so that ``layout`` and ``planning`` can be used without torch, and engines need
nothing of the trainer's side.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_patches.refit.control.kv_scales import KVScales
    from megatron_patches.refit.errors import RefitError
    from megatron_patches.refit.trainer.adapters import AdapterPublisher
    from megatron_patches.refit.trainer.engine_client import EngineClient, PauseMode
    from megatron_patches.refit.trainer.engines import HttpEngine, LocalEngine
    from megatron_patches.refit.trainer.publisher import PublishHandle, WeightPublisher
    from megatron_patches.refit.trainer.push_options import (
        EngineReport,
        Fate,
        OnEngineFailure,
        PushReport,
        RefitOptions,
    )

__all__ = [
    "AdapterPublisher",
    "EngineClient",
    "EngineReport",
    "Fate",
    "HttpEngine",
    "KVScales",
    "LocalEngine",
    "OnEngineFailure",
    "PauseMode",
    "PublishHandle",
    "PushReport",
    "RefitError",
    "RefitOptions",
    "WeightPublisher",
]

if not TYPE_CHECKING:  # a type checker takes the names from above, and knows that there are no others

    def __getattr__(name: str) -> Any:
        """Imports what is exported when it is first used."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        homes = {
            "AdapterPublisher": "trainer.adapters",
            "EngineClient": "trainer.engine_client",
            "HttpEngine": "trainer.engines",
            "KVScales": "control.kv_scales",
            "LocalEngine": "trainer.engines",
            "PauseMode": "trainer.engine_client",
            "PublishHandle": "trainer.publisher",
            "RefitError": "errors",
            "WeightPublisher": "trainer.publisher",
        }
        home = homes.get(name, "trainer.push_options")
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
