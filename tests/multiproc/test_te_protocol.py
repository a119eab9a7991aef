"""Transformer Engine's own Python code drives sharded weights through its DistributedWeight protocol, without a GPU.

No CPU installation of this package has Transformer Engine. Its files, and a shim that gives it CPU kernels, are taken
from the folder ``shared/gpu`` beside the checkout, and unpacked for the processes of these tests alone.
"""

from __future__ import annotations

import io
import lzma
import sys
import tarfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.multiproc import bodies_te_protocol as bodies
from tests.support.launch import run_distributed

SHARED = Path(__file__).resolve().parents[3] / "shared" / "gpu"
PIECES = sorted(SHARED.glob("te-site.tar.xz.[0-9][0-9]"))

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.cpu_only("tests/gpu/test_te.py runs the real kernels"),
    pytest.mark.skipif(not PIECES, reason="needs Transformer Engine and the shim in ../shared/gpu"),
    pytest.mark.skipif(find_spec("onnxscript") is None, reason="Transformer Engine imports onnxscript"),
]


@pytest.fixture(scope="module", autouse=True)
def transformer_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Transformer Engine where fresh processes find it."""
    site = tmp_path_factory.mktemp("site")
    packed = io.BytesIO(b"".join(piece.read_bytes() for piece in PIECES))
    with lzma.open(packed) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        archive.extractall(site, filter="data")
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
