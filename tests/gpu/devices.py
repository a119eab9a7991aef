"""Marks for tests that need CUDA devices or Transformer Engine."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.support.launch import rank_places


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skip unless there are ``count`` CUDA devices, or ranks may share them."""
    return pytest.mark.skipif(rank_places() < count, reason=f"needs {count} CUDA devices")


def needs_te() -> pytest.MarkDecorator:
    """Skip unless Transformer Engine is installed with a CUDA device to run on."""
    present = torch.cuda.is_available() and _has_te()
    return pytest.mark.skipif(not present, reason="needs 1 CUDA device and Transformer Engine")


def skip_what_gloo_cannot_capture(ranks: int) -> None:
    """Skip the test that calls this where ranks share GPUs: their process groups are gloo's."""
    if ranks > torch.cuda.device_count():
        pytest.skip("collectives of gloo, which ranks that share a GPU use, cannot be captured")


def _has_te() -> bool:
    try:
        return importlib.util.find_spec("transformer_engine.pytorch") is not None
    except ModuleNotFoundError:
        return False
