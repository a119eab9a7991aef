"""Rows of chunks: where what lies across them is found, and that others see it so; CUDA is played by the host."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.transports.cuda_mapped import Chunk, ChunkShelf, Lying, MappedRow
from tests.unit.refit.host_driver import PAGE, HostDriver, content_at
from tests.unit.refit.link_ends import asked_over_a_link


def direct(shelf: ChunkShelf) -> Callable[[Sequence[int], Callable[[int, int], None]], None]:
    """Fetches within the process."""

    def fetch(numbers: Sequence[int], use: Callable[[int, int], None]) -> None:
        for number in numbers:
            descriptor = shelf.export(number)
            use(number, descriptor)
            os.close(descriptor)

    return fetch


def sizes_of(lying: Lying) -> list[int]:
    return [chunk.nbytes for chunk in lying.chunks]


def test_what_lies_across_chunks_is_found_with_all_of_them() -> None:
    driver = HostDriver()
    one, other = driver.segment([2 * PAGE, PAGE, 3 * PAGE, PAGE]), driver.segment([PAGE])
    shelf = ChunkShelf(driver)
    found = shelf.locate(
        {
            "last": (one + 3 * PAGE + 9, one + 6 * PAGE),
            "first": (one + 5, one + 3 * PAGE - 1),
            "within first": (one + 7, one + 8),
            "elsewhere": (other, other + PAGE),
        }
    )
    assert {name: (sizes_of(lying), lying.start) for name, lying in found.items()} == {
        "first": ([2 * PAGE, PAGE, 3 * PAGE], 5),
        "within first": ([2 * PAGE, PAGE, 3 * PAGE], 7),
        "last": ([2 * PAGE, PAGE, 3 * PAGE], 3 * PAGE + 9),
        "elsewhere": ([PAGE], 0),
    }
    assert found["first"].chunks is found["last"].chunks
    numbers = {chunk.number for lying in found.values() for chunk in lying.chunks}
    assert len(numbers) == 4
    shelf.close()
    driver.drop(one)
    driver.drop(other)
    assert driver.clean


def test_chunks_that_nothing_lies_in_part_rows_and_are_not_held() -> None:
    driver = HostDriver()
    at = driver.segment([PAGE] * 5)
    shelf = ChunkShelf(driver)
    found = shelf.locate({"a": (at, at + 2 * PAGE), "b": (at + 3 * PAGE + 1, at + 3 * PAGE + 2)})
    assert (sizes_of(found["a"]), found["a"].start) == ([PAGE, PAGE], 0)
    assert (sizes_of(found["b"]), found["b"].start) == ([PAGE], 1)
    shelf.close()
    driver.drop(at)
    assert driver.clean


def test_the_same_memory_keeps_its_numbers_and_other_memory_gets_new_ones() -> None:
    driver = HostDriver()
    at = driver.segment([PAGE] * 3)
    shelf = ChunkShelf(driver)
    spans = {"a": (at + 1, at + 3 * PAGE)}
    first = shelf.locate(spans)
    assert shelf.locate(spans) == first
    # The same addresses with other memory behind the second chunk, of which the old one is still held.
    driver.unmap(at + PAGE, PAGE)
    handle = driver.create(PAGE)
    driver.map(at + PAGE, PAGE, handle)
    driver.release(handle)
    driver.allow(at + PAGE, PAGE, 0)
    second = shelf.locate(spans)
    old, new = [chunk.number for chunk in first["a"].chunks], [chunk.number for chunk in second["a"].chunks]
    assert (new[0], new[2]) == (old[0], old[2])
    assert new[1] not in old
    with pytest.raises(PartyFailedError, match=f"memory number {old[1]} is not, or no longer, on the shelf"):
        shelf.export(old[1])
    assert shelf.locate({}) == {}
    driver.drop(at)
    assert driver.clean


def test_what_others_cannot_open_is_left_out_and_not_held() -> None:
    """Memory that was made for nobody else, beside memory that was; nothing mapped at all."""
    driver = HostDriver()
    at, private = driver.segment([PAGE, PAGE]), driver.segment([PAGE, PAGE], shareable=False)
    handle = driver.create(PAGE, shareable=False)
    driver.unmap(at + PAGE, PAGE)
    driver.map(at + PAGE, PAGE, handle)
    driver.release(handle)
    shelf = ChunkShelf(driver)
    spans = {"open": (at, at + PAGE), "half": (at + 8, at + PAGE + 8), "none": (private, private + 2 * PAGE)}
    assert set(shelf.locate(spans)) == {"open"}
    assert shelf.locate({"half": spans["half"], "empty": (at, at)}) == {}
    driver.drop(at)
    driver.drop(private)
    assert driver.clean
    with pytest.raises(PartyFailedError, match="nothing is mapped"):
        shelf.locate(spans)


@pytest.mark.parametrize("seed", range(6))
def test_others_see_what_is_written_wherever_it_lies(seed: int) -> None:
    """Chunks of all sizes, with gaps between rows; more of them than one message takes descriptors."""
    rng = np.random.default_rng(seed)
    source, destination = HostDriver(), HostDriver()
    segments, spans = [], {}
    for number in range(int(rng.integers(1, 4))):
        sizes = [PAGE * int(size) for size in rng.integers(1, 5, int(rng.integers(1, 90)))]
        segments.append(source.segment(sizes))
        cuts = np.sort(rng.integers(0, sum(sizes) + 1, 8))
        for index, (low, high) in enumerate(itertools.pairwise(cuts)):
            if low < high:
                spans[f"{number}.{index}"] = (segments[-1] + int(low), segments[-1] + int(high))
    shelf = ChunkShelf(source)
    found = shelf.locate(spans)
    assert set(found) == set(spans)
    rows = {}
    with asked_over_a_link(shelf.export) as fetch:
        for lying in found.values():
            if lying.chunks not in rows:
                rows[lying.chunks] = MappedRow(destination, 3, lying.chunks, fetch)
    assert destination.allowed == [3] * len(rows)
    for _ in range(2):
        for name, (start, stop) in spans.items():
            theirs = content_at(start, stop - start)
            theirs[:] = rng.bytes(stop - start)
            assert content_at(rows[found[name].chunks].address + found[name].start, stop - start) == theirs
            theirs.release()
    shelf.close()
    for segment in segments:
        source.drop(segment)
    assert source.clean
    for row in rows.values():
        row.close()
    assert destination.clean


def test_memory_stays_until_the_last_has_unmapped_it() -> None:
    source, destination = HostDriver(), HostDriver()
    at = source.segment([PAGE])
    content_at(at, 3)[:] = b"abc"
    shelf = ChunkShelf(source)
    lying = shelf.locate({"a": (at, at + 3)})["a"]
    row = MappedRow(destination, 0, lying.chunks, direct(shelf))
    shelf.close()
    source.drop(at)
    assert source.clean
    assert bytes(content_at(row.address, 3)) == b"abc"
    row.close()
    assert destination.clean


@pytest.mark.parametrize("failing", ["import", "fetch", "size"])
def test_what_fails_halfway_is_undone(failing: str) -> None:
    source, destination = HostDriver(), HostDriver()
    at = source.segment([PAGE] * 3)
    shelf = ChunkShelf(source)
    chunks = list(shelf.locate({"a": (at, at + 3 * PAGE)})["a"].chunks)
    if failing == "size":
        chunks[2] = Chunk(chunks[2].number, 2 * PAGE)

    def fetch(numbers: Sequence[int], use: Callable[[int, int], None]) -> None:
        direct(shelf)(numbers[:2], use)
        if failing == "fetch":
            raise PartyFailedError("the source has gone")
        if failing == "import":
            destination.refused = "cuMemImportFromShareableHandle: operation not supported"
        direct(shelf)(numbers[2:], use)

    words = {"fetch": "the source has gone", "import": "operation not supported", "size": "cannot be mapped"}[failing]
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - what is open now, not a folder
    with pytest.raises(PartyFailedError, match=words):
        MappedRow(destination, 0, chunks, fetch)
    assert destination.clean
    # The one whose use has failed was opened by this test.
    assert len(os.listdir("/proc/self/fd")) == before + (failing != "fetch")  # noqa: PTH208 - as above
    shelf.close()
    source.drop(at)
