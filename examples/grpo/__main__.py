"""Trains a small model by GRPO on this machine's CPU, with vLLM servers that get its weights after each step.

``make grpo`` runs it. A byte-level model reads an exercise sheet of sums (``sums.py``), by four processes.
It can add then, but mostly goes on with another sum, as the sheet does. vLLM starts, and ``train.py`` teaches the model
to answer and stop, from nothing but samples of the live server. A table and a plot show how.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from examples.grpo import sums
from examples.grpo.report import Reader, Step, plot, table
from examples.quickstart import QuickstartError, quiet, run, torchrun
from examples.serving import write_byte_tokenizer
from examples.vllm_process import ON_A_CPU, RunningServer, ServerError, running_server

ROOT = Path(__file__).resolve().parents[2]
SEED = 1234
GRPO_SEED = 2  # seed of the choice of prompts and of the samples
VOCABULARY, END = 256, ord("\n")
SHEET_LENGTH, LENGTH = 64, 16  # tokens per pretraining sequence, and per prompt with answer
PRETRAINING = 250
SAMPLES, PROMPTS = 8, 16
SHAPE = {"layers": 2, "hidden": 128, "ffn": 384, "heads": 4}  # head size 32, the minimum of vLLM on CPUs

MODEL = (
    "--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} --num-attention-heads {heads} "
    f"--max-position-embeddings {SHEET_LENGTH} --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 1 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --attention-dropout 0 --hidden-dropout 0 "
    f"--no-create-attention-mask-in-dataloader --clip-grad 1.0 --adam-beta2 0.98 --weight-decay 0 --seed {SEED} "
    "--log-interval 1 --eval-iters 0 --eval-interval 100000"
).format(**SHAPE)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": SHAPE["layers"],
    "hidden_size": SHAPE["hidden"],
    "intermediate_size": SHAPE["ffn"],
    "num_attention_heads": SHAPE["heads"],
    "num_key_value_heads": SHAPE["heads"],
    "head_dim": SHAPE["hidden"] // SHAPE["heads"],
    "vocab_size": VOCABULARY,
    "max_position_embeddings": SHEET_LENGTH,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": END,
}


class Engines:
    """vLLM servers on this machine.

    Attributes:
        urls: their base URLs.
    """

    def __init__(self, folder: Path, number: int, stack: ExitStack, pool: Executor) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        write_byte_tokenizer(folder, END)
        self._folder, self._stack, self._pool = folder, stack, pool
        self._starting: list[Future[RunningServer]] = []
        self._servers = list(pool.map(self._start, [f"vllm{at}.log" for at in range(number)]))
        self.urls = [server.url for server in self._servers]

    def _start(self, log: str, port: int = 0) -> RunningServer:
        arguments = [
            *f"--dtype float32 --enforce-eager --max-model-len {LENGTH} --block-size 32 --seed {SEED}".split(),
            *("--middleware", "megatron_patches.refit.vllm.version_header.WeightsVersionHeader"),
            *("--worker-extension-cls", "megatron_patches.refit.vllm.worker.RefitWorker"),
        ]
        # Compiling is not worthwhile for such a small model, and vLLM would start compilers first.
        variables = {**ON_A_CPU, "TORCH_COMPILE_DISABLE": "1"}
        server = running_server(self._folder, "sums", "etp", arguments, variables, self._folder / log, port=port)
        return self._stack.enter_context(server)

    def kill(self, url: str) -> None:
        """Kill a server as if its machine were lost, and begin to start another one on its port."""
        lost = next(server for server in self._servers if server.url == url)
        os.killpg(lost.process.pid, signal.SIGKILL)
        lost.process.wait(60.0)
        self._starting.append(self._pool.submit(self._start, "vllm-back.log", int(url.rpartition(":")[2])))

    def wait(self) -> None:
        """Wait until the servers that were killed have started again; raises ServerError if one does not."""
        for starting in self._starting:
            starting.result()


@contextmanager
def engines(folder: Path, number: int) -> Iterator[Engines]:
    """Start servers; they end with the context."""
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack, ThreadPoolExecutor(number) as pool:
        started = Engines(folder, number, stack, pool)
        yield started
        started.wait()


def pretrain(folder: Path, ranks: int, iterations: int, progress: Progress) -> None:
    """Pretrain on the exercise sheet and save to ``folder``/checkpoint, unless an earlier run has done so."""
    from examples.prepare_bytes import write

    if (folder / "checkpoint" / "latest_checkpointed_iteration.txt").exists():
        progress.add_task("read", total=1, completed=1, note="by an earlier run")
        return
    write(folder / "sheet", iter([sums.sheet(100_000, SEED)]))
    task = progress.add_task("read", total=iterations, note=f"starting {ranks} processes")
    flags = (
        f"--seq-length {SHEET_LENGTH} --micro-batch-size {64 // ranks} --global-batch-size 64 --lr 3e-3 --min-lr 3e-4 "
        f"--lr-decay-style cosine --lr-warmup-iters 40 --split 100,0,0 --data-path {folder / 'sheet'} "
        f"--data-cache-path {folder / 'cache'} --save {folder / 'checkpoint'} --save-interval {iterations}"
    )
    for line in run(training(ranks, "examples/pretrain_gpt.py", iterations, flags), folder / "read.log"):
        if f"/{iterations:8d} |" in line:
            progress.update(task, advance=1, note=line.partition("lm loss: ")[2][:5])


def push_checkpoint(folder: Path, url: str) -> None:
    """Push the pretrained weights to a server."""
    flags = f"--load {folder / 'checkpoint'} --engines {url}"
    for _ in run(torchrun(1, "-m", "megatron_patches.refit", "push", *flags.split()), folder / "reference.log"):
        pass


def train(
    folder: Path, urls: Sequence[str], reference: str, options: argparse.Namespace, progress: Progress, *, stale: bool
) -> Iterator[Step]:
    """Train with GRPO from the checkpoint, and yield each step."""
    name = "stale" if stale else "grpo"
    log = folder / f"{name}.jsonl"
    log.unlink(missing_ok=True)
    batch = SAMPLES * PROMPTS
    task = progress.add_task(name, total=options.steps, note=f"starting {options.ranks} processes")
    flags = (
        f"--seq-length {LENGTH} --micro-batch-size {batch // options.ranks} --global-batch-size {batch} --lr 5e-4 "
        f"--min-lr 1e-4 --lr-warmup-iters 4 --lr-decay-style linear --seed {GRPO_SEED} --calculate-per-token-loss "
        f"--dataloader-type external --finetune --load {folder / 'checkpoint'} "
        f"--grpo-prompts {folder / 'train.jsonl'} --grpo-samples {SAMPLES} "
        f"--grpo-held-out {folder / 'held_out.jsonl'} --grpo-tokens 6 --grpo-log {log} "
        f"--grpo-lag {int(options.asynchronous)} --refit-wait --refit-pause {options.pause} "
        f"--refit-interval {options.steps + 1 if stale else 1} --refit-engines {' '.join(urls)} {options.flags}"
    )
    if reference:
        flags += f" --grpo-reference {reference} --grpo-kl {options.kl}"
    reader = Reader(log)
    for line in run(training(options.ranks, "examples/grpo/train.py", options.steps, flags), folder / f"{name}.txt"):
        if "until it answers again" in line or "answers again, and takes part" in line:
            progress.console.print(line.strip()[:200], highlight=False)
        if (step := reader.line(line)) is not None:
            progress.update(task, completed=step.number + 1, note=f"reward {step.reward:.2f}, KL {step.kl:.0e}")
            yield step


def training(ranks: int, script: str, iterations: int, flags: str) -> list[str]:
    """Command line that runs a Megatron script on this machine."""
    common = f"--etp-size {min(2, ranks)} --train-iters {iterations}"
    return torchrun(ranks, "-m", "megatron_patches", str(ROOT / script), *f"{MODEL} {common} {flags}".split())


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="make grpo, or python -m examples.grpo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("grpo-out"), help="folder for all that is written")
    parser.add_argument("--steps", type=int, default=60, help="steps of GRPO (%(default)s)")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=4, help="processes that train (%(default)s)")
    parser.add_argument("--stale", action="store_true", help="also train with pushes left out, to compare")
    parser.add_argument("--asynchronous", action="store_true", help="sample the next step while one is trained")
    parser.add_argument("--pause", choices=("wait", "keep"), default="wait", help="requests in flight end, or go on")
    parser.add_argument("--kl", type=float, metavar="WEIGHT", help="weight of KL to the pretrained model; 0 shows it")
    parser.add_argument("--engines", type=int, default=1, help="servers (%(default)s)")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="kill the last server then, and start it again")
    parser.add_argument("--flags", default="", help="further flags of train.py, such as '--grpo-clip 0.3'")
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed; `make venv` installs it")
    if options.kill_at is not None and options.engines < 2:
        parser.error("--kill-at leaves no engine to sample from; add --engines 2")
    return options


def main() -> int:
    """Run all phases; returns the exit status."""
    options = parse()
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    quiet()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    asked, held_out = sums.split(SEED)
    sums.write_problems(folder / "train.jsonl", asked)
    sums.write_problems(folder / "held_out.jsonl", held_out)
    console, started = Console(), time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description:<6}"), BarColumn(), MofNCompleteColumn())
    runs: dict[str, list[Step]] = {}
    try:
        with Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=console) as progress:
            pretrain(folder, options.ranks, PRETRAINING, progress)
            task = progress.add_task("vLLM", total=1, note="")
            has_reference = options.kl is not None
            with engines(folder / "vllm", options.engines + has_reference) as servers:
                progress.update(task, completed=1)
                urls, reference = servers.urls[: options.engines], "".join(servers.urls[options.engines :])
                if reference:
                    push_checkpoint(folder, reference)
                for name, stale in (("GRPO", False), ("without pushes", True))[: 1 + options.stale]:
                    steps = runs.setdefault(name, [])
                    for step in train(folder, urls, reference, options, progress, stale=stale):
                        steps.append(step)
                        if step.number == options.kill_at and not stale:
                            servers.kill(urls[-1])
                            console.print(f"{urls[-1]} is killed, and starts again", highlight=False)
    except (QuickstartError, ServerError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        return 1
    for name, steps in runs.items():
        console.print(table(steps, f"{name}, {options.ranks} processes, {options.engines} engine(s)"))
    plot(runs, folder / "grpo.png")
    console.print(f"{folder / 'grpo.png'} shows each step; {time.monotonic() - started:.0f} s in all", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
