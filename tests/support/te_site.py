"""Transformer Engine's files, and a shim that gives it CPU kernels, as archives beside the checkout.

No CPU installation of this package has Transformer Engine.
"""

from __future__ import annotations

import io
import lzma
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared" / "gpu"
PIECES = sorted(SHARED.glob("te-site.tar.xz.[0-9][0-9]"))
MARKS = (
    pytest.mark.skipif(not PIECES, reason="needs Transformer Engine and the shim in ../shared/gpu"),
    pytest.mark.skipif(find_spec("onnxscript") is None, reason="Transformer Engine imports onnxscript"),
)


def unpack(folder: Path) -> None:
    """Write Transformer Engine's packages, and others that it needs, into ``folder``."""
    packed = io.BytesIO(b"".join(piece.read_bytes() for piece in PIECES))
    with lzma.open(packed) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        archive.extractall(folder, filter="data")


def put_on_path(folder: str) -> None:
    """Let this process find what :func:`unpack` wrote, although ``import etp`` found no Transformer Engine."""
    if sys.modules.get("transformer_engine", sys) is None:
        del sys.modules["transformer_engine"]
    sys.path.append(folder)
