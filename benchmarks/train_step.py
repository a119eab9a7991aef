"""Times one training step of a GPT model under several parallelization systems, side by side.

::

    torchrun --nproc-per-node 4 -m benchmarks.train_step --systems none,etp_c10d,etp_copy_engine --json ours.json
    torchrun --nproc-per-node 4 -m benchmarks.train_step --systems none,dp,upstream_gtp,tp,fsdp2 --json theirs.json
    torchrun --nproc-per-node 2 -m benchmarks.train_step --systems none,ep,etp_copy_engine --shape qwen3-30b-a3b-6l
    python -m benchmarks.train_step --merge ours.json theirs.json --table table.md --plot plot.svg

from the repository's root; `make bench-train` does all of it. The systems of a run live in one process group and are
measured in random order, several rounds; every figure has its ratio to "none" (the unsharded model, no communication)
of the same run. Megatron's own sharded weights (upstream_gtp) need an unpatched Megatron, so they are measured in a
run of their own, against a "none" of their own. A name that ends in ``_graph`` replays whole steps from a CUDA graph;
a mixture of experts has none, because the host reads how many tokens each expert gets.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Sequence

from benchmarks.command_line import (
    existing_file,
    not_negative,
    positive,
    positive_seconds,
    require_gpus,
    require_matplotlib,
    require_torchrun,
    writable_file,
    writable_folder,
)
from benchmarks.train_report import load, plot, rows, table
from benchmarks.train_shapes import PRECISIONS, SHAPES, SYSTEMS, resized

_EAGER = "none,etp_copy_engine,etp_c10d"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run under torchrun, or merge what earlier runs wrote."""
    options = _parsed(arguments)
    reports = load(options.merge) if options.merge else [_run(options)]
    if not reports[0]:
        return
    text = table(reports)
    print(text)
    if options.table is not None:
        options.table.write_text(text + "\n")
    if not rows(reports):
        sys.exit("no system was measured; the table says why")
    if options.plot is not None:
        plot(reports, options.plot, options.title)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=_EAGER, help="comma-separated, in the order in which they are built")
    parser.add_argument("--shape", choices=SHAPES, default="llama8b-8l")
    parser.add_argument("--layers", type=positive, help="instead of the shape's")
    parser.add_argument("--experts", type=positive, help="of each layer, instead of the shape's")
    parser.add_argument("--microbatches", type=positive, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=5, help="steps in a row that one measurement averages")
    parser.add_argument(
        "--longest", type=positive_seconds, default=1.0, help="fewer steps, if they took more seconds than this"
    )
    parser.add_argument("--warm-up", type=not_negative, default=1, help="steps before each measurement")
    parser.add_argument("--seed", type=int, default=0, help="of the order of measurements")
    parser.add_argument("--prefetch-depth", type=not_negative, default=1)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="of the linear layers' GEMMs")
    parser.add_argument(
        "--seconds", type=positive_seconds, default=math.inf, help="leave out rounds and traces to end by then"
    )
    parser.add_argument("--json", type=writable_file, help="write the results here")
    parser.add_argument("--traces", type=writable_folder, help="folder to keep rank 0's profiler traces in")
    parser.add_argument(
        "--profile", type=writable_file, help="write here what a step of each system costs, call by call"
    )
    parser.add_argument("--merge", type=existing_file, nargs="+", help="make table and plot of these results, and end")
    parser.add_argument("--table", type=writable_file, help="write the table here too")
    parser.add_argument("--plot", type=writable_file, help="draw a plot; the suffix says the format")
    parser.add_argument("--title", default="", help="of the plot")
    options = parser.parse_args(arguments)
    require_matplotlib(parser.error, options.plot)
    if options.merge:
        return options
    names = options.systems.split(",")
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        parser.error(f"--systems {unknown[0]}: there is no such system; choose from {', '.join(SYSTEMS)}")
    if "upstream_gtp" in names and any(name.startswith("etp") for name in names):
        parser.error("upstream_gtp needs an unpatched Megatron; measure it in a run without ETP")
    try:
        resized(options.shape, options.layers, options.experts)
    except ValueError as error:
        parser.error(str(error))
    require_gpus(parser.error)
    require_torchrun(parser.error, "benchmarks.train_step")
    return options


def _run(options: argparse.Namespace) -> dict[str, object]:
    """Measure; the report on rank 0, nothing on the others."""
    import torch.distributed as dist

    from benchmarks.train_measure import Run, RunOptions, initialize, write_json

    names = tuple(options.systems.split(","))
    if any(name.startswith("etp") for name in names):
        import megatron_patches

        megatron_patches.apply()
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it lists every parameter of every model
    initialize()
    run = Run(
        RunOptions(
            systems=names,
            shape=options.shape,
            layers=options.layers,
            experts=options.experts,
            microbatches=tuple(options.microbatches),
            rounds=options.rounds,
            steps=options.steps,
            longest=options.longest,
            warm_up=options.warm_up,
            seed=options.seed,
            prefetch_depth=options.prefetch_depth,
            precision=options.precision,
            seconds=options.seconds,
            json=options.json,
            traces=options.traces,
            profile=options.profile,
        )
    )
    report = run.measure()
    first = dist.get_rank() == 0
    if first and options.json is not None:
        write_json(options.json, report)
    run.release()
    dist.barrier()
    dist.destroy_process_group()
    return report if first else {}


if __name__ == "__main__":
    main()
