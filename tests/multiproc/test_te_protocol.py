"""Transformer Engine's own Python code drives sharded weights through its DistributedWeight protocol, without a GPU.

Its files are unpacked for the processes of these tests alone: see :mod:`tests.support.te_site`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.multiproc import bodies_te_protocol as bodies
from tests.support.launch import run_distributed
from tests.support.te_site import MARKS, SHARED, unpack

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.cpu_only("tests/gpu/test_te.py runs the real kernels"),
    *MARKS,
]


@pytest.fixture(scope="module", autouse=True)
def transformer_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Transformer Engine where fresh processes find it."""
    site = tmp_path_factory.mktemp("site")
    unpack(site)
    with pytest.MonkeyPatch.context() as patch:
        # Behind everything else: of what is unpacked only Transformer Engine is wanted. Workers get this path.
        patch.setattr(sys, "path", [*sys.path, str(site)])
        yield


def test_te_modules_equal_whole() -> None:
    counts = run_distributed(bodies.te_modules_equal_whole, 2, args=(str(SHARED),), fresh=True)
    assert counts == [20, 20]


def test_hooks_run_once_behind_the_last_use() -> None:
    for answers in run_distributed(bodies.hooks_of_two_uses, 2, args=(str(SHARED),), fresh=True):
        assert len(answers) == len(bodies.KINDS)
        for counts in answers.values():
            assert set(counts.values()) == {3}
