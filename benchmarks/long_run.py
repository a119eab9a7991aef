"""Trains on real text for hundreds of steps in several variants and compares losses; then kills a rank and resumes.

::

    python -m benchmarks.long_run --ranks 4 --etp-size 2 --variants stock copy_engine c10d copy_engine+full_iteration
    python -m benchmarks.long_run --ranks 2 --steps 12           # on a CPU too, with a smaller model and c10d

from the repository's root. A variant is a transport, with ``+`` and a ``--cuda-graph-impl`` if steps are to be
replayed from CUDA graphs; ``stock`` is the run without shards. What is asked of the runs:

- **losses**: all variants with shards add in the same order, so their losses are the same bits at every step. Stock
  Megatron adds in another order, which bf16 training carries to ``STOCK_BOUND``.
- **memory**: from a quarter of the steps on nothing grows, up to ``GROWTH_BOUNDS``.
- **kill -9** of a random rank at a random step: the others end within the time-outs and say why; the training resumes
  from its last checkpoint with the very losses that it would have had.

Prints a table with a verdict a line; ends with status 1 if one is bad.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.command_line import positive, writable_file, writable_folder
from benchmarks.long_run_ranks import ROOT, Training, TrainingFailedError
from etp.config import TransportName
from megatron_patches.weight_shard_api import GRAPH_IMPLEMENTATIONS

STOCK = "stock"
STOCK_BOUND = 0.02
"""Bound on the mean relative difference of the losses."""
GROWTH_BOUNDS = {"allocated": 64 << 10, "reserved": 64 << 20, "symmetric": 0, "process": 96 << 20}
"""Bytes that memory may grow by; allocators of whole processes keep what they once needed."""
ETP_TIMEOUT_S = 30
GROUP_TIMEOUT_MIN = 1
"""Timeout of Megatron's own process groups, in which ranks wait that share no weights with the lost one."""
END_MARGIN_S = 90.0
"""Where NCCL's own timeout comes first, as for Megatron's groups, it takes up to a minute to end the process."""
REASON = re.compile(
    r".*(EtpCommunicationError: |did not finish within|collective operation timeout|[Cc]onnection (closed|reset)).*"
)
_COMMON = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --group-query-attention "
    "--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 256 "
    "--make-vocab-size-divisible-by 2 --attention-dropout 0 --hidden-dropout 0 --num-workers 0 "
    "--no-create-attention-mask-in-dataloader --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 5 --clip-grad 1.0 "
    "--log-interval 10 --eval-iters 0 --eval-interval 100000 --split 100,0,0 --use-distributed-optimizer "
    "--overlap-grad-reduce --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
)
_ON_GPUS = (
    "--num-layers 4 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --num-query-groups 4 "
    "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 4 --global-batch-size 32 --bf16 "
    "--no-gradient-accumulation-fusion"
)
_ON_CPUS = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --num-query-groups 2 "
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8"
)


@dataclass(frozen=True)
class Verdict:
    """One line of the result.

    Attributes:
        what: the run, or runs.
        good: whether it is as it should be.
        found: what was found, and what was allowed.
    """

    what: str
    good: bool
    found: str


