"""Chooses the configurations that fit, orders them by predicted speed, and runs the first ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.sweep.configurations import ParallelConfiguration, configurations
from benchmarks.sweep.memory import Training, needed, stage_experts, stage_weights
from benchmarks.sweep.model import Model
from benchmarks.sweep.report import Candidate
from benchmarks.sweep.runs import STEPS, Outcome, StateFile, Status
from benchmarks.sweep.step_time import Machine, calibrated, step_seconds
from benchmarks.train_shapes import GIB, PRECISIONS, WEIGHT_BYTES

_SHORTEST_S = 20.0  # less time than this is not worth a start


@dataclass(frozen=True)
class Question:
    """What a sweep is to answer.

    Attributes:
        model: what is trained.
        training: how.
        gpus: in all.
        usable_gib: of a GPU's memory.
        micro_batch_sizes: to try.
        max_tokens: of a microbatch on a rank; 0 for no bound.
        on_cpu: whether it runs on a CPU, with Megatron's local layers.
    """

    model: Model
    training: Training
    gpus: int
    usable_gib: float
    micro_batch_sizes: Sequence[int]
    max_tokens: int = 0
    on_cpu: bool = False

    def arguments(self, parallel: ParallelConfiguration, ranks_per_host: int) -> list[str]:
        """Megatron's command line for a configuration."""
        model, training = self.model, self.training
        shape = model.shape
        parts = [
            *model.flags,
            f"--seq-length {shape.sequence}",
            *parallel.flags(experts=bool(shape.experts)),
            f"--global-batch-size {training.global_batch} --train-iters {STEPS} --lr 1e-5 --lr-decay-style constant",
            "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
            "--no-gradient-accumulation-fusion --no-create-attention-mask-in-dataloader",
            "--mock-data --eval-iters 0 --eval-interval 1000 --log-interval 1",
        ]
        if training.grad_bytes == WEIGHT_BYTES:
            parts.append("--grad-reduce-in-bf16")
        if parallel.etp * parallel.expert_etp > 1:
            # copy_engine is refused for a group that spans hosts. auto selects it for the others.
            spans = training.transport == "copy_engine" and parallel.shards_span(ranks_per_host)
            transport = "auto" if spans else training.transport
            parts.append(f"--etp-transport {transport} --etp-prefetch-depth {training.prefetch_depth}")
        if PRECISIONS[training.precision]:
            parts.append(f"--fp8-format e4m3 --fp8-recipe {PRECISIONS[training.precision]}")
        if shape.experts and not self.on_cpu:
            parts.append("--moe-grouped-gemm")
        return " ".join(parts).split()

    def command(self, parallel: ParallelConfiguration, ranks_per_host: int) -> str:
        """The command line to paste, on each host."""
        hosts = -(-self.gpus // ranks_per_host)
        several = f"--nnodes {hosts} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if hosts > 1 else ""
        start = f"torchrun {several}--nproc-per-node {self.gpus // hosts} -m megatron_patches examples/pretrain_gpt.py"
        return " ".join([start, *self.arguments(parallel, ranks_per_host)])


def candidates(question: Question, machine: Machine) -> list[Candidate]:
    """All configurations that fit, the fastest first.

    Raises:
        ValueError: if none can run or none fits.
    """
    model, training = question.model, question.training
    able = configurations(
        model,
        question.gpus,
        training.global_batch,
        question.micro_batch_sizes,
        machine.ranks_per_host,
        question.max_tokens,
    )
    if question.on_cpu:  # Megatron's local attention has no context parallelism
        able = [parallel for parallel in able if parallel.cp == 1]
    if not able:
        raise ValueError(
            f"no parallel configuration of {question.gpus} GPUs can run: {model.shape.layers} layers, "
            f"{model.shape.kv_heads} KV heads and a global batch of {training.global_batch} do not divide over them; "
            "change --gpus or --global-batch-size"
        )
    sizes = {parallel: needed(model, parallel, training) for parallel in able}
    fitting = {parallel: found for parallel, found in sizes.items() if sum(found.values()) <= question.usable_gib * GIB}
    if not fitting:
        least = min(sizes, key=lambda parallel: sum(sizes[parallel].values()))
        weights = [*stage_weights(model, least, 0), *stage_experts(model, least)]
        largest = max(count * rows * columns for count, rows, columns in weights) * WEIGHT_BYTES / GIB
        raise ValueError(
            f"none of {len(able)} parallel configurations fits {question.usable_gib:.2f} GiB (--memory-gib less "
            f"--margin): {least} needs least, {sum(sizes[least].values()) / GIB:.2f}, and one weight of it takes "
            f"{largest:.2f}; take more GPUs"
        )
    found = [
        Candidate(
            parallel,
            memory,
            step_seconds(model, parallel, training, machine),
            question.command(parallel, machine.ranks_per_host),
        )
        for parallel, memory in fitting.items()
    ]
    return in_order(found)


def in_order(found: Sequence[Candidate]) -> list[Candidate]:
    """The fastest first, as predicted; of equal ones, where the host is the bound, the one that computes less."""
    return sorted(found, key=lambda one: (round(one.seconds.total(), 6), one.seconds.compute, one.gib))


@dataclass
class Sweep:
    """Runs the best configurations.

    Attributes:
        question: what is asked.
        machine: as it is known; the first run that ends well says how fast its arithmetic is.
        candidates: in the order of their predicted speed.
        state: outcomes, of earlier sweeps too.
        device: name of the GPU, or "cpu".
        start: runs a configuration: a command, Megatron's arguments and a time-out in seconds.
        say: called with a line of text before each run, and when the time is over.
    """

    question: Question
    machine: Machine
    candidates: list[Candidate]
    state: StateFile
    device: str
    start: Callable[[str, Sequence[str], float], Outcome]
    say: Callable[[str], None]

    def run(self, top: int, seconds: float, timeout_s: float) -> None:
        """Run up to ``top`` configurations, those of earlier sweeps included.

        Args:
            top: how many.
            seconds: after which no run is begun, and at which a run is ended, to be begun anew by the next sweep.
            timeout_s: of one run.
        """
        deadline = time.monotonic() + seconds
        calibrates = True
        for number in range(1, min(top, len(self.candidates)) + 1):
            one = next(one for one in self.candidates if one.outcome is None)
            outcome = self.state.known(one.command, self.device)
            if outcome is None:
                over = f"{seconds:.0f} s are over (--seconds); the same command goes on from {self.state.path}"
                left = deadline - time.monotonic()
                if left < min(_SHORTEST_S, seconds):
                    self.say(over)
                    return
                self.say(f"run {number} of {top}: {one.parallel}")
                outcome = self.start(
                    one.command,
                    self.question.arguments(one.parallel, self.machine.ranks_per_host),
                    min(timeout_s, left),
                )
                if outcome.status == Status.TIMEOUT and left < timeout_s:
                    self.say(over)  # and nothing is known about the configuration, which had less time than others
                    return
                self.state.add(outcome)
            at = self.candidates.index(one)
            self.candidates[at] = replace(one, outcome=outcome)
            if outcome.status == Status.OK and calibrates:
                calibrates = False
                self._calibrate(one.parallel, outcome)

    def _calibrate(self, parallel: ParallelConfiguration, outcome: Outcome) -> None:
        model, training = self.question.model, self.question.training
        if outcome.seconds is None:
            return
        self.machine = calibrated(
            self.machine, lambda machine: step_seconds(model, parallel, training, machine).total(), outcome.seconds
        )
        self.candidates = in_order([one.timed_on(self.machine, model, training) for one in self.candidates])
