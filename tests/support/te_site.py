"""Transformer Engine's files, and a shim that gives it CPU kernels, as archives beside the checkout.

No CPU installation of this package has Transformer Engine.
"""

from __future__ import annotations

import io
import lzma
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

SHARED = Path(__file__).resolve().parents[3] / "shared" / "gpu"
PIECES = sorted(SHARED.glob("te-site.tar.xz.[0-9][0-9]"))
MARKS = (
    pytest.mark.skipif(not PIECES, reason="needs Transformer Engine and the shim in ../shared/gpu"),
    pytest.mark.skipif(not torch.__version__.startswith("2.11."), reason="../shared/gpu has it for PyTorch 2.11"),
    pytest.mark.skipif(find_spec("onnxscript") is None, reason="Transformer Engine imports onnxscript"),
)


def unpack(folder: Path) -> None:
    """Write Transformer Engine's packages, and others that it needs, into ``folder``."""
    packed = io.BytesIO(b"".join(piece.read_bytes() for piece in PIECES))
    with lzma.open(packed) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        archive.extractall(folder, filter="data")


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Unpack Transformer Engine into ``folder``, and let fresh processes find it there."""
    unpack(folder)
    with pytest.MonkeyPatch.context() as patch:
        # Behind everything else: of what is unpacked only Transformer Engine is wanted. Workers get this path.
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        yield


def add_fp8_kernels() -> None:
    """Give Transformer Engine CPU kernels for FP8 that the shim does not have."""
    import transformer_engine_torch as tex

    def transpose(data: torch.Tensor, dtype: Any, *, out: torch.Tensor | None) -> torch.Tensor:
        return data.t().contiguous() if out is None else out.copy_(data.t())

    def split(tensor: torch.Tensor, sizes: list[int], quantizers: list[Any], **_: Any) -> list[Any]:
        return [q(part) for q, part in zip(quantizers, tensor.split(sizes), strict=True)]

    def repad(rows: torch.Tensor, out: torch.Tensor, sizes: list[int], wanted: list[int]) -> None:
        for part, target in zip(rows.split(sizes), out.split(wanted), strict=True):
            kept = min(len(part), len(target))
            target[:kept] = part[:kept]
            target[kept:] = 0

    def swap(blocks: torch.Tensor, *, out: torch.Tensor) -> None:
        out.copy_(blocks.transpose(0, 1))

    tex.fp8_transpose, tex.split_quantize, tex.swap_first_dims = transpose, split, swap
    tex.fused_multi_row_padding = tex.fused_multi_row_unpadding = repad
