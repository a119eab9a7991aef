"""``refit check`` as a user runs it: a checkpoint, a server of random weights, and whether they agree afterwards."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_patches.refit.__main__ import main
from megatron_patches.refit.checkpoints import checkpoint_model
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.tools.check_command import Agreement
from tests.integration.checkpoint_families import save_body
from tests.integration.tiny_models import QWEN3
from tests.support.launch import run_megatron
from tests.support.program import run_program
from tests.support.vllm_server import VllmServer, vllm_server

pytestmark = pytest.mark.timeout(600)
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

ROW = re.compile(r"│ (before|after) +│ +(\d+) │ +(\S+) │ +(\S+) │ +(\S+) │")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    run_megatron(save_body, 2, args=([("qwen3", TrainerMesh(etp=2), 1)], str(folder)), timeout_s=180)
    return folder / "qwen3-1" / "saved"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with vllm_server(QWEN3, tmp_path_factory.mktemp("server")) as started:
        yield started


def check(saved: Path, server: VllmServer, *flags: str) -> tuple[int, dict[str, list[float]], str]:
    """Status; tokens, KL, mean and largest difference before and after; and the last line of what it said."""
    done = run_program(
        *("-m", "megatron_patches.refit", "check", "--load", str(saved), "--engines", server.url, *flags),
        ranks=2,
        variables={"COLUMNS": "120"},
    )
    rows = {when: [float(value) for value in values] for when, *values in ROW.findall(done.stdout)}
    told = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("error: ", "trainer and"))]
    assert told, done.stdout + done.stderr
    return done.returncode, rows, told[0]


@needs_vllm
@pytest.mark.parametrize(
    ("version", "flags"), [(11, ["--etp-size", "2"]), (12, ["--pipeline-model-parallel-size", "2"])], ids=["etp", "pp"]
)
def test_after_a_push_trainer_and_engine_agree(saved: Path, server: VllmServer, version: int, flags: list[str]) -> None:
    status, rows, told = check(saved, server, *flags, "--version", str(version), "--seed", str(version))
    assert status == 0
    assert told == "trainer and 1 engine(s) agree"
    before, after = rows["before"], rows["after"]
    assert before[0] == after[0] == 16 * 32
    assert 0 <= after[1] < 1e-2  # both in bfloat16
    if version == 11:  # later ones find the weights that are pushed
        assert before[1] > 10 * after[1]


@needs_vllm
def test_what_does_not_agree_is_an_error(saved: Path, server: VllmServer) -> None:
    status, rows, told = check(saved, server, "--etp-size", "2", "--version", "13", "--most-kl", "0")
    assert status != 0
    assert rows["after"][1] > 0
    assert re.match(rf"error: KL\({server.url} \|\| trainer\) is \S+ after the push, more than --most-kl 0; ", told)


@pytest.mark.parametrize("word", ["push", "check"])
def test_servers_are_asked_before_a_model_is_built(
    saved: Path, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint_model, "build_chunks", lambda *_: pytest.fail("a model was built"))
    assert main([word, "--load", str(saved), "--engines", "http://127.0.0.1:9"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: cannot reach http://127.0.0.1:9: ")


def test_the_estimate_is_the_divergence() -> None:
    """Of a distribution of three tokens, for many samples: within four standard errors."""
    generator = torch.Generator().manual_seed(3)
    engine, trainer = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    exact = float((engine * (engine / trainer).log()).sum())
    drawn = torch.multinomial(engine, 200_000, replacement=True, generator=generator)
    ratio = (trainer / engine).double()
    spread = float((engine * (ratio - 1 - ratio.log() - exact) ** 2).sum())
    found = Agreement.of(engine.log()[drawn], trainer.log()[drawn])
    assert abs(found.kl - exact) < 4 * math.sqrt(spread / len(drawn))
    assert found.largest == pytest.approx(math.log(2.5), rel=1e-6)
    assert Agreement.of(engine, engine) == Agreement(3, 0.0, 0.0, 0.0)
