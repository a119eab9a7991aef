"""Digests of what a vLLM worker holds; also over HTTP, for a server started with the extension below."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from megatron_patches.refit.vllm.worker import RefitWorker

EXTENSION = "tests.support.vllm_digests.DigestingWorker"


def digests_of(worker: Any) -> dict[str, str]:
    """Digest of each parameter and buffer of a worker's model, by name."""
    model = worker.get_model()
    return {
        name: hashlib.sha256(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if tensor.dim()
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's content, wherever it is."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class DigestingWorker(RefitWorker):
    """A worker that can be asked for its digests."""

    def digests(self) -> dict[str, str]:
        """See :func:`digests_of`."""
        return digests_of(self)
