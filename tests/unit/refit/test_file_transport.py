"""Checkpoints written by several ranks, here threads: bytes, sharding, and what is left when something fails."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors import safe_open

from megatron_patches.refit.checkpoints.checkpoint_dir import CheckpointDirectory
from megatron_patches.refit.checkpoints.export import ExportOptions
from megatron_patches.refit.checkpoints.file import share_of, verify_tensors, write_boxes
from megatron_patches.refit.checkpoints.safetensors_layout import INDEX_NAME, layout_checkpoint
from megatron_patches.refit.control.exchange import Exchange, default_exchange, together
from megatron_patches.refit.errors import ExportError, RefitError
from megatron_patches.refit.layout.boxes import TensorSpec, View, row_major_strides
from megatron_patches.refit.layout.digest import combine
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.planning.plan import PlanOptions, make_plan

T = TypeVar("T")
TENSORS = [
    TensorSpec("rows", (13, 8), "float32"),
    TensorSpec("columns", (9, 12), "bfloat16"),
    TensorSpec("norm", (8,), "float32"),
    TensorSpec("scalar", (), "float64"),
]
CONFIG = {"model_type": "llama"}


def ignore(nbytes: int) -> None:
    """Progress that nobody watches."""


class Threads:
    """An exchange between threads, for as many ranks as it is given."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def member(self, rank: int) -> ThreadMember:
        return ThreadMember(self, rank)

    def gather(self, rank: int, value: T) -> list[T]:
        self._values[rank] = value
        self._barrier.wait()
        gathered = list(self._values)
        self._barrier.wait()
        return gathered


