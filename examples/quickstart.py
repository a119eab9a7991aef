"""Trains a small byte-level language model with sharded weights on this machine, exports it and lets it write code.

``make quickstart`` runs it. Four processes train over gloo, ETP 2 x DP 2, on the Python standard library's sources;
no GPU is needed. The checkpoint is exported to Hugging Face's format, loaded with ``transformers`` and compared with
Megatron's own output. Then vLLM starts with random weights. It receives the trained ones while it runs, and again after
20 more steps of training, through the same code as on a cluster. ``--no-vllm`` leaves that part out.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples import loss_curve
from examples.progress import Bars
from examples.serving import Server, serve, write_byte_tokenizer
from examples.vllm_process import ServerError

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress

EXAMPLES = Path(__file__).resolve().parent
RANKS, SHARDS = 4, 2
VOCABULARY = 256
SEQUENCE = 128
DEFAULT_ITERATIONS, WARMUP_ITERATIONS, MORE_ITERATIONS = 400, 10, 20
# fp32 weight, its gradient, and Adam's two moments.
BYTES_PER_PARAMETER = 4 * 4
LOGITS_TOLERANCE = 1e-5
PHASE_TIMEOUT_S = 900.0
PROMPT = "def "

MODEL = (
    "--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention "
    f"--num-query-groups 2 --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 1 "
    "--attention-dropout 0 --hidden-dropout 0 --no-create-attention-mask-in-dataloader"
)
SCHEDULE = (
    "--micro-batch-size 2 --global-batch-size 8 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine "
    f"--lr-warmup-iters {WARMUP_ITERATIONS} --weight-decay 0.01 --clip-grad 1.0 --adam-beta2 0.98 "
    "--split 98,2,0 --eval-iters 2 --eval-interval 100000 --log-interval 1 --no-one-logger"
)

_ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|.*lm loss: (\S+)")
_VALIDATION = re.compile(r"validation loss at iteration \d+ on validation set \| lm loss value: (\S+)")
_PUSH = re.compile(r"refit: (version \d+ sent.*)")
_SHARD = re.compile(r"number of parameters on .*rank \(0, 0, 0\): (\d+)")


class QuickstartError(Exception):
    """A phase failed; the message says which one, and where its output is."""


@dataclass
class Summary:
    """Results of the run.

    Attributes:
        losses: training loss of each iteration.
        validation: loss on the held-out files, after training.
        shard_parameters: number of parameters on one rank.
        parameters: number of parameters of the whole model.
        logits_difference: largest difference between Megatron's logits and the export's.
        seconds: duration of each phase.
        pushes: for each push into vLLM, where the weights came from and its report.
        written: text that vLLM generated, with the weights that it had at that time.
    """

    losses: list[float] = field(default_factory=list)
    validation: float = float("nan")
    shard_parameters: int = 0
    parameters: int = 0
    logits_difference: float = float("nan")
    seconds: dict[str, float] = field(default_factory=dict)
    pushes: list[tuple[str, str]] = field(default_factory=list)
    written: list[tuple[str, str]] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase."""
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start


def run(command: list[str], log: Path) -> Iterator[str]:
    """Run ``command``, write its output to ``log``, and yield the output line by line.

    Raises:
        QuickstartError: if it fails; its processes have been ended, as after an interrupt.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
    deadline = time.monotonic() + PHASE_TIMEOUT_S
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(  # noqa: S603
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        if process.stdout is None:
            raise QuickstartError(f"{command[0]} has no output to read")
        try:
            for line in process.stdout:
                file.write(line)
                yield line
                if time.monotonic() > deadline:
                    raise QuickstartError(f"no end after {PHASE_TIMEOUT_S:.0f} s; see {log}")
            status = process.wait(timeout=PHASE_TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=30.0)
            process.stdout.close()
    if status != 0:
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
        told = [line for line in lines if line.startswith("megatron_patches: error: ")]
        tail = "".join(told[:1] or lines[-15:])  # torchrun adds tens of lines to a run's own output
        raise QuickstartError(f"{' '.join(command[:6])} ... ended with status {status}; see {log}\n{tail}")


def torchrun(ranks: int, *arguments: str) -> list[str]:
    """Command line that starts ``ranks`` processes on this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, *arguments]


def training_command(folder: Path, iterations: int, *more: str) -> list[str]:
    """Command line of a training run that ends at step ``iterations``."""
    return torchrun(
        RANKS,
        "-m",
        "megatron_patches",
        str(EXAMPLES / "pretrain_gpt.py"),
        *MODEL.split(),
        *SCHEDULE.split(),
        *("--data-path", str(folder / "data" / "stdlib"), "--data-cache-path", str(folder / "data" / "cache")),
        *("--train-iters", str(iterations), "--etp-size", str(SHARDS)),
        *more,
    )


