"""The look at a checkpoint's files, on checkpoints that torch has written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.launch import run_distributed

# Importing Megatron warns, and patches torch: it runs in a worker process.


def save(rank: int, world_size: int, folder: str) -> None:
    del world_size
    generator = torch.Generator().manual_seed(rank)
    dcp.save({"a": torch.randn(50, 20, generator=generator)}, storage_writer=dcp.FileSystemWriter(folder))


def write_checkpoint(folder: Path) -> int:
    """A checkpoint of one file; returns its size."""
    run_distributed(save, 1, args=(str(folder),))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (file,) = folder.glob("*.distcp")
    return file.stat().st_size


def problem(rank: int, world_size: int, folder: str) -> str | None:
    del rank, world_size
    from megatron_patches.checkpoint.verify import find_problem

    return find_problem(folder)


def find(folder: Path) -> str | None:
    return run_distributed(problem, 1, backend=None, args=(str(folder),))[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path)
    return tmp_path


def test_a_whole_checkpoint_has_no_problem(folder: Path) -> None:
    assert find(folder) is None


def test_a_longer_file_is_no_problem(folder: Path) -> None:
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes() + b"more")
    assert find(folder) is None


def cut(name: str, size: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (file,) = folder.glob(name)
        file.write_bytes(file.read_bytes()[:size])

    return spoil


def remove(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (file,) = folder.glob(name)
        file.unlink()

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove("*.distcp"), "__0_0.distcp is missing"),
        (cut("*.distcp", 1000), "__0_0.distcp has 1000 bytes of {size}"),
        (remove(".metadata"), ".metadata is missing: the save did not end, or the file was not copied"),
        (cut(".metadata", 60), ".metadata cannot be read"),
        (cut(".metadata", 0), ".metadata cannot be read"),
        (remove("metadata.json"), "metadata.json is missing"),
        (cut("metadata.json", 10), "metadata.json cannot be read"),
    ],
)
def test_a_spoilt_file_is_named(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    size = write_checkpoint(tmp_path)
    spoil(tmp_path)
    found = find(tmp_path)
    assert found is not None
    assert found.startswith(f"checkpoint {tmp_path}: {message.format(size=size)}")
    assert found.endswith("; copy the checkpoint again, or load another iteration with --ckpt-step")


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    found = find(tmp_path / "iter_0000007")
    assert found is not None
    assert "iter_0000007: the directory is missing" in found