class ThreadMember(Exchange):
    """One rank of it."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads = threads
        self.rank = rank
        self.size = threads.size

    def gather(self, value: T) -> list[T]:
        return self._threads.gather(self.rank, value)


def dense() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {s.name: torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype)) for s in TENSORS}


def spread(ranks: int) -> tuple[list[Manifest], list[dict[str, torch.Tensor]]]:
    """``rows`` cut by rows, ``columns`` by columns, the others on every rank; each box with a gap before it."""
    manifests, memories = [], []
    for rank in range(ranks):
        storages, placements, memory = [], [], {}
        for spec in TENSORS:
            box = spec.box
            if spec.name in ("rows", "columns"):
                box = box.split(ranks, 0 if spec.name == "rows" else 1)[rank]
            inside = tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))
            values = dense()[spec.name][inside]
            flat = torch.full((box.volume + 3,), float("nan"), dtype=values.dtype)
            flat[3:] = values.reshape(-1)
            memory[spec.name] = flat
            storages.append(Storage(spec.name, spec.dtype, flat.numel(), flat.numel()))
            placements.append(Placement(box, View(spec.name, 3, box.shape, row_major_strides(box.shape))))
        manifests.append(Manifest(rank, "", tuple(storages), tuple(placements)))
        memories.append(memory)
    return manifests, memories


def export(target: Path, ranks: int, max_shard_bytes: int = 10**9, overwrite: bool = False, **hooks: Any) -> None:
    """All phases of an export, every rank a thread, as `megatron_patches.refit.checkpoints.export` runs them."""
    manifests, memories = spread(ranks)
    layout = layout_checkpoint(TENSORS, max_shard_bytes)
    options = PlanOptions(split_bytes=32)
    plan = make_plan(TENSORS, manifests, [layout.manifest()], options)
    threads = Threads(ranks)

    def rank_main(rank: int) -> None:
        exchange = threads.member(rank)
        directory = CheckpointDirectory(target, "test", overwrite)
        try:
            phase(exchange, directory.create)
            phase(exchange, lambda: directory.allocate(layout))
            shares = together(exchange, "export", lambda: write(rank, directory.partial))
            expected = {s.name: combine(share.get(s.name, 0) for share in shares) for s in TENSORS}
            hooks.get("before_verify", ignore)(directory.partial)
            mine = share_of(TENSORS, rank, ranks)
            together(exchange, "export", lambda: verify_tensors(mine, expected, layout, directory.partial, 64, ignore))
            phase(exchange, lambda: directory.commit(layout, CONFIG, {}))
        except ExportError:
            if rank == 0:
                directory.discard()
            raise

    def phase(exchange: ThreadMember, work: Callable[[], None]) -> None:
        together(exchange, "export", work if exchange.rank == 0 else lambda: None)

    def write(rank: int, partial: Path) -> dict[str, int]:
        hooks.get("before_write", lambda *_: None)(rank, partial)
        return write_boxes(plan, rank, memories[rank], layout, partial, 128, ignore)

    with ThreadPoolExecutor(ranks) as pool:
        outcomes = list(pool.map(lambda rank: caught(lambda: rank_main(rank)), range(ranks)))
    errors = [outcome for outcome in outcomes if outcome is not None]
    assert len(errors) in (0, ranks), "an export must fail on all ranks or on none"
    if errors:
        assert {str(error) for error in errors} == {str(errors[0])}
        raise errors[0]


def caught(work: Callable[[], None]) -> ExportError | None:
    try:
        work()
    except ExportError as error:
        return error
    return None


def assert_whole(target: Path) -> None:
    """Every tensor under ``target`` as safetensors' own reader sees it, and nothing beside it."""
    found: dict[str, torch.Tensor] = {}
    for file in target.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            found.update({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118
    expected = dense()
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        assert torch.equal(found[name], values), name
    assert json.loads((target / "config.json").read_text()) == CONFIG
    assert not list(target.parent.glob(".*partial*"))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_write_their_boxes_into_one_file(tmp_path: Path, ranks: int) -> None:
    export(tmp_path / "out", ranks)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert_whole(tmp_path / "out")


def test_files_are_cut_by_size_and_indexed(tmp_path: Path) -> None:
    export(tmp_path / "out", 3, max_shard_bytes=300)
    assert_whole(tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in TENSORS) == 672
    assert index["weight_map"] == {
        "rows": "model-00001-of-00002.safetensors",
        "columns": "model-00002-of-00002.safetensors",
        "norm": "model-00002-of-00002.safetensors",
        "scalar": "model-00002-of-00002.safetensors",
    }


def test_tensors_are_aligned_to_their_elements() -> None:
    layout = layout_checkpoint([TensorSpec("a", (3,), "bfloat16"), TensorSpec("b", (3,), "float64")], 1000)
    file, offset = layout.locations["b"]
    assert offset % 8 == 0
    assert len(file.header) % 8 == 0
    assert file.nbytes == len(file.header) + 30


def test_adjacent_runs_go_out_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two storages whose boxes follow each other in the file: one vectored write, two buffers."""
    spec = TensorSpec("w", (4, 8), "float32")
    values = torch.randn(4, 8)
    top, bottom = spec.box.split(2, 0)
    places = [Placement(box, View(name, 0, (2, 8), (8, 1))) for name, box in (("one", top), ("two", bottom))]
    storages = tuple(Storage(name, "float32", 16, 16) for name in ("one", "two"))
    layout = layout_checkpoint([spec], 1000)
    plan = make_plan([spec], [Manifest(0, "", storages, tuple(places))], [layout.manifest()])
    directory = CheckpointDirectory(tmp_path / "out", "x")
    directory.create()
    directory.allocate(layout)
    calls: list[int] = []
    plain = os.pwritev

    def short(handle: int, buffers: list[memoryview], offset: int) -> int:
        """Counts, and writes less than asked, as a system call may."""
        calls.append(len(buffers))
        return plain(handle, [buffers[0][:40]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    memory = {"one": values[:2].reshape(-1), "two": values[2:].reshape(-1)}
    write_boxes(plan, 0, memory, layout, directory.partial, 1 << 20, ignore)
    assert calls == [2, 2, 1, 1]
    with safe_open(directory.partial / "model.safetensors", "pt") as handle:
        assert torch.equal(handle.get_tensor("w"), values)


def test_strided_and_converted_boxes_are_staged(tmp_path: Path) -> None:
    spec = TensorSpec("w", (5, 6), "bfloat16")
    memory = torch.randn(6, 5)
    source = Manifest(0, "", (Storage("t", "float32", 30, 30),), (Placement(spec.box, View("t", 0, (5, 6), (1, 5))),))
    layout = layout_checkpoint([spec], 1000)
    options = PlanOptions(conversions=frozenset({("float32", "bfloat16")}))
    plan = make_plan([spec], [source], [layout.manifest()], options)
    directory = CheckpointDirectory(tmp_path / "out", "x")
    directory.create()
    directory.allocate(layout)
    digests = write_boxes(plan, 0, {"t": memory.reshape(-1)}, layout, directory.partial, 1 << 20, ignore)
    verify_tensors([spec], digests, layout, directory.partial, 16, ignore)
    with safe_open(directory.partial / "model.safetensors", "pt") as handle:
        assert torch.equal(handle.get_tensor("w"), memory.t().to(torch.bfloat16))


@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_a_number_too_large_for_the_dtype_is_refused(tmp_path: Path, source: str) -> None:
    """As infinity it would be another weight; one that is infinite, or not a number, stays so."""
    spec = TensorSpec("w", (5, 6), "float16")
    memory = torch.ones(30, dtype=getattr(torch, source))
    memory[:4] = torch.tensor([float("inf"), float("nan"), -float("inf"), 65000.0])
    manifest = Manifest(0, "", (Storage("t", source, 30, 30),), (Placement(spec.box, View("t", 0, (5, 6), (6, 1))),))
    layout = layout_checkpoint([spec], 1000)
    plan = make_plan([spec], [manifest], [layout.manifest()], PlanOptions(conversions=frozenset({(source, "float16")})))
    directory = CheckpointDirectory(tmp_path / "out", "x")
    directory.create()
    directory.allocate(layout)
    write_boxes(plan, 0, {"t": memory}, layout, directory.partial, 16, ignore)
    memory[17] = -70144.0
    with pytest.raises(RefitError, match=r"w\[[02]:4, 0:6\] has a weight of -70144.0, .* float16; take bfloat16"):
        write_boxes(plan, 0, {"t": memory}, layout, directory.partial, 48, ignore)


FULL_DISK = """
import resource, sys
sys.path[:0] = {path!r}
from importlib import util
spec = util.spec_from_file_location("transport", {module!r})
tests = util.module_from_spec(spec); spec.loader.exec_module(tests)
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
try:
    tests.export(tests.Path({target!r}), 2)
except tests.ExportError as error:
    print(error)
"""


def test_a_write_that_the_system_refuses_fails_everywhere_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file sizes makes the write fail as a full disk would, in the middle of the file."""
    script = FULL_DISK.format(path=sys.path, module=__file__, target=str(tmp_path / "out"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert "File too large" in done.stdout
    assert "model.safetensors" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_on_one_rank_reaches_all(tmp_path: Path) -> None:
    def full(rank: int, partial: Path) -> None:
        if rank == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial / "model.safetensors"))

    with pytest.raises(
        ExportError,
        match=r"rank 2 on .*: No space left on device: .*model.safetensors; [\d.]+ MB are free; make room there",
    ):
        export(tmp_path / "out", 4, before_write=full)
    assert list(tmp_path.iterdir()) == []


def test_too_little_free_space_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ExportError, match=r"needs 1\.0 MB and .* has 0\.0 MB free; make room or choose another"):
        export(tmp_path / "out", 2)
    assert list(tmp_path.iterdir()) == []


def test_a_byte_that_changes_on_the_way_is_found(tmp_path: Path) -> None:
    def flip(partial: Path) -> None:
        path = partial / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-40] ^= 1
        path.write_bytes(content)

    with pytest.raises(ExportError, match=r"columns: model.safetensors reads back with digest [0-9a-f]{16}"):
        export(tmp_path / "out", 1, before_verify=flip)
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_file_is_found(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"rows: model.safetensors ends after byte \d+"):
        export(tmp_path / "out", 1, before_verify=lambda partial: os.truncate(partial / "model.safetensors", 700))


