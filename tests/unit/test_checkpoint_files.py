"""The look at a checkpoint's files, on checkpoints that torch has written."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import cast

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


def test_an_index_that_keeps_the_plans_of_its_save_is_read(folder: Path) -> None:
    """Megatron adds them to the index, and PyTorch 2.15 writes what was added, too."""
    shards = {"a": torch.randn(4, 2), "b": 3}
    index = pickle.loads((folder / ".metadata").read_bytes())
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(shards, is_coordinator=True)
    index.all_local_plans = dcp.FileSystemWriter(folder).prepare_global_plan([planner.create_local_plan()])
    (folder / ".metadata").write_bytes(pickle.dumps(index))
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


def fill(name: str, data: bytes) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return spoil


def name_no_file(folder: Path) -> None:
    """Let the index say that a tensor is in a file whose name is a number."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    for entry in index.storage_data.values():
        entry.relative_path = 5
    (folder / ".metadata").write_bytes(pickle.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove("*.distcp"), "__0_0.distcp is missing"),
        (cut("*.distcp", 1000), "__0_0.distcp has 1000 bytes of {size}"),
        (remove(".metadata"), ".metadata is missing: the save did not end, or the file was not copied"),
        (cut(".metadata", 60), ".metadata cannot be read"),
        (cut(".metadata", 0), ".metadata cannot be read"),
        (fill(".metadata", b"\x80\x04})R."), ".metadata cannot be read (TypeError"),
        (fill(".metadata", b"\x80\x05\x96" + b"\xff" * 8), ".metadata cannot be read (OverflowError"),
        (fill(".metadata", b"\x80\x05\x8e" + b"\xff" * 7 + b"\x0f"), ".metadata cannot be read ("),
        (name_no_file, "its files cannot be examined (TypeError"),
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


def format_of(rank: int, world_size: int, folder: str, size: int | None) -> str:
    del rank, world_size
    import argparse

    from megatron_patches.checkpoint.verify import wrap_get_checkpoint_format

    args = argparse.Namespace(ckpt_format="torch_dist", etp_size=size, expert_etp_size=None)
    try:
        return cast("str", wrap_get_checkpoint_format(lambda *_: "torch")(folder, args))
    except Exception as error:  # noqa: BLE001  # Megatron's class of errors stays in this process
        return str(error)


@pytest.mark.parametrize(
    ("size", "answer"), [(None, "torch"), (1, "torch"), (2, "it has the format torch, which cannot be loaded into")]
)
def test_the_old_format_is_only_refused_with_shards(tmp_path: Path, size: int | None, answer: str) -> None:
    """With --use-checkpoint-args it is looked at while an --etp-size that was left out is still None."""
    (tmp_path / "mp_rank_00").mkdir()
    assert answer in run_distributed(format_of, 1, backend=None, args=(str(tmp_path), size))[0]


class Runs:
    """Runs something when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self.mark,)


def test_an_index_that_runs_code_is_refused_and_does_not_run(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "has run"
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.planner_data = Runs(mark)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    found = find(folder)
    assert found is not None
    assert ".metadata is not what a checkpoint has: it would run pathlib.Path.touch" in found
    assert "do not load it unless you trust its origin" in found
    assert not mark.exists()


def changed(rank: int, world_size: int, folder: str, part: int, parts: int) -> tuple[str, str, str] | None:
    del rank, world_size
    from megatron_patches.checkpoint.integrity import find_changed

    return find_changed(Path(folder), lambda name: name != "left out", part, parts)


def test_one_changed_byte_of_a_tensor_is_found_by_the_rank_that_reads_it(folder: Path) -> None:
    def find_in(part: int, parts: int) -> tuple[str, str, str] | None:
        return run_distributed(changed, 1, backend=None, args=(str(folder), part, parts))[0]

    assert find_in(0, 1) is None
    (file,) = folder.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(torch.randn(50, 20, generator=torch.Generator().manual_seed(0)).numpy().tobytes()[:64]) + 33] ^= 4
    file.write_bytes(data)
    found = find_in(0, 2)
    assert found is not None
    assert found[:2] == ("a", "__0_0.distcp")
    assert found[2].startswith("has changed bytes in ")
    assert find_in(1, 2) is None
    file.write_bytes(bytes(len(data)))
    found = find_in(0, 1)
    assert found is not None
    assert found[2].startswith("is no archive of a tensor any more")
