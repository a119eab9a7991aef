"""A vLLM worker that can be told, over HTTP, to vote a version down; for ``--worker-extension-cls``."""

from __future__ import annotations

from tests.support.vllm_digests import DigestingWorker
from tests.support.vllm_host import sabotage


class SabotagedWorker(DigestingWorker):
    """Lets the second worker fail when it has half replaced its weights."""

    def sabotage(self) -> None:
        """For the next version."""
        sabotage(self, 1, "apply")
