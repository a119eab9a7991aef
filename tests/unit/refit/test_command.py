"""What a command of several processes says before torchrun ends them."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_patches.refit import command
from megatron_patches.refit.__main__ import build_parser
from megatron_patches.refit.control.credentials import Credentials
from megatron_patches.refit.control.http_calls import HttpCalls
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.models.config_traits import dtype_of, family_from_config
from megatron_patches.refit.progress import Progress
from megatron_patches.refit.tools import check_command, import_command, push_command
from tests.integration.tiny_models import QWEN3
from tests.support.imports import ROOT

PROGRAM = """
import os, sys, time
from megatron_patches.refit.command import fail

rank = int(os.environ["RANK"])
time.sleep(0 if rank else 2)  # long after the other has failed
sys.exit(fail(ValueError(f"as rank {rank} has heard"), speaks=rank == 0, leads=rank == 0))
"""


@pytest.mark.slow
def test_the_reason_is_told_before_torchrun_ends_who_tells_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.count("error: as rank 0 has heard\n") == 1
    assert "as rank 1" not in ended.stderr


def run(word: str, *arguments: str) -> int:
    """A command's exit status; without what the program does to this process's warnings and loggers."""
    main = {"import": import_command.main, "push": push_command.main, "check": check_command.main}[word]
    return main(build_parser().parse_args([word, *arguments]))


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def work(_progress: Progress) -> str:
        raise KeyboardInterrupt

    assert command.run_together(work) == 130
    assert capsys.readouterr() == ("", "error: interrupted\n")


def test_an_import_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for save in ("/proc/saved", tmp_path / "file", tmp_path / "file" / "saved"):
        assert run("import", "--hf", str(tmp_path / "none"), "--save", str(save)) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --save {save}: ")
        assert line.endswith("; name a directory that can be written")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_import_into_the_checkpoint_itself_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert run("import", "--hf", str(tmp_path), "--save", f"{tmp_path}/../{tmp_path.name}") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: --save and --hf are both {tmp_path}/../{tmp_path.name}; name a new directory to write to"


def begin() -> None:
    raise RefitError("it has begun")


def test_an_import_without_room_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    needed = sum(map(math.prod, family_from_config(QWEN3).shapes().values())) * itemsize(dtype_of(QWEN3))
    usage = shutil.disk_usage(tmp_path)
    for free, why in ((needed - 1, "the weights take "), (needed, "has begun")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        monkeypatch.setattr(import_command, "patch_megatron", begin)
        assert run("import", "--hf", str(tmp_path), "--save", str(tmp_path / "saved")) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert why in line
        assert line.endswith("there; make room, or name another directory") is (free < needed)


def test_samples_that_a_virtual_pipeline_cannot_score_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--pipeline-model-parallel-size", "3", "--num-virtual-stages-per-pipeline-rank", "2"]
    options = build_parser().parse_args(["check", "--load", "none", "--engines", "http://127.0.0.1:9", *sizes])
    assert check_command.main(options) == 1
    assert capsys.readouterr().err == (
        "error: --samples is 16; a virtual pipeline needs a multiple of the 3 stages (--pipeline-model-parallel-size)\n"
    )


@pytest.mark.parametrize(("most_kl", "status"), [(0.5, 0), (0.05, 1)])
def test_a_comparison_is_shown_once_no_bar_is_drawn_over_it(
    most_kl: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def bars(_shows: bool) -> Iterator[Progress]:
        try:
            yield Progress()
        finally:
            sys.stdout.write("bars\n")

    monkeypatch.setattr(command, "shown_progress", bars)
    before, after = check_command.Agreement(3, 0.7, 0.2, 0.3), check_command.Agreement(3, 0.1, 0.2, 0.3)
    monkeypatch.setattr(check_command, "_check", lambda *_: {"http://a": (before, after)})
    assert check_command.main(argparse.Namespace(most_kl=most_kl)) == status
    shown, said = capsys.readouterr()
    lines = shown.splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("│ http://a │")]
    assert [lines[number].split("│")[4].strip() for number in rows] == ["7.00e-01", "1.00e-01"]
    assert lines.index("bars") < rows[0]
    if status:
        assert said.startswith("error: KL(http://a || trainer) is 0.1 after the push, more than --most-kl 0.05; ")
    else:
        assert lines[-1] == "trainer and 1 engine(s) agree"


@pytest.mark.parametrize(
    ("word", "flag", "value", "message"),
    [
        ("push", "--version", "-1", "--version is -1; it must be at least 0"),
        ("check", "--seed", str(2**63), f"--seed is {2**63}; it must have 64 bits at most"),
        ("check", "--most-kl", "nan", "--most-kl is nan; it must be 0 or a positive number of nats"),
        ("check", "--most-kl", "-1", "--most-kl is -1.0; it must be 0 or a positive number of nats"),
    ],
)
def test_a_number_out_of_range_is_refused_at_once(
    word: str, flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(word, "--load", "none", "--engines", "http://127.0.0.1:9", flag, value) == 1
    assert capsys.readouterr().err == f"error: {message}\n"


class Answering(HttpCalls):
    """A server with given answers to requests for its models and for completions."""

    def __init__(self, models: dict[str, Any], completion: dict[str, Any]) -> None:
        super().__init__("http://a", 1.0, Credentials())
        self._answers = {"v1/models": models, "v1/completions": completion}

    def call(self, method: str, route: str, *_: object, **__: object) -> dict[str, Any]:  # noqa: ARG002 - all are alike
        return self._answers[route]


MODELS = {"data": [{"id": "some"}]}


def choice(index: int, **other: object) -> dict[str, object]:
    return {"index": index, "token_ids": [3, 4, 5], "logprobs": {"token_logprobs": [-1.5, -0.5, -2.0]}, **other}


def ask(models: dict[str, Any], *choices: dict[str, object]) -> check_command.Samples:
    options = argparse.Namespace(seed=1, samples=2, prompt_tokens=4, answer_tokens=3)
    return check_command._ask(Answering(models, {"choices": list(choices)}), 6, options)


def test_samples_are_the_prompts_with_their_answers() -> None:
    last = choice(1, token_ids=[0, 0, 1], logprobs={"token_logprobs": [-4.0, -5.0, -6.0]})
    samples = ask(MODELS, last, choice(0))
    assert [tokens[4:] for tokens in samples.tokens] == [[3, 4, 5], [0, 0, 1]]
    assert samples.log_probabilities == [[-1.5, -0.5, -2.0], [-4.0, -5.0, -6.0]]


@pytest.mark.parametrize(
    ("models", "choices", "message"),
    [
        ({}, [], "http://a/v1/models does not answer as a vLLM server does: .*`data`"),
        ({"data": []}, [], "http://a/v1/models does not answer as a vLLM server does: .*length >= 1"),
        (MODELS, [], "did not answer each of 2 prompts"),
        (MODELS, [choice(0)], "did not answer each of 2 prompts"),
        (MODELS, [choice(0), choice(0)], "did not answer each of 2 prompts"),
        (MODELS, [choice(0), choice(1, token_ids=[1])], "with 3 tokens .* and their log-probabilities"),
        (MODELS, [choice(0), choice(1, logprobs={"token_logprobs": [-1.0]})], "with 3 tokens"),
        (MODELS, [choice(0), choice(1, logprobs=None)], "does not answer as a vLLM server does: .*logprobs"),
        (MODELS, [choice(0), choice(1, token_ids=None)], "does not answer as a vLLM server does: .*token_ids"),
        (MODELS, [choice(0), choice(1, token_ids=[1, 2, 6])], "http://a wrote token 6, and .* has 6 tokens"),
        (MODELS, [choice(0), choice(1, token_ids=[1, 2, -1])], "http://a wrote token -1"),
    ],
)
def test_an_answer_that_is_none_is_refused_with_the_reason(
    models: dict[str, Any], choices: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(RefitError, match=message):
        ask(models, *choices)