@dataclass
class LongRuns:
    """The trainings of one command line.

    Attributes:
        options: as parsed.
        folder: of all records, outputs and checkpoints.
        verdicts: so far.
    """

    options: argparse.Namespace
    folder: Path
    verdicts: list[Verdict]

    def arguments(self, variant: str) -> list[str]:
        """Megatron's command line for a variant."""
        options = self.options
        transport, _, graphs = variant.partition("+")
        parts = [_COMMON, _ON_GPUS if torch.cuda.is_available() else _ON_CPUS, options.arguments]
        parts += [f"--train-iters {options.steps} --lr-decay-iters {options.steps}"]
        parts += [f"--distributed-timeout-minutes {GROUP_TIMEOUT_MIN} --data-path {self.folder / 'text'}"]
        if any("+" in other for other in options.variants):
            # Graphs need this one; with another generator the weights would start from other values.
            parts += ["--te-rng-tracker --no-check-for-nan-in-loss-and-grad"]
        if transport != STOCK:
            parts += [f"--etp-size {options.etp_size} --etp-transport {transport} --etp-timeout {ETP_TIMEOUT_S}"]
        if graphs:
            parts += [f"--cuda-graph-impl {graphs} {options.graph_arguments}"]
        else:
            # The graph of a whole iteration excludes it; results are the same without.
            parts += ["--overlap-param-gather"]
        return " ".join(parts).split()

    def training(self, name: str, variant: str, *more: str) -> Training:
        """A training that is yet to be started."""
        gpus = torch.cuda.device_count() if self.options.share_gpus else 0
        return Training(name, self.folder, self.options.ranks, [*self.arguments(variant), *more], gpus)

    def judge(self, what: str, good: bool, found: str) -> None:
        """Add a verdict, and print it at once: a long run may be cut off."""
        self.verdicts.append(Verdict(what, good, found))
        print(f"{'good' if good else 'BAD ':4}  {what:44}  {found}", flush=True)

    def finish(self, name: str, variant: str) -> Training | None:
        """Run a training to its end; None, and a bad verdict, if it fails."""
        with self.training(name, variant) as training:
            try:
                training.wait(self.options.run_timeout)
            except TrainingFailedError as error:
                self.judge(name, False, str(error))
                return None
        return training

    def compare_variants(self) -> dict[str, dict[int, float]]:
        """Run all variants. Returns the losses of those that ended well."""
        variants = self.options.variants
        with ThreadPoolExecutor(self.options.at_once) as pool:
            done = dict(zip(variants, pool.map(self.finish, variants, variants), strict=True))
        losses = {variant: training.losses() for variant, training in done.items() if training is not None}
        sharded = [variant for variant in losses if variant != STOCK]
        for variant, curve in losses.items():
            steps = sorted(curve)
            fell = curve[steps[-1]] < curve[steps[0]]
            self.judge(f"{variant}: learns", fell, f"loss {curve[steps[0]]:.6f} to {curve[steps[-1]]:.6f}")
        for variant in sharded[1:]:
            self.judge_same(f"{variant} against {sharded[0]}", losses[variant], losses[sharded[0]])
        if STOCK in losses and sharded:
            pairs = [(losses[sharded[0]][step], losses[STOCK][step]) for step in sorted(losses[STOCK])]
            relative = [abs(one - other) / other for one, other in pairs]
            mean = sum(relative) / len(relative)
            found = f"mean relative difference {mean:.2e}, largest {max(relative):.2e}; bound on the mean {STOCK_BOUND}"
            self.judge(f"{sharded[0]} against {STOCK}", mean <= STOCK_BOUND, found)
        for variant, training in done.items():
            if training is not None:
                self.judge_memory(variant, training)
        return losses

    def judge_same(self, what: str, found: dict[int, float], expected: dict[int, float]) -> None:
        """Judges whether the losses of steps are those of another training at the same steps, bit by bit."""
        if not found or not found.keys() <= expected.keys():
            self.judge(what, False, f"steps {sorted(found)[:3]}... are not among {sorted(expected)[:3]}...")
            return
        different = [step for step in sorted(found) if found[step] != expected[step]]
        largest = max(abs(found[step] - expected[step]) for step in found)
        text = f"{len(found)} losses, {len(different)} differ, by at most {largest:.2e}; bound 0"
        self.judge(what, not different, text if not different else f"{text}; first at step {different[0]}")

    def judge_memory(self, variant: str, training: Training) -> None:
        """Judges how much the memory of any rank grows from a quarter of the steps on."""
        growth = dict.fromkeys(GROWTH_BOUNDS, 0)
        for rank in range(self.options.ranks):
            steps = training.steps(rank)
            early, late = steps[len(steps) // 4], steps[-1]
            for name in growth:
                growth[name] = max(growth[name], getattr(late, name) - getattr(early, name))
        found = ", ".join(f"{name} {size:+d} B" for name, size in growth.items())
        good = all(growth[name] <= bound for name, bound in GROWTH_BOUNDS.items())
        self.judge(f"{variant}: memory, step {early.step} to {late.step}", good, found)

    def lose_a_rank(self, variant: str, whole: dict[int, float]) -> None:
        """Kill a rank, see the others end, resume, and compare with the losses of the ``whole`` training."""
        options = self.options
        chance = random.Random(f"{options.seed} {variant}")  # noqa: S311
        every = max(options.steps // 8, 2)
        step = chance.randrange(every + 1, options.steps - 2)
        rank = chance.randrange(options.ranks)
        checkpoints = self.folder / f"{variant}-checkpoints"
        what = f"{variant}: rank {rank} killed after step {step}"
        saving = ("--save", str(checkpoints), "--save-interval", str(every))
        limit = max(60.0 * GROUP_TIMEOUT_MIN, ETP_TIMEOUT_S) + END_MARGIN_S
        try:
            with self.training(f"{variant}-killed", variant, *saving) as training:
                training.kill_at(rank, step, options.run_timeout)
                seconds = training.seconds_until_all_end(limit)
            for other in set(range(options.ranks)) - {rank}:
                reason = REASON.search(training.output(other))
                text = "no reason was printed" if reason is None else reason[0].strip()[:300]
                good = reason is not None and training.ranks[other].returncode != 0
                self.judge(what, good, f"rank {other} ended within {seconds:.1f} s of {limit:.0f}: {text}")
            with self.training(f"{variant}-resumed", variant, "--load", str(checkpoints)) as resumed:
                resumed.wait(options.run_timeout)
            self.judge_same(f"{variant}: resumed after step {min(resumed.losses()) - 1}", resumed.losses(), whole)
        except TrainingFailedError as error:
            self.judge(what, False, str(error))


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--share-gpus", action="store_true", help="with more ranks than GPUs: several ranks on each")
    parser.add_argument("--etp-size", type=positive, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--variants", nargs="+", default=[STOCK, "copy_engine", "c10d"] if cuda else [STOCK, "c10d"])
    parser.add_argument("--kill", nargs="*", metavar="VARIANT", help="lose a rank of these (the first with shards)")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed, and when")
    parser.add_argument("--at-once", type=positive, default=1, help="trainings that run at the same time")
    parser.add_argument("--arguments", default="", help="more of Megatron's arguments, for all runs")
    parser.add_argument("--graph-arguments", default="", help="more of Megatron's arguments, for runs with CUDA graphs")
    parser.add_argument("--run-timeout", type=float, default=300.0, help="seconds for one training")
    parser.add_argument("--folder", type=writable_folder, help="new; keeps records, outputs and checkpoints")
    parser.add_argument("--json", type=writable_file, help="write verdicts and losses here")
    options = parser.parse_args(arguments)
    sharded = [variant for variant in options.variants if variant != STOCK]
    for variant in options.variants:
        transport, _, graphs = variant.partition("+")
        if transport not in (STOCK, *TransportName) or graphs not in ("", *GRAPH_IMPLEMENTATIONS):
            parser.error(
                f"--variants {variant}: give {STOCK} or a transport ({', '.join(TransportName)}), and +"
                f"{' or +'.join(name for name in GRAPH_IMPLEMENTATIONS if name != 'none')} for CUDA graphs"
            )
    if options.ranks % options.etp_size:
        parser.error(f"--etp-size {options.etp_size} does not divide --ranks {options.ranks}")
    if options.kill is None:
        options.kill = sharded[:1]
    unknown = set(options.kill) - set(sharded)
    if unknown:
        parser.error(f"--kill {' '.join(sorted(unknown))}: not among the variants with shards, {' '.join(sharded)}")
    if cuda and not options.share_gpus and options.ranks > torch.cuda.device_count():
        parser.error(f"--ranks {options.ranks}: there are {torch.cuda.device_count()} GPUs; see --share-gpus")
    if options.steps < 10:
        parser.error(f"--steps is {options.steps}; at least 10 are needed to save, to lose a rank, and to go on")
    return options


def _run(options: argparse.Namespace, folder: Path) -> list[Verdict]:
    prepare = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "prepare_bytes.py")]
    subprocess.run([*prepare, "--output", str(folder / "text")], check=True, timeout=120)  # noqa: S603
    runs = LongRuns(options, folder, [])
    losses = runs.compare_variants()
    _write(options.json, runs.verdicts, losses)  # what follows may take longer than there is time
    to_kill = [variant for variant in options.kill if variant in losses]
    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(runs.lose_a_rank, to_kill, [losses[variant] for variant in to_kill]))
    _write(options.json, runs.verdicts, losses)
    return runs.verdicts


def _write(path: Path | None, verdicts: Sequence[Verdict], losses: Mapping[str, object]) -> None:
    if path is not None:
        result = {"verdicts": [vars(verdict) for verdict in verdicts], "losses": losses}
        path.write_text(json.dumps(result, indent=1), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for; status 1 if a verdict is bad."""
    options = _parsed(arguments)
    # Ended from outside, it ends its trainings.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if options.folder is not None:
        options.folder.mkdir(parents=True)
        verdicts = _run(options, options.folder.resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            verdicts = _run(options, Path(folder))
    bad = sum(not verdict.good for verdict in verdicts)
    print(f"{len(verdicts)} verdicts, {bad} bad")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