def test_ranks_that_see_other_file_systems_are_told(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="must be on a file system that all ranks share"):
        export(tmp_path / "out", 1, before_write=lambda _, partial: (partial / "model.safetensors").unlink())


@pytest.mark.parametrize("parent", ["file", "/proc/out"])
def test_a_directory_that_cannot_be_created_is_named(tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match=r"cannot write to .*; choose another output directory"):
        export(tmp_path / parent / "out", 2)


def test_a_checkpoint_is_replaced_only_on_request(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()  # empty: may be used
    export(target, 2)
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    with pytest.raises(ExportError, match="is not empty; choose another output directory, or pass --overwrite"):
        export(target, 2)
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before


@pytest.mark.parametrize("exchange_in_one_step", [True, False])
def test_a_replaced_checkpoint_keeps_what_others_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange_in_one_step: bool
) -> None:
    if not exchange_in_one_step:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    target = tmp_path / "out"
    export(target, 1, max_shard_bytes=300)
    foreign = ["adapter_model.safetensors", "consolidated.safetensors", "model_ema.safetensors", "tokenizer.json"]
    for name in foreign:
        (target / name).write_text(name)
    (tmp_path / "shared").mkdir()
    links = {"merges.txt": "../merges.txt", "chat_template.jinja": "tokenizer.json", "assets": "../shared", "gone": "x"}
    for name, to in links.items():
        (target / name).symlink_to(to)
    export(target, 2, overwrite=True)
    mine = ["config.json", "model.safetensors"]
    assert sorted(path.name for path in target.iterdir()) == sorted([*mine, *foreign, *links])
    assert [(target / name).read_text() for name in foreign] == foreign
    assert {name: str((target / name).readlink()) for name in links} == links
    for name in foreign:
        (target / name).unlink()
    assert_whole(target)
    (tmp_path / "shared").rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("names", "index"),
    [
        (["model-00001-of-000163.safetensors", "model-00163-of-000163.safetensors"], False),  # as DeepSeek-V3's
        (["part-a.safetensors", "part-b.safetensors"], True),
    ],
)
def test_weights_under_other_names_are_replaced_too(tmp_path: Path, names: list[str], index: bool) -> None:
    """Without an index, vLLM reads every safetensors file of a folder, also those of an older checkpoint."""
    target = tmp_path / "out"
    target.mkdir()
    (target / "config.json").write_text("{}")
    for name in names:
        (target / name).write_text("old weights")
    if index:
        (target / INDEX_NAME).write_text(json.dumps({"weight_map": {f"{name}.weight": name for name in names}}))
    (target / "tokenizer.json").write_text("tokens")
    export(target, 2, overwrite=True)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert_whole(target)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3, "b": "../x"}}'])
