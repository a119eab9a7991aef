"""Trains a small model by GRPO on one machine, with vLLM servers that get its weights after each step.

``make grpo`` runs it on the CPU. Four processes first pretrain a byte-level model on an exercise sheet of sums
(``sums.py``). The model can then add, but mostly goes on with another sum, as the sheet does. ``train.py`` teaches it
to answer and stop, with nothing but samples from the live server. A table and a plot show the result.

With ``--device cuda`` the first GPUs train, one for each of ``--ranks``, and each of the next ones runs a server.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from examples.grpo import sums
from examples.grpo.report import Reader, Step, plot, table
from examples.grpo.servers import start_servers
from examples.progress import Bars
from examples.quickstart import QuickstartError, quiet, run, torchrun
from examples.vllm_process import ServerError, visible_gpus
from megatron_patches.refit.checkpoints.hf_flags import model_flags
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.models.config_traits import read_config

if TYPE_CHECKING:
    from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
SEED = 1234
GRPO_SEED = 2  # seed of the choice of prompts and of the samples
VOCABULARY, END = 256, ord("\n")
SHEET_LENGTH, LENGTH = 64, 16  # tokens per pretraining sequence, and per prompt with answer
SHEETS = {"cpu": 64, "cuda": 256}  # sequences of a pretraining step, by device
SAMPLES, PROMPTS = 8, 16
# Adam's learning rates, divided by the hidden size: https://arxiv.org/abs/2203.03466
PRETRAINING_RATE, GRPO_RATE = 0.384, 0.064
# Samples of the weights that they train have ratios of 1, which no clip changes. Without pushes, a clip of 0.2 would
# hold the trainer close to the engine, which hides that pushes are missing.
CLIP = 1.0

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,  # the minimum of vLLM on CPUs
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def byte_level(config: Mapping[str, object]) -> dict[str, Any]:
    """The ``config.json`` of a model of the same shape for this task: its tokens are bytes, its texts short."""
    own = {"vocab_size": VOCABULARY, "max_position_embeddings": SHEET_LENGTH, "eos_token_id": END}
    return {name: value for name, value in config.items() if name != "bos_token_id"} | own


def megatron_flags(config: Mapping[str, object], device: str) -> list[str]:
    """Megatron's flags for a model of :func:`byte_level`, and for training it."""
    flags = (
        f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 1 "
        "--attention-dropout 0 --hidden-dropout 0 --no-create-attention-mask-in-dataloader "
        "--no-gradient-accumulation-fusion "  # which needs APEX
        f"--clip-grad 1.0 --adam-beta2 0.98 --weight-decay 0 --seed {SEED} "
        f"--log-interval 1 --eval-iters 0 --eval-interval 100000 {'--bf16' if device == 'cuda' else ''}"
    )
    return [*model_flags(config), *flags.split()]


def pretrain(folder: Path, options: argparse.Namespace, progress: Progress) -> Iterator[None]:
    """Pretrain on the exercise sheet and save to ``folder``/checkpoint, unless an earlier run has done so.

    Yields after each step.
    """
    from examples.prepare_bytes import write

    if (folder / "checkpoint" / "latest_checkpointed_iteration.txt").exists():
        progress.add_task("read", total=1, completed=1, note="by an earlier run")
        return
    write(folder / "sheet", iter([sums.sheet(100_000, SEED)]))
    iterations, batch = options.pretraining, SHEETS[options.device]
    rate = PRETRAINING_RATE / options.config["hidden_size"]
    task = progress.add_task("read", total=iterations, note=f"starting {options.ranks} process(es)")
    flags = (
        f"--seq-length {SHEET_LENGTH} --micro-batch-size {batch // options.ranks} --global-batch-size {batch} "
        f"--lr {rate:g} --min-lr {rate / 10:g} --lr-decay-style cosine --lr-warmup-iters {min(40, iterations // 4)} "
        f"--split 100,0,0 --save-interval {iterations} --no-save-optim --no-save-rng"
    ).split()
    flags += ["--data-path", str(folder / "sheet"), "--data-cache-path", str(folder / "cache")]
    flags += ["--save", str(folder / "checkpoint")]
    for line in run(training(options, "examples/pretrain_gpt.py", iterations, flags), folder / "read.log"):
        if f"/{iterations:8d} |" in line:
            loss = float(line.partition("lm loss: ")[2].split()[0])
            progress.update(task, advance=1, note=f"loss {loss:.3f}")
            yield


