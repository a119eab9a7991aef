"""What each part of the copy engine's traffic adds to a graphed training step: parts are left out, side by side.

::

    torchrun --nproc-per-node 4 -m benchmarks.traffic_cost [--json traffic.json]

from the repository's root, on GPUs that reach each other's memory. Every variant is one CUDA graph of the same step;
those that leave something out compute wrong numbers and are timed only. Gathers cannot be left out alone: weights that
were never gathered are not random, and a GPU at its power limit multiplies such weights faster. Beside each time stands
the clock that rank 0's GPU ran at, as ``nvidia-smi`` reports it, and why it was no higher.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.command_line import positive, require_gpus, require_torchrun, writable_file
from benchmarks.train_measure import Stepper, initialize
from benchmarks.train_shapes import SHAPES
from benchmarks.train_systems import BuildOptions, build

VARIANTS: dict[str, tuple[str, frozenset[str]]] = {
    "no communication": ("none_graph", frozenset()),
    "everything": ("etp_copy_engine_graph", frozenset()),
    "without sums of gradients": ("etp_copy_engine_graph", frozenset({"sum"})),
    "without sums and sends of gradients": ("etp_copy_engine_graph", frozenset({"sum", "send"})),
}
"""The system of each variant, and which parts of its traffic are left out."""

_STEPS = 3
_CLOCK_STEPS = 6
_SAMPLE_MS = 100
_QUERY = "clocks.sm,power.draw.instant,clocks_event_reasons.active"
_SW_POWER_CAP = 0x4  # nvmlClocksEventReasonSwPowerCap


class Selection:
    """Which parts of the traffic the transports leave out while this is installed.

    Attributes:
        left_out: of "send" (of gradients to peers) and "sum".
    """

    def __init__(self) -> None:
        self.left_out: frozenset[str] = frozenset()
        self._reducing = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have all copy-engine transports ask this selection."""
        from etp.collectives.driver import CudaDriver

        copy_engine: Any = importlib.import_module("etp.collectives.copy_engine")
        transport = copy_engine.CopyEngineTransport
        reduce, add, copy = transport.reduce_scatter, copy_engine.accumulate_parts, CudaDriver.copy

        def reduce_scatter(made: Any, *arguments: Any) -> Any:
            self._reducing = True
            try:
                return reduce(made, *arguments)
            finally:
                self._reducing = False

        def accumulate(*arguments: Any, **options: Any) -> tuple[()]:
            if "sum" not in self.left_out:
                add(*arguments, **options)
            return ()  # no launches that would be repeated without asking

        def selected_copy(driver: Any, copies: Any, stream: int, origin: int = 0) -> None:
            if not self._reducing or "send" not in self.left_out:
                copy(driver, copies, stream, origin)

        changes: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = [
            (transport, "reduce_scatter", reduce, reduce_scatter),
            (copy_engine, "accumulate_parts", add, accumulate),
            (CudaDriver, "copy", copy, selected_copy),
        ]
        for owner, name, _, new in changes:
            setattr(owner, name, new)
        try:
            yield
        finally:
            for owner, name, old, _ in changes:
                setattr(owner, name, old)


def timed(stepper: Stepper, microbatches: int, steps: int) -> float:
    """Milliseconds of a step on the slowest rank, behind one that is not measured. Collective."""
    stepper.step(microbatches)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        stepper.step(microbatches)
    torch.cuda.synchronize()
    found = torch.tensor([(time.perf_counter() - begun) * 1e3 / steps], device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found.item())


def clocks(run: Callable[[], object]) -> tuple[float, float, float]:
    """Clock and power of rank 0's GPU while ``run`` runs. Collective, as ``run`` is.

    Returns:
        Mean clock in MHz, mean power in W, and the share of samples in which the power limit held the clock down; not a
        number on other ranks.
    """
    if dist.get_rank() != 0:
        run()
        return float("nan"), float("nan"), float("nan")
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    command = [
        "nvidia-smi",
        "-i",
        uuid,
        f"--query-gpu={_QUERY}",
        "--format=csv,noheader,nounits",
        f"--loop-ms={_SAMPLE_MS}",
    ]
    # Its arguments are this file's and the GPU's own name.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            run()
        finally:
            process.terminate()
        lines = process.communicate(timeout=30)[0].splitlines()
    samples = [parse_sample(line) for line in lines[2:] if line.count(",") == 2]
    if not samples:
        raise RuntimeError(f"nvidia-smi printed no samples for {uuid}: {lines}")
    clock, power, capped = zip(*samples, strict=True)
    return statistics.mean(clock), statistics.mean(power), statistics.mean(capped)


def parse_sample(line: str) -> tuple[float, float, bool]:
    """A line of nvidia-smi: clock in MHz, power in W, and whether the power limit holds the clock down."""
    clock, power, reasons = (part.strip() for part in line.split(","))
    return float(clock), float(power), bool(int(reasons, 16) & _SW_POWER_CAP)


def measure(shape: str, microbatches: int, rounds: int) -> dict[str, dict[str, Any]]:
    """All variants, in random order. Collective.

    Returns:
        for each variant ``milliseconds`` (a list, one a round) and ``clock_mhz``, ``power_w`` and ``power_capped``.
    """
    selection, steppers = Selection(), {}
    with selection.installed():
        for name, (system, left_out) in VARIANTS.items():
            selection.left_out = left_out
            built = build(system, SHAPES[shape], BuildOptions())
            built.activate()
            steppers[name] = Stepper(built)
            steppers[name].prepare(microbatches)
    found: dict[str, dict[str, Any]] = {name: {"milliseconds": []} for name in VARIANTS}
    order = random.Random(0)  # noqa: S311 - the same order on all ranks is what is wanted
    for _ in range(rounds):
        for name in order.sample(list(VARIANTS), len(VARIANTS)):
            found[name]["milliseconds"].append(timed(steppers[name], microbatches, _STEPS))
    for name, stepper in steppers.items():
        values = clocks(lambda s=stepper: timed(s, microbatches, _CLOCK_STEPS))  # type: ignore[misc]
        found[name].update(zip(("clock_mhz", "power_w", "power_capped"), values, strict=True))
    # NCCL would wait at its end for graphs that have captured it.
    steppers.clear()
    gc.collect()
    torch.cuda.synchronize()
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: the median, its ratio to no communication, and the clock."""
    medians = {name: statistics.median(item["milliseconds"]) for name, item in found.items()}
    base = medians["no communication"]
    lines = ["| variant | ms | ratio | clock, MHz | power, W | held by the power limit |", "|---|---|---|---|---|---|"]
    for name, item in found.items():
        clock = f"{item['clock_mhz']:.0f} | {item['power_w']:.0f} | {item['power_capped']:.0%}"
        lines.append(f"| {name} | {medians[name]:.1f} | {medians[name] / base:.3f} | {clock} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama8b-8l")
    parser.add_argument("--microbatches", type=positive, default=4)
    parser.add_argument("--rounds", type=positive, default=4)
    parser.add_argument("--json", type=writable_file, help="write the results here")
    options = parser.parse_args(arguments)
    require_gpus(parser.error)
    require_torchrun(parser.error, "benchmarks.traffic_cost")
    import megatron_patches

    megatron_patches.apply()
    initialize()
    found = measure(options.shape, options.microbatches, options.rounds)
    if dist.get_rank() == 0:
        print(table(found), flush=True)
        if options.json is not None:
            report = {"gpus": dist.get_world_size(), "shape": options.shape, "microbatches": options.microbatches}
            options.json.write_text(json.dumps({**report, "variants": found}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
