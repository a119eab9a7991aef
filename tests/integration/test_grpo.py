"""``make grpo``, in a shorter form, and what ends it: each with one line."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.grpo import sums
from examples.grpo.__main__ import CONFIG, LENGTH, SEED, byte_level, megatron_flags, push_checkpoint
from examples.grpo.engines import Engine
from examples.grpo.servers import start_servers
from megatron_patches.refit.control.credentials import Credentials
from tests.integration.grpo_rewards import RESTARTED_LOG, SCORED_BEFORE_FAILURE
from tests.support.program import run_program

pytestmark = [
    pytest.mark.integration,
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("grpo"),
]

ROOT = Path(__file__).resolve().parents[2]
REWARDS = "tests.integration.grpo_rewards"
STEPS, PRETRAINING = 30, 120  # fewer than `make grpo` takes, so that the reward ends lower
MODEL = byte_level(CONFIG)


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **variables}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )


@dataclass(frozen=True)
class Step:
    """One line of ``--grpo-log``."""

    step: int
    samples: list[dict[str, Any]]

    @property
    def reward(self) -> float:
        return sum(sample["reward"] for sample in self.samples) / len(self.samples)

    @property
    def versions(self) -> set[int]:
        return {version for sample in self.samples for version in sample["versions"]}

    @property
    def engines(self) -> set[str]:
        return {sample["engine"] for sample in self.samples}


def steps_of(log: Path) -> list[Step]:
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["step"] for entry in entries] == list(range(len(entries)))
    return [Step(entry["step"], entry["samples"]) for entry in entries]


def rows(printed: str, name: str) -> list[str]:
    """What the printed tables say in the row whose name ends so, a table each."""
    return re.findall(rf"{re.escape(name)} *\u2502 (.*?) *\u2502", printed)


def final_reward(steps: Sequence[Step]) -> float:
    return sum(step.reward for step in steps[-5:]) / 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of these tests write; the first one to run pretrains. Its name has a space, as a user's may."""
    return tmp_path_factory.mktemp("grpo out")


