"""A worker extension for vLLM's ``--worker-extension-cls`` that reports the weights' version and a refit's state."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any


class RefitWorker:
    """Methods that vLLM adds to its worker class."""

    weight_transfer_engine: Any

    def weights_version(self) -> int:
        """Version of the serving weights; 0 for those that vLLM loaded itself."""
        return int(getattr(self.weight_transfer_engine, "version", 0))

    def refit_state(self) -> dict[str, Any] | None:
        """The state of a refit, and what this worker waits for, as ``Standing``'s fields; None without a trainer."""
        standing = self.weight_transfer_engine.state()
        return None if standing is None else asdict(standing)