def push_checkpoint(folder: Path, url: str) -> None:
    """Push the pretrained weights to a server."""
    flags = ["--load", str(folder / "checkpoint"), "--engines", url]
    for _ in run(torchrun(1, "-m", "megatron_patches.refit", "push", *flags), folder / "reference.log"):
        pass


def train(
    folder: Path, urls: Sequence[str], reference: str, options: argparse.Namespace, progress: Progress, *, stale: bool
) -> Iterator[Step]:
    """Train with GRPO from the checkpoint, and yield each step."""
    name = "stale" if stale else "grpo"
    log = folder / f"{name}.jsonl"
    log.unlink(missing_ok=True)
    batch, rate = SAMPLES * PROMPTS, GRPO_RATE / options.config["hidden_size"]
    task = progress.add_task(name, total=options.steps, note=f"starting {options.ranks} process(es)")
    flags = (
        f"--seq-length {LENGTH} --micro-batch-size {batch // options.ranks} --global-batch-size {batch} "
        f"--lr {rate:g} --min-lr {rate / 5:g} --lr-warmup-iters {min(4, options.steps - 1)} --lr-decay-style linear "
        f"--seed {GRPO_SEED} --calculate-per-token-loss --dataloader-type external --finetune "
        f"--grpo-samples {SAMPLES} --grpo-tokens 6 --grpo-clip {CLIP} --grpo-lag {int(options.asynchronous)} "
        f"--refit-wait --refit-pause {options.pause} "
        f"--refit-interval {options.steps + 1 if stale else 1} --refit-engines {' '.join(urls)}"
    ).split()
    flags += ["--load", str(folder / "checkpoint"), "--grpo-log", str(log)]
    flags += ["--grpo-prompts", str(folder / "train.jsonl"), "--grpo-held-out", str(folder / "held_out.jsonl")]
    flags += shlex.split(options.flags)
    if reference:
        flags += ["--grpo-reference", reference, "--grpo-kl", str(options.kl)]
    reader = Reader(log)
    for line in run(training(options, "examples/grpo/train.py", options.steps, flags), folder / f"{name}.txt"):
        if "until it answers again" in line or "answers again, and takes part" in line:
            progress.console.print(line.strip()[:200], highlight=False)
        if (step := reader.line(line)) is not None:
            progress.update(task, completed=step.number + 1, note=f"reward {step.reward:.2f}, KL {step.kl:.0e}")
            yield step


