"""Marks for tests that need CUDA devices or Transformer Engine."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.support.launch import rank_places


def needs_gpus(count: int, *, shared: bool = True) -> pytest.MarkDecorator:
    """Skip unless there are ``count`` CUDA devices, or ranks may share them.

    Args:
        count: the number of ranks.
        shared: False for what does not work with two ranks on one device.
    """
    places = rank_places() if shared else torch.cuda.device_count()
    return pytest.mark.skipif(places < count, reason=f"needs {count} CUDA devices")


def needs_te() -> pytest.MarkDecorator:
    """Skip unless Transformer Engine is installed with a CUDA device to run on."""
    present = torch.cuda.is_available() and _has_te()
    return pytest.mark.skipif(not present, reason="needs 1 CUDA device and Transformer Engine")


def _has_te() -> bool:
    try:
        return importlib.util.find_spec("transformer_engine.pytorch") is not None
    except ModuleNotFoundError:
        return False


def needs_fp8() -> pytest.MarkDecorator:
    """Skip unless the device multiplies FP8 with scales of blocks, as Hopper does."""
    enough = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return pytest.mark.skipif(not enough, reason="needs a GPU of compute capability 9.0")
