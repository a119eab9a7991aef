"""The Triton kernels that find, compact and put back changed elements, in the form of the module ``delta``.

A load is an array of elements here, packed from all of its boxes, so a step takes one launch, however many boxes there
are. Compacting is two steps: programs count the changes in their blocks, and from the running sum of the counts each
knows where its own changes go. Imported only if Triton is installed. It runs on the current stream, and on a CPU under
``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_patches.refit.memory.delta import is_indexed, places_at

_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_WARPS = 4
_GROUP = tl.constexpr(8)  # elements of one byte of a bitmap
_GROUPS = 256  # of a block
_BLOCK = _GROUPS * _GROUP.value


# No annotations: Triton would interpret them.
@triton.jit
def _block(new, old, count, groups: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's elements, ``[groups, 8]``: places in the block, which are the load's, values, which differ."""
    begin = tl.program_id(0).to(tl.int64) * (groups * _GROUP)
    at = tl.arange(0, groups)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    held = at < tl.minimum(count - begin, groups * _GROUP).to(tl.int32)
    value = tl.load(new + begin + at, mask=held, other=0)
    differs = value != tl.load(old + begin + at, mask=held, other=0)
    return begin, at, held, value, differs.to(tl.int32)


@triton.jit
def _bits(bitmap, count, groups: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's part of a bitmap, ``[groups, 8]``: places in the block, which are the load's, which are marked."""
    begin = tl.program_id(0).to(tl.int64) * (groups * _GROUP)
    at = tl.arange(0, groups)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    left = tl.minimum(count - begin, groups * _GROUP).to(tl.int32)
    group = tl.arange(0, groups)
    marks = tl.load(bitmap + begin // _GROUP + group, mask=group * _GROUP < left, other=0).to(tl.int32)
    return begin, at, at < left, (marks[:, None] >> (7 - tl.arange(0, _GROUP)[None, :])) & 1


@triton.jit
def _ranks(marked):  # type: ignore[no-untyped-def]
    """For each element of a block, how many before it are marked."""
    of_group = tl.sum(marked, axis=1)
    before = tl.cumsum(of_group, axis=0) - of_group
    return before[:, None] + tl.cumsum(marked, axis=1) - marked


@triton.jit
def _count_changes(new, old, counts, count, groups: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    _, _, _, _, differs = _block(new, old, count, groups)
    tl.store(counts + tl.program_id(0), tl.sum(tl.sum(differs, axis=1), axis=0).to(tl.int64))


@triton.jit
def _compact(  # type: ignore[no-untyped-def]
    new, old, out, ends, count, element: tl.constexpr, width: tl.constexpr, groups: tl.constexpr
) -> None:
    begin, at, held, value, differs = _block(new, old, count, groups)
    program = tl.program_id(0)
    changed = tl.load(ends + tl.num_programs(0) - 1)
    first = tl.load(ends + program) - tl.sum(tl.sum(differs, axis=1), axis=0)
    into = out.to(tl.pointer_type(element))
    # As in `delta`: where places begin, whether they are indices, and whether all that is less than the whole.
    places = (changed * width + 3) // 4 * 4
    bitmap_bytes = (count + _GROUP - 1) // _GROUP
    # At most 2^32 elements, written with a number that fits into the 32 bits that "count" may have.
    indexed = ((count - 1) // 4 < 1 << 30) & (4 * changed <= bitmap_bytes)
    # Divided, because of a load of 2 GiB the size does not fit into the 32 bits of "count".
    if (places + tl.where(indexed, 4 * changed, bitmap_bytes)) // width >= count:
        tl.store(into + begin + at, value, mask=held)
    else:
        mask = differs != 0
        rank = _ranks(differs)
        tl.store(into + first + rank, value, mask=mask)
        if indexed:
            place = (begin + at).to(tl.int32)  # the bits of an unsigned number
            tl.store((out + places).to(tl.pointer_type(tl.int32)) + first + rank, place, mask=mask)
        else:
            marks = tl.sum(differs << (7 - tl.arange(0, _GROUP)[None, :]), axis=1)
            group = tl.arange(0, groups)
            kept = group * _GROUP < tl.minimum(count - begin, groups * _GROUP).to(tl.int32)
            tl.store(out + places + begin // _GROUP + group, marks.to(tl.uint8), mask=kept)
        if program == 0:
            gap = tl.arange(0, 4)
            tl.store(out + changed * width + gap, tl.zeros([4], tl.uint8), mask=changed * width + gap < places)


@triton.jit
def _put_indexed(  # type: ignore[no-untyped-def]
    values, places, into, found, changed, count, block: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = at < changed
    place = tl.load(places + at, mask=mask, other=0).to(tl.int64)
    before = tl.load(places + at - 1, mask=mask & (at > 0), other=0).to(tl.int64)
    within = mask & (place < count)
    tl.store(into + place, tl.load(values + at, mask=mask, other=0), mask=within)
    wrong = mask & ((place >= count) | ((at > 0) & (place <= before)))
    tl.atomic_add(found, tl.sum(wrong.to(tl.int64), axis=0))


@triton.jit
def _count_marks(bitmap, counts, found, count, groups: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    _, _, held, marked = _bits(bitmap, count, groups)
    within = tl.where(held, marked, 0)
    tl.store(counts + tl.program_id(0), tl.sum(tl.sum(within, axis=1), axis=0).to(tl.int64))
    tl.atomic_add(found, tl.sum(tl.sum(marked - within, axis=1), axis=0).to(tl.int64))


@triton.jit
def _put_mapped(  # type: ignore[no-untyped-def]
    values, bitmap, into, ends, changed, count, groups: tl.constexpr
) -> None:
    begin, at, held, marked = _bits(bitmap, count, groups)
    marked = tl.where(held, marked, 0)
    rank = tl.load(ends + tl.program_id(0)) - tl.sum(tl.sum(marked, axis=1), axis=0) + _ranks(marked)
    mask = (marked != 0) & (rank < changed)
    tl.store(into + begin + at, tl.load(values + rank, mask=mask, other=0), mask=mask)


def encode_delta(elements: torch.Tensor, base: torch.Tensor, width: int, payload: torch.Tensor) -> torch.Tensor:
    """What :func:`megatron_patches.refit.memory.delta.encode_delta` does, on a device, bit by bit.

    Args:
        elements: bytes of all elements of the new version.
        base: bytes of those of the base.
        width: bytes per element.
        payload: as large as ``elements``, and apart from it. Receives the changes, or all elements if the changes would
            not take less memory.

    Returns:
        int64 of one element: the number of changed elements.
    """
    element, count = _TYPES[width], elements.numel() // width
    blocks = triton.cdiv(count, _BLOCK)
    new, old = (triton.reinterpret(memory, element) for memory in (elements, base))
    counts = torch.empty(blocks, dtype=torch.int64, device=elements.device)
    _count_changes[(blocks,)](new, old, counts, count, groups=_GROUPS, num_warps=_WARPS)
    ends = torch.cumsum(counts, 0)
    _compact[(blocks,)](new, old, payload, ends, count, element=element, width=width, groups=_GROUPS, num_warps=_WARPS)
    return ends[-1:]


def decode_delta(payload: torch.Tensor, changed: int, base: torch.Tensor, width: int) -> torch.Tensor:
    """As :func:`megatron_patches.refit.memory.delta.decode_delta`, on a device. Damaged payloads write nothing outside.

    Args:
        payload: as :func:`encode_delta` made it, of the size that ``changed`` changes take.
        changed: number of changed elements, at least 1.
        base: bytes of all elements of the base, which then hold the new version.
        width: bytes per element.

    Returns:
        int64 of two elements: how many places are not valid, and how many there are.
    """
    element, count = _TYPES[width], base.numel() // width
    values, into = (triton.reinterpret(memory, element) for memory in (payload, base))
    where = payload[places_at(changed, width) :]
    if is_indexed(changed, count):
        found = torch.zeros(2, dtype=torch.int64, device=base.device)
        found[1:].fill_(changed)
        grid = (triton.cdiv(changed, _BLOCK),)
        places = triton.reinterpret(where, tl.uint32)
        _put_indexed[grid](values, places, into, found, changed, count, block=_BLOCK, num_warps=_WARPS)
        return found
    blocks = triton.cdiv(count, _BLOCK)
    counts = torch.empty(blocks, dtype=torch.int64, device=base.device)
    invalid = torch.zeros(1, dtype=torch.int64, device=base.device)
    _count_marks[(blocks,)](where, counts, invalid, count, groups=_GROUPS, num_warps=_WARPS)
    ends = torch.cumsum(counts, 0)
    _put_mapped[(blocks,)](values, where, into, ends, changed, count, groups=_GROUPS, num_warps=_WARPS)
    return torch.cat((invalid, ends[-1:]))