def test_an_index_that_says_nothing_is_replaced_as_any(tmp_path: Path, content: str) -> None:
    target = tmp_path / "out"
    export(target, 1)
    (target / INDEX_NAME).write_text(content)
    export(target, 1, overwrite=True)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_undo_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    target = tmp_path / "out"
    export(target, 1, max_shard_bytes=300)
    with monkeypatch.context() as read:
        read.setattr(shutil, "rmtree", refuse)
        export(target, 2, overwrite=True)
    shutil.rmtree(tmp_path / ".out.partial-test")
    assert_whole(target)
    assert not (target / INDEX_NAME).exists()
    assert "out is in place; the one before could not be removed: [Errno 39]" in caplog.text


def test_a_failed_replacement_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "out"
    export(target, 1, max_shard_bytes=300)

    def fail(rank: int, partial: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(partial))

    with pytest.raises(ExportError, match=r"rank 0 .* rank 1 .*Input/output error"):
        export(target, 2, overwrite=True, before_write=fail)
    assert_whole(target)
    assert (target / INDEX_NAME).is_file()


def test_only_a_checkpoint_is_ever_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(ExportError, match="not a checkpoint that --overwrite may replace"):
        export(tmp_path / "home", 1, overwrite=True)
    (tmp_path / "home" / "config.json").write_text("{}")
    (tmp_path / "home" / "data").mkdir()
    with pytest.raises(ExportError, match="data is not a file of a checkpoint"):
        export(tmp_path / "home", 1, overwrite=True)
    with pytest.raises(ExportError, match="exists and is not a directory"):
        export(tmp_path / "home" / "thesis.txt", 1, overwrite=True)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"


def test_every_byte_is_verified_by_exactly_one_rank() -> None:
    specs = [TensorSpec(f"t{size}", (size,), "float32") for size in range(1, 40)]
    shares = [share_of(specs, rank, 4) for rank in range(4)]
    assert sorted(spec for share in shares for spec in share) == sorted(specs)
    loads = [sum(spec.nbytes for spec in share) for share in shares]
    assert max(loads) - min(loads) <= 4 * 4


def test_a_process_alone_needs_no_group() -> None:
    exchange = default_exchange()
    assert type(exchange) is Exchange
    assert together(exchange, "work", lambda: 7) == [7]
    with pytest.raises(ExportError, match=r"work failed on rank 0 on .*: .*by zero") as raised:
        together(exchange, "work", lambda: 1 // 0)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(("name", "value", "least"), [("max_shard_bytes", 0, 1), ("staging_bytes", 7, 8)])
def test_a_size_that_holds_nothing_is_refused_by_its_name(name: str, value: int, least: int) -> None:
    with pytest.raises(ValueError, match=f"^{name} is {value}; it must be at least {least}$"):
        ExportOptions(**{name: value})  # type: ignore[arg-type]
