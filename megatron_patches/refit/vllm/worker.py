"""An extension for ``--worker-extension-cls`` with which vLLM workers report on their weights."""

from __future__ import annotations

from typing import Any


class RefitWorker:
    """Methods that vLLM adds to its worker class."""

    weight_transfer_engine: Any

    def weights_version(self) -> int:
        """Version of the weights that serve; 0 for those that vLLM loaded itself."""
        return int(getattr(self.weight_transfer_engine, "version", 0))
