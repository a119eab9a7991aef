"""An engine that is killed in the midst of a Megatron training: what becomes of the training, and of the engine."""

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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.quickstart import MODEL, SEQUENCE, VOCABULARY
from examples.serving import write_byte_tokenizer
from examples.vllm_process import ON_A_CPU, RunningServer, starting_server
from tests.support.ports import free_port
from tests.support.vllm_server import copied_process

pytestmark = [
    pytest.mark.integration,
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
INTERVAL = 5
SCHEDULE = (
    f"--mock-data --micro-batch-size 1 --global-batch-size {RANKS} --lr 1e-3 --train-iters 100000 --log-interval 1 "
    f"--eval-iters 0 --eval-interval 100000 --etp-size 2 --refit-interval {INTERVAL} --exit-signal-handler"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": SEQUENCE,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


class Training:
    """Ranks of a training that runs until it is told to end, without torchrun, whose agent would end survivors.

    Attributes:
        ranks: its processes.
    """

    def __init__(self, folder: Path, url: str, *flags: str) -> None:
        self._output = folder / f"rank{RANKS - 1}.txt"
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-W", "ignore", "-m", "megatron_patches", "examples/pretrain_gpt.py"]
        command += [*MODEL.split(), *SCHEDULE.split(), "--refit-engines", url, *flags]
        self.ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(RANKS):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"rank{rank}.txt").open("wb") as output:
                environment = {**os.environ, **shared, **own}
                self.ranks.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
                )

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def iteration(self) -> int:
        """The last that was reported."""
        return max([0, *map(int, re.findall(r"iteration +(\d+)/", self.output))])

    def wait_for(self, what: Callable[[], object], timeout_s: float = 180.0) -> None:
        """Wait until something is true; the training must not end meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not what():
            assert [rank.poll() for rank in self.ranks] == [None] * RANKS, self.output[-4000:]
            assert time.monotonic() < deadline, self.output[-4000:]
            time.sleep(0.2)

    def sent(self) -> list[int]:
        """Versions that were sent."""
        return [int(version) for version in re.findall(r"refit: version (\d+) sent", self.output)]

    def end(self) -> list[int]:
        """Ask it to end, in order. The statuses of its ranks."""
        for rank in self.ranks:
            rank.send_signal(signal.SIGTERM)
        return self.statuses()

    def statuses(self) -> list[int]:
        """Wait for its end."""
        return [rank.wait(240) for rank in self.ranks]


@contextlib.contextmanager
def training(folder: Path, url: str, *flags: str) -> Iterator[Training]:
    folder.mkdir()
    under_test = Training(folder, url, *flags)
    try:
        yield under_test
    finally:
        for rank in under_test.ranks:
            rank.kill()
            rank.wait()


@contextlib.contextmanager
def server(folder: Path, port: int, log: str) -> Iterator[RunningServer]:
    arguments = f"--dtype float32 --enforce-eager --max-model-len {SEQUENCE} --block-size 32".split()
    variables = ON_A_CPU | {"TORCH_COMPILE_DISABLE": "1"}
    with starting_server(
        folder, "under-test", "etp", arguments, variables, folder / log, copied_process, port=port
    ) as running:
        running.wait()
        yield running


def kill(running: RunningServer) -> None:
    """The server and all that it has started, as when its machine is lost."""
    os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait(60)


def test_a_training_outlives_its_engine_and_takes_it_back_or_ends_with_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_byte_tokenizer(tmp_path, VOCABULARY - 1)
    port = free_port()
    with server(tmp_path, port, "first.log") as first, training(tmp_path / "continuing", first.url) as running:
        running.wait_for(running.sent)
        kill(first)
        running.wait_for(lambda: "is left out until it answers again, and training goes on" in running.output)
        lost = running.iteration
        running.wait_for(lambda: running.iteration >= lost + 3 * INTERVAL)
        before = running.sent()
        assert running.output.count("no engine answers; weights are sent to nobody") == 1
        with server(tmp_path, port, "second.log") as second:
            running.wait_for(lambda: len(running.sent()) > len(before) + 1)
            assert f"refit: {second.url} answers again, and takes part" in running.output
            assert running.end() == [0] * RANKS
            log = (tmp_path / "second.log").read_text()
            for version in running.sent()[len(before) :]:
                assert f"refit: version {version} of the trainer at 127.0.0.1:" in log
            check_stop(tmp_path, second)


def check_stop(folder: Path, engine: RunningServer) -> None:
    saved = folder / "saved"
    flags = ("--refit-on-failure", "stop", "--save", str(saved), "--save-interval", "100000", "--refit-wait")
    with training(folder / "stopping", engine.url, *flags) as running:
        running.wait_for(running.sent)
        kill(engine)
        assert running.statuses() == [1] * RANKS
        assert "refit: the run ends, as an engine failed (--refit-on-failure stop)" in running.output
        iteration = int((saved / "latest_checkpointed_iteration.txt").read_text())
        assert iteration == running.iteration
        assert iteration % INTERVAL == 0
        assert iteration <= running.sent()[-1] + 2 * INTERVAL


def test_a_training_whose_engines_cannot_be_reached_ends_with_one_line(tmp_path: Path) -> None:
    with socket.socket() as gone:
        # Nobody listens, and it is kept: one of the many ports that process groups listen on could be the same.
        gone.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
        with training(tmp_path / "lonely", url) as running:
            assert running.statuses() == [1] * RANKS
            said = (tmp_path / "lonely" / "rank0.txt").read_text() + running.output
            assert f"\nerror: cannot start the refit: cannot reach {url}: " in said
            assert "Traceback" not in said
