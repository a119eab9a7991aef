"""Pitched copies as the table that CUDA's ``cudaMemcpy3DBatchAsync`` takes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.transports.direct_copies import Numbers, Rows

type Operations = NDArray[np.void]

_POINTER = 1  # cudaMemcpyOperandTypePointer
_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream

# What this relies on, in the headers of CUDA 12.8 to 13.1, which agree on the layout:
# - Between pointers an element is one byte, so widths and row lengths are in bytes. No alignment is asked for.
# - A row length is the step from one row to the next. It is at least the width, as `pitch_of` sees to; 0 would mean the
#   width. A height of a layer of 0 means that of the copy: there is one layer.
# - No extent may be 0, so the depth is 1. No box of a plan is empty.
# - Copies of a batch run in any order, so none may read or write what another one writes. The targets of a plan are
#   disjoint, and lie in other memory than its sources.
# - The batch begins after what its stream was given before, and its stream is not the default one.
# - A location is a hint about managed memory, which is not used here. Flags of 0 are the default.
# cudaMemcpy2D's greatest pitch is not mentioned; a step that CUDA does not take is refused by it, as there.
_OPERAND = np.dtype(
    [
        ("type", np.intc),
        ("address", np.uintp),  # cudaMemcpy3DOperand has a union here, whose other member, an array, is as long
        ("row_length", np.uintp),
        ("layer_height", np.uintp),
        ("location", np.intc, 2),
    ],
    align=True,
)
_EXTENT = np.dtype([("width", np.uintp), ("height", np.uintp), ("depth", np.uintp)], align=True)
OPERATION = np.dtype(
    [
        ("source", _OPERAND),
        ("target", _OPERAND),
        ("extent", _EXTENT),
        ("source_order", np.intc),
        ("flags", np.uintc),
    ],
    align=True,
)
"""``cudaMemcpy3DBatchOp`` between pointers."""


def operations(sources: Numbers, targets: Numbers, rows: Rows) -> Operations:
    """The table of a batch.

    Filled anew for every call, column by column; numpy would take longer to copy a table of records.

    Args:
        sources: ``[copies]``, where the first row of each begins.
        targets: ``[copies]``, where it goes to.
        rows: what each consists of.

    Returns:
        ``[copies]``, of :data:`OPERATION`, contiguous.
    """
    table = np.zeros(len(sources), dtype=OPERATION)
    ends = (table["source"], sources, rows.source_step), (table["target"], targets, rows.target_step)
    for operand, addresses, steps in ends:
        operand["type"] = _POINTER
        operand["address"] = addresses
        operand["row_length"] = steps
    extent = table["extent"]
    extent["width"], extent["height"], extent["depth"] = rows.nbytes, rows.count, 1
    table["source_order"] = _IN_STREAM_ORDER
    return table
