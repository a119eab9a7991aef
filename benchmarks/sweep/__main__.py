"""Finds parallel configurations in which a model trains on so many GPUs, and runs the ones that should be fastest.

::

    python -m benchmarks.sweep --model config.json --gpus 8 --global-batch-size 64 --memory-gib 80 --predict-only
    python -m benchmarks.sweep --model config.json --gpus 8 --global-batch-size 64 --state sweep.jsonl --plot sweep.png

Every configuration is predicted: whether it fits, by a memory model, and how long a step takes. The best few are then
run for a few steps on this machine, and shown with what was predicted and the command line to paste; the first one that
ends well tells how fast the GPU's arithmetic is. docs/sweep.md has the formulas.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.command_line import positive, positive_seconds, require_gpus, require_matplotlib, writable_file
from benchmarks.sweep import report
from benchmarks.sweep.memory import Training
from benchmarks.sweep.model import read_model
from benchmarks.sweep.runs import Outcome, StateFile, run
from benchmarks.sweep.search import Question, Sweep, candidates
from benchmarks.sweep.step_time import Machine
from benchmarks.train_shapes import GIB, WEIGHT_BYTES
from megatron_patches.refit.errors import UnsupportedModelError

_SHOWN = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # when terminated, still end the ranks of a run
    console = Console(highlight=False)
    try:
        question = _question(options)
        machine = Machine(ranks_per_host=options.ranks_per_host)
        found = candidates(question, machine)
        state = StateFile(options.state)
    except (UnsupportedModelError, ValueError) as error:
        parser.error(str(error))
    device = _device(options)

    def start(command: str, words: Sequence[str], timeout_s: float) -> Outcome:
        return run(command, words, options.gpus, device, timeout_s)

    model, training = question.model, question.training
    title = f"predicted: {len(found)} configurations fit {question.usable_gib:.3g} GiB"
    console.print(report.predictions(found[:_SHOWN], model, training, title))
    sweep = Sweep(question, machine, found, state, device, start, lambda text: console.print(text, markup=False))
    if not options.predict_only:
        sweep.run(options.top, options.seconds, options.timeout)
        console.print(report.comparison(sweep.candidates, model, training))
        report.say_failures(sweep.candidates, console)
    best = report.best(sweep.candidates) or (sweep.candidates[0] if options.predict_only else None)
    if best is not None:
        console.print(f"\nfastest: {best.parallel}\n", markup=False)
        sys.stdout.write(best.command + "\n")
    if options.json is not None:
        content = report.as_json(sweep.candidates, sweep.machine, vars(options))
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    if options.plot is not None:
        report.plot(sweep.candidates[:_SHOWN], model, training, options.plot)
    return 0 if best is not None else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="config.json, or the directory that has it")
    parser.add_argument("--gpus", type=positive, required=True)
    parser.add_argument("--sequence", type=positive, default=4096, help="tokens of a sequence; 4096 by default")
    parser.add_argument("--global-batch-size", type=positive, required=True, help="sequences of a step")
    parser.add_argument("--micro-batch-sizes", type=positive, nargs="+", default=[1, 2, 4], help="sequences, to try")
    parser.add_argument("--max-tokens", type=positive, default=0, help="of a microbatch on a rank, at most")
    parser.add_argument("--memory-gib", type=positive_seconds, help="of a GPU; this machine's by default")
    parser.add_argument(
        "--margin", type=float, default=0.08, help="part of the memory that is left to CUDA, NCCL and fragmentation"
    )
    parser.add_argument("--ranks-per-host", type=positive, default=8)
    parser.add_argument("--precision", choices=["bf16", "fp8_block"], default="bf16", help="of the linear layers")
    parser.add_argument("--grad-reduce-in-bf16", action="store_true", help="gradient buffers in bf16 instead of fp32")
    parser.add_argument("--etp-transport", choices=["copy_engine", "c10d"], help="copy_engine by default, c10d on CPUs")
    parser.add_argument("--predict-only", action="store_true", help="run nothing")
    parser.add_argument("--cpu", action="store_true", help="run on this machine's CPU, to try the command out")
    parser.add_argument("--top", type=positive, default=4, help="parallel configurations to run; 4 by default")
    parser.add_argument("--seconds", type=positive_seconds, default=1800.0, help="of all runs at most; 1800 by default")
    parser.add_argument("--timeout", type=positive_seconds, default=300.0, help="seconds of one run; 300 by default")
    parser.add_argument("--state", type=writable_file, default="sweep.jsonl", help="outcomes; a rerun skips them")
    parser.add_argument("--json", type=writable_file, help="write all figures here")
    parser.add_argument("--plot", type=writable_file, help="draw a plot; the suffix says the format")
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    require_matplotlib(parser.error, options.plot)
    if options.plot is not None and options.plot.suffix[1:] not in (known := report.plot_formats()):
        parser.error(f"--plot {options.plot}: its suffix must be one of {', '.join(known)}")
    if not 0 <= options.margin < 1:
        parser.error(f"--margin is {options.margin:g}; it must be at least 0 and below 1")
    if options.gpus > options.ranks_per_host and options.gpus % options.ranks_per_host:
        parser.error(f"--gpus {options.gpus} is no multiple of --ranks-per-host {options.ranks_per_host}")
    if options.cpu and options.etp_transport == "copy_engine":
        parser.error("--etp-transport copy_engine needs GPUs; drop it with --cpu")
    if not options.predict_only and not options.cpu:
        require_gpus(parser.error, options.gpus)
    elif options.memory_gib is None:
        parser.error("--memory-gib is needed with --predict-only and --cpu")


def _question(options: argparse.Namespace) -> Question:
    import torch

    memory_gib = options.memory_gib or torch.cuda.get_device_properties(0).total_memory / GIB
    training = Training(
        options.global_batch_size,
        grad_bytes=WEIGHT_BYTES if options.grad_reduce_in_bf16 else 4,
        precision=options.precision,
        transport=options.etp_transport or ("c10d" if options.cpu else "copy_engine"),
    )
    return Question(
        read_model(options.model, options.sequence),
        training,
        options.gpus,
        memory_gib * (1 - options.margin),
        options.micro_batch_sizes,
        options.max_tokens,
        options.cpu,
    )


def _device(options: argparse.Namespace) -> str:
    import torch

    return "cpu" if options.cpu or options.predict_only else torch.cuda.get_device_name()


if __name__ == "__main__":
    sys.exit(main())