def train(folder: Path, iterations: int, progress: Progress, summary: Summary) -> None:
    """Train and save a checkpoint to ``folder``/checkpoint."""
    saving = ("--save", str(folder / "checkpoint"), "--save-interval", str(iterations))
    task = progress.add_task("train", total=iterations, note="starting 4 processes")
    for line in run(training_command(folder, iterations, *saving), folder / "train.log"):
        if match := _ITERATION.search(line):
            summary.losses.append(float(match[3]))
            progress.update(task, completed=int(match[1]), note=f"loss {summary.losses[-1]:.3f}")
        elif match := _SHARD.search(line):
            summary.shard_parameters = int(match[1])
        elif match := _VALIDATION.search(line):
            summary.validation = float(match[1])
    progress.update(task, note=f"loss {summary.losses[0]:.3f} -> {summary.losses[-1]:.3f}")


def complete(server: Server, weights: str, expected: int) -> tuple[str, str]:
    """The text that vLLM generates with ``weights``.

    Raises:
        QuickstartError: if a version of the weights other than ``expected`` answers.
    """
    text, version = server.complete(PROMPT, 60)
    if version != str(expected):
        raise QuickstartError(f"version {version} of the weights has answered, and {expected} was pushed last")
    return f"{weights}, version {version}", text


def push(folder: Path, server: Server, summary: Summary) -> None:
    """Stream the checkpoint's weights into the running server, from as many shards as it was trained with."""
    arguments = ("--load", str(folder / "checkpoint"), "--etp-size", str(SHARDS), "--engines", server.url)
    for line in run(torchrun(SHARDS, "-m", "megatron_patches.refit", "push", *arguments), folder / "push.log"):
        if line.startswith("version "):
            summary.pushes.append(("the checkpoint", line.partition(" (")[0].strip()))


def train_on(folder: Path, iterations: int, server: Server, summary: Summary) -> None:
    """Continue training from the checkpoint, and let the run push its new weights."""
    total = iterations + MORE_ITERATIONS
    refit = ("--refit-engines", server.url, "--refit-interval", str(total))  # the last step only
    resumed = ("--load", str(folder / "checkpoint"), "--override-opt_param-scheduler")
    command = training_command(folder, total, *resumed, *refit)
    for line in run(command, folder / "train_on.log"):
        if match := _PUSH.search(line):
            summary.pushes.append(("the training run", match[1]))


def serve_and_push(folder: Path, iterations: int, progress: Progress, summary: Summary) -> None:
    """Start vLLM, push, continue training, push again; record the generated text each time.

    Raises:
        QuickstartError: if a push has not changed the generated text.
    """
    write_byte_tokenizer(folder / "hf", VOCABULARY - 1)
    with ExitStack() as stack:
        with summary.phase("start vLLM"), step(progress, "vLLM"):
            server = stack.enter_context(serve(folder / "hf", SEQUENCE, folder / "vllm.log"))
        summary.written.append(complete(server, "random weights", 0))
        with summary.phase("push into vLLM"), step(progress, "push"):
            push(folder, server, summary)
        summary.written.append(complete(server, f"after {iterations} steps", iterations))
        with summary.phase("train on and push again"), step(progress, "train on"):
            train_on(folder, iterations, server, summary)
        total = iterations + MORE_ITERATIONS
        summary.written.append(complete(server, f"after {total} steps", total))
    texts = [text for _, text in summary.written]
    if len(set(texts)) < len(texts) and iterations >= DEFAULT_ITERATIONS:
        raise QuickstartError(f"a push did not change what vLLM writes: {texts}")


def export(folder: Path) -> None:
    """Export the checkpoint to ``folder``/hf, each rank its own part."""
    arguments = ("--load", str(folder / "checkpoint"), "--output", str(folder / "hf"), "--etp-size", str(SHARDS))
    more = ("--overwrite", "--eos-token-id", str(VOCABULARY - 1))
    command = torchrun(SHARDS, "-m", "megatron_patches.refit", "export", *arguments, *more)
    for _ in run(command, folder / "export.log"):
        pass


def compare(folder: Path, model: Any, summary: Summary) -> None:
    """Compare the logits of the export with those of Megatron's model, loaded from the checkpoint.

    Raises:
        QuickstartError: if they differ.
    """
    import torch

    tokens = torch.tensor([list((EXAMPLES / "pretrain_gpt.py").read_bytes()[:128])])
    with torch.no_grad():
        expected = megatron_logits(folder / "checkpoint", tokens)
        found = model(tokens).logits
    summary.parameters = sum(parameter.numel() for parameter in model.parameters())
    summary.logits_difference = (found - expected).abs().max().item()
    bound = LOGITS_TOLERANCE * max(1.0, expected.abs().max().item())
    if not summary.logits_difference <= bound:
        raise QuickstartError(f"the export's logits differ by {summary.logits_difference:.1e}, more than {bound:.1e}")


