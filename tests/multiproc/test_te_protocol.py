"""Transformer Engine's own Python code drives sharded weights through its DistributedWeight protocol, without a GPU.

Needs Transformer Engine, which no CPU installation of this package has, and a shim that gives it CPU kernels, from the
folder ``shared/gpu`` beside the checkout.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.multiproc import bodies_te_protocol as bodies
from tests.support.launch import run_distributed

SHIM = Path(__file__).resolve().parents[3] / "shared" / "gpu"


def _present() -> bool:
    try:
        found = importlib.util.find_spec("transformer_engine.pytorch") is not None
    except (ImportError, OSError):
        return False
    return found and (SHIM / "te_cpu_shim.py").is_file()


@pytest.mark.multiproc
@pytest.mark.skipif(not _present(), reason="needs Transformer Engine and the shim in ../shared/gpu")
def test_te_modules_equal_whole() -> None:
    counts = run_distributed(bodies.te_modules_equal_whole, 2, args=(str(SHIM),), fresh=True)
    assert counts == [20, 20]


@pytest.mark.multiproc
@pytest.mark.skipif(not _present(), reason="needs Transformer Engine and the shim in ../shared/gpu")
def test_hooks_run_once_behind_the_last_use() -> None:
    for answers in run_distributed(bodies.hooks_of_two_uses, 2, args=(str(SHIM),), fresh=True):
        assert len(answers) == len(bodies.KINDS)
        for counts in answers.values():
            assert set(counts.values()) == {3}
