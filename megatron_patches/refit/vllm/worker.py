"""What a vLLM worker answers about its weights: an extension for ``--worker-extension-cls``."""

from __future__ import annotations

from typing import Any


class RefitWorker:
    """Methods that vLLM adds to its worker class."""

    weight_transfer_engine: Any

    def weights_version(self) -> int:
        """Version of the weights that serve; 0 for those that vLLM loaded itself."""
        return int(getattr(self.weight_transfer_engine, "version", 0))
