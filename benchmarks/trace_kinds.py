"""GPU time of a traced step by kind of work, as the names of kernels and copies show it.

::

    torchrun --nproc-per-node 4 -m benchmarks.train_step --systems none_graph,etp_copy_engine_graph --traces traces
    python -m benchmarks.trace_kinds traces/trace_etp_copy_engine_graph_x1.json --passes 2

Unlike :mod:`benchmarks.trace_times` it does not ask which stream work ran on, so it can read replays of CUDA graphs,
whose kernels appear on other streams than they were captured on.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command_line import existing_file, positive

_GPU_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
SUMS, PEER_COPIES, OWN_COPIES = "sums of received gradients", "copies from and to peers", "copies within the GPU"
_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (SUMS, ("_accumulate_parts",)),
    (PEER_COPIES, ("ptop", "nccl")),
    # In a graph the driver makes copies within one GPU with a kernel of its own.
    (OWN_COPIES, ("dtod", "memcpy128")),
    ("GEMMs", ("nvjet", "gemm", "cutlass")),
    ("attention", ("fmha", "flash", "cudnn", "sdpa")),
    ("activations", ("silu",)),
    ("elementwise, vectorized", ("vectorized_elementwise_kernel<8",)),
)
"""Kinds, and parts of the names, in lower case, that tell them; the first that fits."""
_NO_COMPUTE = frozenset({SUMS, PEER_COPIES, OWN_COPIES})


def kind_of(name: str) -> str:
    """The kind of a kernel or copy of this name; "other" if it is none of those above."""
    low = name.lower()
    return next((kind for kind, parts in _KINDS if any(part in low for part in parts)), "other")


def times_by_kind(events: Iterable[Mapping[str, Any]], passes: int) -> tuple[dict[str, float], float]:
    """Times of one rank's GPU, averaged over forward and backward passes.

    Args:
        events: ``traceEvents`` of a Chrome trace; those that are no work of a GPU are ignored.
        passes: microbatches that the trace spans.

    Returns:
        milliseconds of work by kind, the longest first (work on several streams is added up), and the milliseconds in
        which no compute kernel ran, between the first and the last of them.

    Raises:
        ValueError: if the trace has no compute kernel, or ``passes`` is not positive.
    """
    totals: dict[str, float] = defaultdict(float)
    compute: list[tuple[float, float]] = []
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in _GPU_WORK:
            continue
        kind = kind_of(str(event["name"]))
        totals[kind] += float(event["dur"])
        if kind not in _NO_COMPUTE:
            compute.append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    if not compute or passes < 1:
        raise ValueError(
            f"a trace of {passes} passes with {len(compute)} compute kernels; nothing can be said about it"
        )
    compute.sort()
    gaps, end = 0.0, compute[0][1]
    for start, stop in compute:
        gaps += max(0.0, start - end)
        end = max(end, stop)
    scale = 1000.0 * passes
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    return {kind: total / scale for kind, total in ordered}, gaps / scale


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace, compressed if its name ends in ``.gz``."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=existing_file, nargs="+", help="as torch.profiler exports them")
    parser.add_argument("--passes", type=positive, required=True, help="microbatches that each trace spans")
    options = parser.parse_args(arguments)
    for path in options.traces:
        times, gaps = times_by_kind(read_events(path), options.passes)
        print(f"{path.name}: milliseconds a microbatch")
        for kind, milliseconds in {**times, "no compute kernel runs": gaps}.items():
            print(f"{milliseconds:9.2f}  {kind}")


if __name__ == "__main__":
    main()