def grpo(folder: Path, *more: str) -> str:
    """What ``make grpo`` prints."""
    steps = ("--steps", str(STEPS), "--pretraining", str(PRETRAINING))
    done = run("-m", "examples.grpo", "--output", str(folder), "--ranks", "2", *steps, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """What it prints with pushes."""
    return grpo(folder)


def thirds(printed: str) -> list[list[float]]:
    """Of each run: how far the engine's probabilities are from the trainer's, as the means of each third of it."""
    return [[float(number) for number in row.split(", ")] for row in rows(printed, "mean of each third")]


def test_reward_rises_with_pushes(folder: Path, printed: str) -> None:
    steps = steps_of(folder / "grpo.jsonl")
    assert len(steps) == STEPS
    assert steps[0].reward < 0.4
    assert final_reward(steps) > 0.6
    # Every sample says who wrote it: the weights that it then trains.
    assert [step.versions for step in steps] == [{step} for step in range(STEPS)]
    assert (folder / "grpo.png").stat().st_size > 10_000
    (rounding,) = thirds(printed)
    assert max(rounding) < 1e-5


def test_reward_does_not_rise_without_pushes(tmp_path: Path) -> None:
    _, (first, second, last) = thirds(grpo(tmp_path, "--stale"))
    steps = steps_of(tmp_path / "stale.jsonl")
    assert [step.versions for step in steps] == [{0}] * STEPS
    assert final_reward(steps) < 0.4
    assert 1e-2 < first < 0.5 * second < 0.5 * last


@pytest.mark.usefixtures("printed")  # it has pretrained
def test_sampling_ahead_from_two_servers_outlives_one_which_is_restarted_and_serves_later_versions(
    folder: Path,
) -> None:
    steps, killed_at = 28, 4
    done = run(
        *("-m", "examples.grpo", "--output", str(folder), "--steps", str(steps), "--ranks", "2"),
        *("--asynchronous", "--pause", "keep", "--engines", "2", "--kill-at", str(killed_at)),
        *("--flags", f"--grpo-reward {REWARDS}:waits_for_server"),
        **{RESTARTED_LOG: str(folder / "vllm" / "vllm-back.log")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (killed,) = re.findall(r"(\S+) is killed, and starts again", done.stdout)
    logged = steps_of(folder / "grpo.jsonl")
    assert len(logged) == steps
    both = logged[0].engines
    assert len(both) == 2
    assert killed in both
    # Requests in flight go on with new weights, so a sample may have two versions.
    for step in logged:
        assert step.versions <= {max(step.step - 1, 0), step.step}
    alone = [step.step for step in logged if step.engines == both - {killed}]
    rejoined = [step.step for step in logged if step.step > max(alone) and killed in step.engines]
    assert killed_at < min(alone)
    assert rejoined == list(range(max(alone) + 1, steps))
    assert len(rejoined) >= 3
    pushed = re.findall(r"refit: version (\d+) sent, .* served ", (folder / "grpo.txt").read_text())
    assert list(map(int, pushed)) == list(range(steps + 1))
    assert final_reward(logged) > logged[0].reward + 0.2
    # The table says who served which version.
    for engine in both:
        (row,) = rows(done.stdout, f"samples from {engine}")
        ranges = [tuple(map(int, ends)) for ends in re.findall(r"(\d+) to (\d+)", row)]
        served = {sample["versions"][0] for step in logged for sample in step.samples if sample["engine"] == engine}
        assert {version for first, last in ranges for version in range(first, last + 1)} == served
        assert len(ranges) == (2 if engine == killed else 1)


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def processes_of(folder: Path) -> dict[int, str]:
    """Processes of this machine whose command lines name a folder: its number and its command line."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in line:
                found[int(file.parent.name)] = line
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_driver_ends_its_servers_and_trainers(tmp_path: Path, number: signal.Signals) -> None:
    (python := tmp_path / "python").write_text(f"#!{sys.executable}\n{SERVER}")  # in place of vLLM's
    python.chmod(0o755)
    command = [sys.executable, "-W", "ignore", "-m", "examples.grpo", "--output", str(tmp_path), "--ranks", "1"]
    with (tmp_path / "printed").open("w") as printed:
        driver = subprocess.Popen(
            [*command, "--engine-python", str(python)], cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 120.0
        # The server, torchrun, and its process.
        while len(started := processes_of(tmp_path).keys() - {driver.pid}) < 3:
            assert driver.poll() is None, (tmp_path / "printed").read_text()
            assert time.monotonic() < deadline, started
            time.sleep(0.1)
        driver.send_signal(number)
        began = time.monotonic()
        driver.wait(60)
        assert not processes_of(tmp_path)
        assert driver.returncode != 0
        assert time.monotonic() - began < 20.0
    finally:
        driver.kill()
        for left in processes_of(tmp_path):
            os.kill(left, signal.SIGKILL)


@dataclass(frozen=True)
class Servers:
    """Two servers: one to train with, one for the reference."""

    url: str
    reference: str

    def version(self) -> int:
        """The version with which the first one answers."""
        (answer,) = Engine(self.url, 60.0, Credentials()).sample("\n1+1=", 1, 1, seed=0)
        (version,) = answer.versions
        return version


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with start_servers(tmp_path_factory.mktemp("servers") / "vllm", MODEL, LENGTH, 2) as started:
        started.wait()
        yield Servers(*started.urls)


def training(prompts: Path, url: Sequence[str], *more: str, ranks: int = 1) -> list[str]:
    """The launcher's command line."""
    flags = (
        f"--seq-length {LENGTH} --micro-batch-size {8 // ranks} --global-batch-size 8 --lr 1e-3 "
        f"--train-iters 2 --dataloader-type external --calculate-per-token-loss --refit-wait --refit-timeout 120 "
        "--grpo-tokens 6"
    )
    asked = ["--grpo-prompts", str(prompts)]
    engine = ["--refit-engines", *url] if url else []
    script = ["-m", "megatron_patches", "examples/grpo/train.py"]
    return [*script, *megatron_flags(MODEL, "cpu"), *flags.split(), *asked, *engine, *more]


@pytest.mark.usefixtures("printed")  # it has pretrained
def test_weight_of_kl_counts_in_the_loss_and_keeps_the_model_near_its_reference(folder: Path, servers: Servers) -> None:
    push_checkpoint(folder, servers.reference)
    found, weights = {}, (0.0, 10.0)
    for weight in weights:
        log = folder / f"kl_{weight}.jsonl"
        more = (
            "--finetune --train-iters 10 --micro-batch-size 64 --global-batch-size 64 --lr 3e-4 "
            f"--lr-decay-style constant --grpo-reference {servers.reference} --grpo-kl {weight}"
        )
        files = ("--load", str(folder / "checkpoint"), "--grpo-log", str(log))
        command = training(folder / "train.jsonl", [servers.url], *more.split(), *files)
        done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", *command)
        assert done.returncode == 0, done.stdout + done.stderr
        # Another thread may print before the end of a line.
        values = re.findall(r"grpo loss: (\S+) .*?kl reference: (\S+) ", done.stdout, re.DOTALL)
        found[weight] = ([(float(loss), float(kl)) for loss, kl in values], steps_of(log))
    (free, sampled_free), (held, sampled_held) = found.values()
    assert len(free) == len(held) == 10
    # Both begin at the reference, where the term and its gradient are zero: the second steps only differ in the term.
    answers = [[sample["answer"] for sample in steps[1].samples] for steps in (sampled_free, sampled_held)]
    assert answers[0] == answers[1]
    assert max(free[0][1], held[0][1]) < 1e-6
    assert free[1][1] > 1e-4
    assert held[1][1] == pytest.approx(free[1][1], rel=1e-2)
    assert held[1][0] - free[1][0] == pytest.approx(weights[1] * held[1][1], rel=0.05)
    # Once the term is felt. With 64 samples of one prompt, the KL of a single step is mostly that of its prompt.
    assert sum(kl for _, kl in held[3:]) < 0.6 * sum(kl for _, kl in free[3:])


def failing(folder: Path, url: Sequence[str], *more: str, prompt: str = "\n1+1=", ranks: int = 1) -> str:
    """The line with which a training ends that must not go on."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": prompt, "answer": "2"}))
    done = run_program(*training(prompts, url, *more, ranks=ranks), ranks=ranks)
    assert done.returncode != 0
    lines = [line.removeprefix("megatron_patches: ") for line in done.stderr.splitlines()]
    (told,) = [line for line in lines if line.startswith("error: ")]
    return told.removeprefix("error: ")


def test_a_training_without_an_engine_does_not_begin(tmp_path: Path) -> None:
    assert failing(tmp_path, []) == "no engine to ask: give --refit-engines"
    with socket.socket() as gone:
        # Nobody listens, and it is kept: one of the many ports that process groups listen on could be the same.
        gone.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{gone.getsockname()[1]}"
        told = failing(tmp_path, [nobody], ranks=2)
    assert nobody in told
    assert "Connection refused" in told


@pytest.mark.parametrize(
    ("how", "message", "pushed"),
    [
        ({"prompt": "1+1=" * 20}, "refused a request with 400: ", 0),
        ({"more": ["--num-attention-heads", "2"]}, "num_attention_heads", 0),
        ({"more": ["--seq-length", "8"]}, "--seq-length is 8, which takes 9; make it longer", 0),
        (
            {"more": ["--grpo-reward", f"{REWARDS}:fails_in_second_step"], "ranks": 2},
            f"the reward raised RuntimeError: answer {SCORED_BEFORE_FAILURE}",
            1,
        ),
    ],
)
def test_what_cannot_go_well_ends_the_training_with_one_line_and_the_server_has_the_last_push(
    tmp_path: Path, servers: Servers, how: dict[str, Any], message: str, pushed: int
) -> None:
    more, before = how.pop("more", []), servers.version()
    assert message in failing(tmp_path, [servers.url], *more, **how)
    assert servers.version() == (pushed or before)


def test_the_problems_are_sums_and_the_sheet_has_them_all() -> None:
    asked, held_out = sums.split(SEED)
    assert len({*asked, *held_out}) == len(asked) + len(held_out) == 36
    lines = sums.sheet(5000, SEED).decode().split()
    assert {f"{a}+{b}={a + b}" for a in range(1, 7) for b in range(1, 7)} == set(lines)
