"""What a backup puts back is what served when it was taken, to the bit, whatever tensors share; memory of versions."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.manifest import Manifest, Storage

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from megatron_patches.refit.vllm import version_memory as module
from megatron_patches.refit.vllm.version_memory import Backup, VersionMemory
from tests.unit.refit.test_swap import bits, raw

CPU = torch.device("cpu")


def weights() -> list[torch.Tensor]:
    flat = bits((1000,), 5)
    shared = bits((6, 9), 0)
    return [
        shared,
        shared,
        shared[2:4],
        bits((7, 11), 1, torch.float32).t(),
        flat[10:300],
        flat[200:700:3],
        flat[900:],
        bits((), 2, torch.int64),
        bits((0, 3), 3),
        bits((13,), 4, torch.bool),
        bits((1, 5), 6).expand(4, 5),
    ]


def everything(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@pytest.mark.parametrize("chunk", [16, 100, 1 << 20])
def test_all_bits_come_back(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", chunk)
    tensors = weights()
    backup = Backup(tensors, CPU)
    for value in (7, 9):
        before = [raw(tensor) for tensor in tensors]
        backup.start()
        backup.finish(30)
        for tensor in tensors:
            everything(tensor).fill_(value)
        assert [raw(tensor) for tensor in tensors] != before
        backup.restore()
        assert [raw(tensor) for tensor in tensors] == before
        tensors[0].view(torch.uint8).fill_(value)


def test_each_byte_is_kept_once() -> None:
    tensors = weights()
    flat = 2 * ((300 - 10) + (699 - 300) + (1000 - 900))
    assert Backup(tensors, CPU).nbytes == 6 * 9 * 2 + 7 * 11 * 4 + flat + 8 + 13 + 5 * 2


def test_without_a_complete_copy_nothing_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = bits((50,), 0)
    before = raw(tensor)
    backup = Backup([tensor], CPU)
    with pytest.raises(RefitError, match="no complete copy"):
        backup.restore()
    monkeypatch.setattr(backup, "_copy", lambda: 1 / 0)
    backup.start()
    with pytest.raises(RefitError, match="could not be copied"):
        backup.finish(30)
    with pytest.raises(RefitError, match="no complete copy"):
        backup.restore()
    monkeypatch.undo()
    backup.finish(30)  # takes it now
    tensor.zero_()
    backup.restore()
    assert raw(tensor) == before


def test_an_older_copy_is_not_taken_for_the_one_that_could_not_be_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = bits((50,), 0)
    backup = Backup([tensor], CPU)
    backup.start()
    backup.finish(30)
    tensor.zero_()
    monkeypatch.setattr(backup, "_await_device", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backup.start()
    monkeypatch.undo()
    with pytest.raises(RefitError, match="no complete copy"):
        backup.restore()


def test_a_gpu_without_room_for_a_version_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 192.00 MiB.")

    storages = (Storage("a", "bfloat16", 3 << 28, 3 << 28), Storage("b", "float32", 1 << 28, 1 << 28))
    memory = VersionMemory(Manifest(0, "here", storages, ()), torch.device("cuda:1"))
    monkeypatch.setattr(torch, "empty", full)
    text = r"cuda:1 has no room for 2\.50 GiB of new .* lower --gpu-memory-utilization, or push .* memory mode in_place"
    with pytest.raises(RefitError, match=text):
        memory.make(1.0)