def training(options: argparse.Namespace, script: str, iterations: int, flags: Sequence[str]) -> list[str]:
    """Command line that runs a Megatron script on this machine."""
    model = megatron_flags(options.config, options.device)
    common = f"--etp-size {min(2, options.ranks)} --train-iters {iterations}"
    return torchrun(options.ranks, "-m", "megatron_patches", str(ROOT / script), *model, *common.split(), *flags)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="make grpo, or python -m examples.grpo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("grpo-out"), help="output folder")
    parser.add_argument("--steps", type=int, default=60, help="steps of GRPO (%(default)s)")
    parser.add_argument(
        "--pretraining", type=int, default=250, metavar="STEPS", help="steps of pretraining (%(default)s)"
    )
    parser.add_argument("--device", choices=tuple(SHEETS), default="cpu", help="%(default)s by default")
    parser.add_argument(
        "--model",
        type=Path,
        help="config.json of a Llama, Qwen2 or Qwen3, or its folder; only the "
        "shape is used, with random weights; a tiny Llama by default",
    )
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), help="processes that train (4 on a CPU, 1 on GPUs)")
    parser.add_argument(
        "--engine-python", default=sys.executable, metavar="PYTHON", help="interpreter of vLLM's environment"
    )
    parser.add_argument("--stale", action="store_true", help="also train without pushes, for comparison")
    parser.add_argument("--asynchronous", action="store_true", help="sample the next step during training")
    parser.add_argument(
        "--pause", choices=("wait", "keep"), default="wait", help="requests in flight finish first, or continue"
    )
    parser.add_argument(
        "--kl", type=float, metavar="WEIGHT", help="weight of KL to the pretrained model; 0 only reports it"
    )
    parser.add_argument("--engines", type=int, default=1, help="servers (%(default)s)")
    parser.add_argument(
        "--kill-at", type=int, metavar="STEP", help="kill the last server after this step, and restart it"
    )
    parser.add_argument("--flags", default="", help="further flags of train.py, such as '--grpo-clip 0.3'")
    options = parser.parse_args()
    if options.engine_python == sys.executable and importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed; `make venv` installs it, --engine-python names another environment")
    for name in ("steps", "pretraining", "engines"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if options.kl is not None and options.kl < 0:
        parser.error(f"--kl is {options.kl:g}; the weight of a penalty must be at least 0")
    if options.kill_at is not None and options.engines < 2:
        parser.error("--kill-at leaves no engine to sample from; add --engines 2")
    if options.kill_at is not None and not 0 <= options.kill_at < options.steps - 1:
        parser.error(f"--kill-at is {options.kill_at}, and no step of {options.steps} follows; choose an earlier one")
    if options.ranks is None:
        options.ranks = 1 if options.device == "cuda" else 4
    try:
        options.config = byte_level(CONFIG if options.model is None else read_config(options.model))
        megatron_flags(options.config, options.device)
    except RefitError as error:
        parser.error(f"--model {options.model}: {error}")
    earlier = options.output / "vllm" / "config.json"
    if earlier.exists() and json.loads(earlier.read_text(encoding="utf-8")) != options.config:
        parser.error(f"--output {options.output} holds a run of another model; name another folder")
    options.engine_gpus = ()
    if options.device == "cuda":
        gpus = visible_gpus()
        needed = options.ranks + options.engines + (options.kl is not None)
        if len(gpus) < needed:
            parser.error(
                f"--device cuda: {options.ranks} process(es) and the servers need {needed} GPUs; "
                f"PyTorch sees {len(gpus)}"
            )
        options.engine_gpus = gpus[options.ranks :]
    return options


def end_at_sigterm() -> None:
    """Let SIGTERM end this process as an interrupt does, together with the processes that it has started."""

    def end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough; the others have time to end
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def main() -> int:
    """Run all phases; returns the exit status."""
    options = parse()
    end_at_sigterm()
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
    number = options.engines + (options.kl is not None)
    try:
        with (
            Bars(*columns, TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=console) as progress,
            start_servers(
                folder / "vllm", options.config, LENGTH, number, options.engine_gpus, options.engine_python
            ) as servers,
        ):
            for _ in pretrain(folder, options, progress):
                servers.look()
            task = progress.add_task("vLLM", total=1, note="")
            servers.wait()
            progress.update(task, completed=1)
            urls, reference = servers.urls[: options.engines], "".join(servers.urls[options.engines :])
            if reference:
                push_checkpoint(folder, reference)
            for name, stale in (("GRPO", False), ("without pushes", True))[: 1 + options.stale]:
                steps = runs.setdefault(name, [])
                for step in train(folder, urls, reference, options, progress, stale=stale):
                    steps.append(step)
                    servers.look()
                    if step.number == options.kill_at and not stale:
                        servers.kill(urls[-1])
                        console.print(f"{urls[-1]} is killed, and starts again", highlight=False)
            servers.wait()
    except (QuickstartError, ServerError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        return 1
    for name, steps in runs.items():
        console.print(table(steps, f"{name}, {options.ranks} process(es), {options.engines} engine(s)"))
    took = f"{time.monotonic() - started:.0f} s in all"
    if importlib.util.find_spec("matplotlib") is None:
        console.print(f"no plot, as matplotlib is not installed; {took}", highlight=False)
    else:
        plot(runs, folder / "grpo.png")
        console.print(f"{folder / 'grpo.png'} shows each step; {took}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
