"""New content and old change places in memory that others use, bit by bit, however the tensors lie; and back again."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.vllm.swap import Pair, Swap, Users, is_dense, overlapping, same_memory
from tests.support.launch import run_distributed

ROOM = 1024
CPU = torch.device("cpu")


def bits(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Any bits, those of NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    width = dtype.itemsize
    flat = torch.randint(0, 256, (torch.Size(shape).numel() * width,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        flat &= 1
    return flat.view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def alike() -> list[Pair]:
    """Weights of several types and sizes, most of them larger than the buffer, some with no element."""
    kinds = [torch.bfloat16, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
    shapes = [(37, 29), (3,), (1, 2, 611), (), (1031,), (0, 4)]
    return [
        (bits(shape, 2 * index, dtype), bits(shape, 2 * index + 1, dtype))
        for index, (shape, dtype) in enumerate(zip(shapes, kinds, strict=True))
    ]


def otherwise_laid() -> list[Pair]:
    """Elements in another order; strides that differ where they do not matter; equal strides out of order."""
    return [
        (bits((29, 37), 0).t(), bits((37, 29), 1)),
        (bits((1, 700), 2).t(), bits((700, 1), 3)),
        (bits((5, 6, 70), 4).permute(2, 0, 1), bits((5, 6, 70), 5).permute(2, 0, 1)),
        (bits((1, 1, 2000), 6), bits((2000, 1, 1), 7).permute(2, 1, 0)),
    ]


CASES: dict[str, Callable[[], list[Pair]]] = {"alike": alike, "otherwise laid": otherwise_laid}
COPIED = {"alike": 0, "otherwise laid": 1}  # the first ones


@pytest.mark.parametrize("case", CASES)
def test_contents_change_places_and_back(case: str) -> None:
    pairs, copied = CASES[case](), COPIED[case]
    old, new = [raw(one) for one, _ in pairs], [raw(other) for _, other in pairs]
    swap = Swap(pairs, room_bytes=ROOM)
    assert swap.copied_bytes == sum(one.nbytes for one, _ in pairs[:copied])
    swap.run()
    assert [raw(one) for one, _ in pairs] == new
    assert [raw(other) for _, other in pairs] == new[:copied] + old[copied:]
    swap.undo()
    assert [raw(one) for one, _ in pairs] == old


@pytest.mark.parametrize("case", CASES)
def test_a_failure_at_any_moment_is_undone(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, steps = torch.Tensor.copy_, 0

    def counted(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == fails_at:
            target[::2] = source[::2]
            raise MemoryError("in between")
        return real(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    fails_at = 0
    Swap(CASES[case](), room_bytes=ROOM).run()
    total = steps
    assert total > 10
    for moment in range(1, total + 1):
        fails_at = moment
        pairs, steps = CASES[case](), 0
        old = [raw(one) for one, _ in pairs]
        swap = Swap(pairs, room_bytes=ROOM)
        with pytest.raises(MemoryError):
            swap.run()
        fails_at = 0
        swap.undo()
        assert [raw(one) for one, _ in pairs] == old


def test_elements_of_another_type_are_converted() -> None:
    old, new = torch.randn(700, dtype=torch.bfloat16), torch.randn(700, dtype=torch.float16)
    before = old.clone()
    swap = Swap([(old, new)], room_bytes=ROOM)
    swap.run()
    assert torch.equal(old, new.bfloat16())
    swap.undo()
    assert torch.equal(old, before)


def shifted(shape: tuple[int, ...], seed: int, by: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Memory that begins ``by`` bytes past a multiple of 16, with bytes around it that belong to nobody."""
    flat = torch.full((torch.Size(shape).numel() * dtype.itemsize + 64,), 0xA5, dtype=torch.uint8)
    begin = -flat.data_ptr() % 16 + by
    tensor = flat[begin : begin + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
    tensor.copy_(bits(shape, seed, dtype))
    return tensor


def of_any_alignment() -> list[Pair]:
    """Lengths around those of blocks and programs of the kernel; aligned on neither, one and both sides."""
    sizes = [1, 15, 16, 17, 1023, 8 * 1024 + 8, 64 * 1024, 2 * 64 * 1024 + 24]
    offsets = [(0, 0), (3, 3), (0, 5), (8, 0)]
    return [
        (shifted((size,), 2 * number, one), shifted((size,), 2 * number + 1, other))
        for number, (size, (one, other)) in enumerate((size, offset) for size in sizes for offset in offsets)
    ]


def around(tensor: torch.Tensor) -> bytes:
    """All bytes of a tensor's storage that are not its own."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().copy()
    begin = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    return bytes(whole[:begin]) + bytes(whole[begin + tensor.nbytes :])


def exchange_by_kernel(rank: int, world_size: int) -> int:
    """Under the interpreter, which is chosen when the kernel's module is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from megatron_patches.refit.vllm import exchange_kernel

    pairs = [*of_any_alignment(), *alike(), *otherwise_laid()[1:]]
    old, new = [raw(one) for one, _ in pairs], [raw(other) for _, other in pairs]
    rest = [around(tensor) for pair in pairs for tensor in pair]
    swap = Swap(pairs, room_bytes=ROOM, kernels=True)
    assert swap.copied_bytes == 0
    assert len(swap._kernels) == 1
    swap.run()
    assert [raw(one) for one, _ in pairs] == new
    assert [raw(other) for _, other in pairs] == old
    swap.undo()
    assert [raw(one) for one, _ in pairs] == old
    assert [around(tensor) for pair in pairs for tensor in pair] == rest

    # The second of its launches fails: the first is undone alone.
    def refused(*, swaps: bool = True) -> None:
        raise MemoryError("no room for a launch")

    whole = exchange_kernel.MemorySwap(
        [(one.data_ptr(), other.data_ptr(), one.nbytes) for one, other in pairs[:32]], CPU
    )
    assert len(whole._launches) == 2
    for keeps_old in (True, False):
        start, whole._launches[1].start = whole._launches[1].start, refused  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            whole.run(keeps_old=keeps_old)
        whole._launches[1].start = start  # type: ignore[method-assign]
        assert [raw(one) for one, _ in pairs[:32]] != old[:32]
        whole.undo()
        assert [raw(one) for one, _ in pairs] == old

    pairs = [*of_any_alignment(), *alike(), *otherwise_laid()[1:]]  # undoing has lost some of the new content
    rest = [around(tensor) for pair in pairs for tensor in pair]
    swap = Swap(pairs, room_bytes=ROOM, kernels=True)
    swap.run(keeps_old=False)
    assert [raw(one) for one, _ in pairs] == new
    assert [raw(other) for _, other in pairs] != old  # some of the old content is gone
    assert [around(tensor) for pair in pairs for tensor in pair] == rest
    with pytest.raises(TransferError, match="the old weights were overwritten"):
        swap.undo()
    assert [raw(one) for one, _ in pairs] == new
    return len(pairs)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_one_kernel_exchanges_all_that_lies_alike() -> None:
    assert run_distributed(exchange_by_kernel, 1, None, args=(), fresh=True) == [41]


def test_what_shares_memory_is_copied_and_undone() -> None:
    """A tied weight under two names, new weights cut out of one, repeated rows, and one that overlaps the last."""
    tied, fused, row = bits((8, 6), 0), bits((10, 6), 1), bits((1, 6), 2)
    last = bits((40,), 3)
    pairs = [
        (tied, bits((8, 6), 10)),
        (tied, bits((8, 6), 11)),
        (bits((6, 6), 4), fused[:6]),
        (bits((6, 6), 5), fused[4:]),
        (bits((5, 6), 6), row.expand(5, 6)),
        (last[:24], bits((24,), 12)),
        (last[16:], bits((24,), 13)),
        (apart := bits((7, 7), 7), bits((7, 7), 14)),
    ]
    expected = [raw(new) for _, new in pairs]
    old = [raw(one) for one, _ in pairs]
    swap = Swap(pairs, room_bytes=ROOM)
    assert swap.copied_bytes == sum(one.numel() * one.element_size() for one, _ in pairs[:-1])
    swap.run()
    assert raw(tied) == expected[1]
    assert [raw(one) for one, _ in pairs[2:5]] == expected[2:5]
    assert raw(last) == expected[5][:32] + expected[6]
    assert raw(apart) == expected[7]
    swap.undo()
    assert [raw(one) for one, _ in pairs] == old


def test_who_referred_to_new_content_before_does_not_count() -> None:
    """A transport may still hold what it has received into."""
    serving, staged = bits((8, 6), 0), bits((100,), 1)
    held = staged.view(torch.uint8).numpy()
    users = Users([staged])
    pairs = [(serving, staged.as_strided((8, 6), (6, 1)))]
    assert Swap(pairs, users, room_bytes=ROOM).copied_bytes == 0
    kept = staged[:3]
    assert Swap(pairs, users, room_bytes=ROOM).copied_bytes == 96
    assert (len(kept), len(held)) == (3, 200)


def test_who_has_let_go_of_new_content_hides_nobody() -> None:
    """A transport holds what it received into while the weights are put together, and no more when it has ended."""
    serving, staged, also = bits((8, 6), 0), bits((48,), 1), bits((48,), 2)
    held = [staged.view(torch.uint8).numpy(), also.view(torch.uint8).numpy()]
    users = Users([staged, also])
    held.clear()
    users.settle()
    pairs = [(serving, staged.as_strided((8, 6), (6, 1))), (bits((48,), 3), also.view(48))]
    assert Swap(pairs, users, room_bytes=ROOM).copied_bytes == 0
    kept = staged[:3], also[:3]
    assert Swap(pairs, users, room_bytes=ROOM).copied_bytes == 2 * 96
    assert len(kept) == 2


def test_what_something_else_refers_to_keeps_its_content() -> None:
    """Processing may have kept a new tensor, or a part of it, for its own use."""
    pairs = alike()
    kept, part = pairs[0][1].view(29, 37), pairs[2][1][0, 1, 3:9]
    before = raw(kept), raw(part)
    swap = Swap(pairs, room_bytes=ROOM)
    assert swap.copied_bytes == sum(pairs[index][1].numel() * pairs[index][1].element_size() for index in (0, 2))
    swap.run()
    assert (raw(kept), raw(part)) == before
    assert [raw(one) for one, _ in pairs] == [raw(new) for _, new in [alike()[i] for i in range(len(pairs))]]


def test_new_content_that_is_in_its_place_stays() -> None:
    weights = bits((4, 5), 0)
    before = raw(weights)
    swap = Swap([(weights, weights.view(4, 5))], room_bytes=ROOM)
    swap.run()
    assert raw(weights) == before
    swap.undo()
    assert raw(weights) == before


class Allocations(TorchDispatchMode):
    """Bytes of memory that operations made."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in given:
                self.nbytes += tensor.untyped_storage().nbytes()
        return result


def test_no_more_memory_is_taken_than_the_buffer() -> None:
    pairs = alike() + otherwise_laid()[1:]
    with Allocations() as made:
        swap = Swap(pairs, room_bytes=ROOM)
        swap.run()
        swap.undo()
    assert made.nbytes == ROOM < sum(one.numel() * one.element_size() for one, _ in pairs) / 5


def test_tensors_are_told_apart_by_the_bytes_they_span() -> None:
    flat = torch.zeros(100)
    tensors = [flat[0:10], flat[5:15], flat[15:20], flat[20:60:4], flat[57:58], torch.zeros(9), flat[30:30]]
    assert overlapping(tensors) == {0, 1}
    tensors.append(flat[0:100])
    assert overlapping(tensors) == {0, 1, 2, 3, 4, 7}
    assert is_dense(flat.view(4, 25).t())
    assert not is_dense(flat[::2])
    assert not is_dense(flat[:1].expand(3))
    assert same_memory(flat[3:5], flat[3:5])
    assert not same_memory(flat.view(10, 10), flat.view(10, 10).t())
