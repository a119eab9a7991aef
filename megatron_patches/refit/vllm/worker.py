"""A worker extension for vLLM's ``--worker-extension-cls`` that reports the version of the weights."""

from __future__ import annotations

from typing import Any


class RefitWorker:
    """Methods that vLLM adds to its worker class."""

    weight_transfer_engine: Any

    def weights_version(self) -> int:
        """Version of the serving weights; 0 for those that vLLM loaded itself."""
        return int(getattr(self.weight_transfer_engine, "version", 0))