def megatron_logits(checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits ``[batch, sequence, vocabulary]`` of Megatron's model for ``tokens`` ``[batch, sequence]``, unsharded."""
    import torch

    import megatron_patches

    megatron_patches.apply()
    from megatron_patches.refit.checkpoints import megatron_checkpoint as saved
    from megatron_patches.refit.checkpoints.checkpoint_build import build_chunks
    from megatron_patches.refit.checkpoints.checkpoint_sizes import ParallelSizes

    sizes = ParallelSizes()
    directory = saved.find_iteration(checkpoint, None)
    with saved.process_groups(sizes, timedelta(seconds=PHASE_TIMEOUT_S)):
        (model,) = build_chunks(saved.saved_arguments(directory), sizes)
        saved.load_weights([model.eval()], directory)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits: torch.Tensor = model(tokens, positions, None)
    return logits


def generate(model: Any, length: int) -> str:
    """``length`` bytes that the model generates after :data:`PROMPT`."""
    import torch

    torch.manual_seed(0)
    prompt = torch.tensor([list(PROMPT.encode())])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=length,
        do_sample=True,
        temperature=0.6,
        top_k=40,
        pad_token_id=VOCABULARY - 1,
    )
    return bytes(token for token in output[0].tolist() if token < VOCABULARY - 1).decode(errors="replace")


def show(console: Console, summary: Summary, text: str, folder: Path) -> None:
    """Print the loss, the generated text and the table of results; draw the loss to ``folder``/loss.png."""
    console.rule("loss of each step")
    console.print(loss_curve.in_terminal(summary.losses), markup=False, highlight=False)
    with suppress(ImportError):  # matplotlib is for development only
        loss_curve.draw(summary.losses, summary.validation, folder / "loss.png")
    console.rule("what the model writes")
    console.print(text.rstrip(), markup=False, highlight=False)
    for weights, written in summary.written:
        console.rule(f"what vLLM writes: {weights}")
        console.print(PROMPT + written.rstrip(), markup=False, highlight=False)
    table = Table(title=f"ETP {SHARDS} x DP {RANKS // SHARDS} on {RANKS} processes", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # a path must be whole
    table.add_row("training loss, first and last", f"{summary.losses[0]:.3f} -> {summary.losses[-1]:.3f}")
    table.add_row("loss on held-out files", f"{summary.validation:.3f}")
    with_etp = summary.shard_parameters * BYTES_PER_PARAMETER
    without = summary.parameters * BYTES_PER_PARAMETER
    table.add_row(
        "weights, gradients and Adam state a rank held",
        f"{with_etp / 1e6:.2f} MB, without ETP {without / 1e6:.2f} MB ({with_etp / without:.0%})",
    )
    table.add_row("largest difference of logits, Megatron and export", f"{summary.logits_difference:.1e}")
    for source, line in summary.pushes:
        table.add_row(f"pushed into vLLM from {source}", line)
    if (folder / "loss.png").exists():
        table.add_row("picture of the loss", str(folder / "loss.png"))
    for name, seconds in summary.seconds.items():
        table.add_row(f"seconds to {name}", f"{seconds:.1f}")
    table.add_row("seconds in all", f"{sum(summary.seconds.values()):.1f}")
    console.print(table)


def quiet() -> None:
    """Silence Megatron, torch and transformers in this process."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("ignore")
    for name in ("megatron", "megatron_patches", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> int:
    """Run all phases; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("quickstart-out"), help="folder for all that is written")
    parser.add_argument("--iterations", type=int, default=DEFAULT_ITERATIONS, help="steps of training (%(default)s)")
    parser.add_argument("--no-vllm", action="store_true", help="leave out vLLM")
    options = parser.parse_args()
    if options.iterations <= WARMUP_ITERATIONS:
        parser.error(f"--iterations is {options.iterations}; the learning rate alone warms up for {WARMUP_ITERATIONS}")
    if not options.no_vllm and importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed; `make venv` installs it, --no-vllm does without")
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    quiet()
    console = Console(width=min(Console().width, 80))
    summary = Summary()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    try:
        with Bars(*columns, console=console) as progress:
            with summary.phase("prepare the data"), step(progress, "data"):
                command = [sys.executable, str(EXAMPLES / "prepare_bytes.py"), "--output", str(folder / "data/stdlib")]
                for _ in run(command, folder / "data.log"):
                    pass
            with summary.phase("train"):
                train(folder, options.iterations, progress, summary)
            with summary.phase("export"), step(progress, "export"):
                export(folder)
            with summary.phase("compare and generate"), step(progress, "compare"):
                from transformers import AutoModelForCausalLM
                from transformers.utils import logging as transformers_logging

                transformers_logging.disable_progress_bar()
                model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype="float32").eval()
                compare(folder, model, summary)
                text = generate(model, 120)
            if not options.no_vllm:
                serve_and_push(folder, options.iterations, progress, summary)
    except (QuickstartError, ServerError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        return 1
    show(console, summary, text, folder)
    return 0


@contextmanager
def step(progress: Progress, name: str) -> Iterator[None]:
    """A line of the progress display for a phase that has one step."""
    task = progress.add_task(name, total=1, note="")
    yield
    progress.update(task, completed=1)


if __name__ == "__main__":
    sys.exit(main())
