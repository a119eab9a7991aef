"""What `cuda_ipc` begins copies with, on memory that a test can compare byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_patches.refit.ports import Bytes
from megatron_patches.refit.transports.cuda_runtime import CudaRuntime
from megatron_patches.refit.transports.direct_copies import Numbers, Rows
from tests.gpu.devices import needs_gpus

PLACES = [
    pytest.param("cuda:0", marks=needs_gpus(1)),
    pytest.param("cuda:1", marks=needs_gpus(2, shared=False)),
]
"""Where copies go to, from the first GPU."""


@needs_gpus(1)
@pytest.mark.parametrize("count", [1, 3, 5, 64, 1000])
def test_runs_of_any_number_and_length_are_copied(count: int) -> None:
    """What is not copied is left alone; many are begun in batches, few one by one."""
    rng = np.random.default_rng(count)
    lengths = rng.integers(1, 1 << 14, count)
    gaps = rng.integers(0, 64, (2, count))
    begins = [np.cumsum(lengths + gap) - lengths for gap in gaps]
    source, target, expected = (
        torch.randint(0, 256, (int((lengths + gaps.max(axis=0)).sum()),), dtype=torch.uint8) for _ in range(3)
    )
    expected.copy_(target)
    for begin, there, length in zip(*begins, lengths, strict=True):
        expected[there : there + length] = source[begin : begin + length]
    on_gpu, into = source.cuda(), target.cuda()
    torch.cuda.synchronize()
    copier = CudaRuntime("cuda:0").copier()
    order = rng.permutation(count)
    copier.runs(on_gpu.data_ptr() + begins[0][order], into.data_ptr() + begins[1][order], lengths[order])
    copier.ended().result()
    assert torch.equal(into.cpu(), expected)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5, 64, 1000])
def test_rows_of_any_number_width_and_step_are_copied(count: int, one_by_one: bool, where: str) -> None:
    """What lies between the rows is left alone."""
    rng = np.random.default_rng(count)
    rows = pitched(rng, count)
    spans = [rows.count * step for step in (rows.source_step, rows.target_step)]
    begins = [np.cumsum(gap + span) - span for gap, span in zip(rng.integers(0, 64, (2, count)), spans, strict=True)]
    source, target = (
        rng.integers(0, 256, int(begin[-1] + span[-1]), dtype=np.uint8)
        for begin, span in zip(begins, spans, strict=True)
    )
    expected = target.copy()
    for shape, begin, there in zip(rows.shapes(), *(each.tolist() for each in begins), strict=True):
        many, nbytes, source_step, target_step = shape
        for row in range(many):
            first, into = begin + row * source_step, there + row * target_step
            expected[into : into + nbytes] = source[first : first + nbytes]
    theirs, ours = torch.from_numpy(source).to("cuda:0"), torch.from_numpy(target).to(where)
    torch.empty(1, dtype=torch.uint8, device=where).copy_(theirs[:1])  # lets the GPUs reach each other
    for device in ("cuda:0", where):
        torch.cuda.synchronize(device)
    copier = CudaRuntime(where).copier()
    copier._library.has_batches &= not one_by_one
    order = rng.permutation(count)
    shuffled = Rows.of([rows.shapes()[index] for index in order.tolist()])
    copier.rows(theirs.data_ptr() + begins[0][order], ours.data_ptr() + begins[1][order], shuffled)
    copier.ended().result()
    wrong = differing(ours.cpu().numpy(), expected, begins[1], rows)
    assert not wrong, f"{len(wrong)} of {count} copies: {wrong[:5]}"


def pitched(rng: np.random.Generator, count: int) -> Rows:
    """Copies of 1 to 300 rows of 1 byte to 4 KiB, few of them wide; about one end in three lies without gaps."""
    nbytes = np.exp2(rng.uniform(0, 12, count)).astype(np.int64)
    gaps = np.exp2(rng.uniform(-4, 8, (2, count))).astype(np.int64)
    return Rows(np.exp2(rng.uniform(0, 8.2, count)).astype(np.int64), nbytes, *(nbytes + gaps))


def differing(found: Bytes, expected: Bytes, begins: Numbers, rows: Rows) -> list[str]:
    """Of each copy whose bytes, or those up to the next copy, are not as they should be: which, and the first byte."""
    places = np.flatnonzero(found != expected)
    numbers, first = np.unique(np.searchsorted(begins, places, side="right") - 1, return_index=True)
    said = []
    for number, place in zip(numbers.tolist(), places[first].tolist(), strict=True):
        if number < 0:
            said.append(f"before the first copy, byte {place}")
            continue
        count, nbytes, source_step, target_step = rows.shapes()[number]
        row, byte = divmod(place - int(begins[number]), target_step)
        said.append(
            f"copy {number} of {count} rows of {nbytes} bytes, steps {source_step} and {target_step}: row {row}, "
            f"byte {byte}{'' if byte < nbytes and row < count else ' (not to be written)'}: "
            f"{found[place]} instead of {expected[place]}"
        )
    return said
