"""One definition of the flags of a push: under both sets of names they have the same defaults and meaning."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from megatron_patches import refit_training
from megatron_patches.arguments import UnsupportedConfigurationError
from megatron_patches.refit.__main__ import main
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.layout.weight_format import WeightFormat
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.parties.terms import MemoryMode
from megatron_patches.refit.trainer.engine_client import PauseMode
from megatron_patches.refit.trainer.push_flags import add_flags, options_from
from megatron_patches.refit.trainer.session import OnEngineFailure, RefitOptions
from megatron_patches.refit.transports import nixl_agent
from megatron_patches.refit.transports.base import TransportName
from tests.integration.tiny_models import QWEN3

GIVEN = [
    *("transport", "tcp"),
    *("staging-bytes", "4096"),
    *("pause", "keep"),
    *("memory", "in_place"),
    *("payload", "delta"),
    *("weight-format", "fp8_block"),
    *("host", "10.0.0.7"),
    *("nics", "mlx5_0,eth0"),
    "allow-narrowing",
]
MEANT = RefitOptions(
    transport=TransportName.TCP,
    staging_bytes=4096,
    timeout_s=7.0,
    pause=PauseMode.KEEP,
    memory=MemoryMode.IN_PLACE,
    payload=PayloadKind.DELTA,
    weight_format=WeightFormat.FP8_BLOCK,
    host="10.0.0.7",
    allow_narrowing=True,
    nics="mlx5_0,eth0",
)
NAMES = {"transport", "staging-bytes", "pause", "memory", "payload", "weight-format", "host", "allow-narrowing", "nics"}


def flags(prefix: str) -> list[str]:
    return [f"--{prefix}{word}" if word in NAMES else word for word in GIVEN]


@pytest.mark.parametrize("prefix", ["", "refit-"])
def test_flags_are_the_options(prefix: str) -> None:
    parser = argparse.ArgumentParser()
    if prefix:  # a script's own flags are none of ours
        parser.add_argument("--host", default="elsewhere")
        parser.add_argument("--memory", default="much")
    add_flags(parser, prefix)
    assert options_from(parser.parse_args([]), RefitOptions().timeout_s, prefix) == RefitOptions()
    assert options_from(parser.parse_args(flags(prefix)), 7.0, prefix) == MEANT


def test_a_program_may_name_what_the_flags_name() -> None:
    named: dict[str, Any] = {"transport": "tcp", "pause": "keep", "memory": "in_place", "payload": "delta"}
    named["weight_format"] = "fp8_block"
    options = RefitOptions(
        staging_bytes=4096, timeout_s=7.0, host="10.0.0.7", allow_narrowing=True, nics="mlx5_0,eth0", **named
    )
    assert options == MEANT
    assert options.memory is MemoryMode.IN_PLACE
    assert options.payload is PayloadKind.DELTA
    assert options.pause is PauseMode.KEEP
    assert options.transport is TransportName.TCP
    for wrong in named:
        with pytest.raises(ValueError, match="'pigeon' is not a valid"):
            RefitOptions(**{**named, wrong: "pigeon"})


def test_the_transport_that_is_named_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nixl_agent, "is_installed", lambda: True)
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert options_from(parser.parse_args(["--transport", "auto"]), 7.0).transport is None
    for name in TransportName:
        assert options_from(parser.parse_args(["--transport", name.value]), 7.0).transport is name


@pytest.mark.parametrize(
    ("name", "why"),
    [("nixl", "nixl is not installed here: pip install nixl"), ("cuda_ipc", "cuda_ipc reads weights on a GPU")],
)
def test_a_transport_that_cannot_be_used_here_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, why: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(nixl_agent, "is_installed", lambda: False)
    parser = refit_training.add_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--refit-transport", name])
    with pytest.raises(UnsupportedConfigurationError, match=f"^--refit-transport: {why}.*, .*choose another transport"):
        refit_training.check(args)


def test_a_training_script_takes_them_with_their_prefix() -> None:
    parser = refit_training.add_arguments(argparse.ArgumentParser())
    args = parser.parse_args([*flags("refit-"), "--refit-timeout", "7"])
    # A training run goes on without engines that fail, unless it is told otherwise.
    assert refit_training.options_from_args(args) == replace(MEANT, on_engine_failure=OnEngineFailure.DROP)
    args = parser.parse_args([*flags("refit-"), "--refit-timeout", "7", "--refit-on-failure", "stop"])
    assert refit_training.options_from_args(args) == MEANT
    args = parser.parse_args([])
    assert refit_training.options_from_args(args) == RefitOptions(on_engine_failure=OnEngineFailure.DROP)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--refit-staging-bytes 4095", r"--refit-staging-bytes: staging_bytes is 4095; with less than 4096"),
        ("--refit-timeout 0", r"--refit-timeout: timeout_s is 0"),
        ("--refit-timeout -1", r"--refit-timeout: timeout_s is -1"),
        ("--refit-timeout inf", r"--refit-timeout: timeout_s is inf"),
        ("--refit-nics 0=mlx5_0,mlx5_1", r"--refit-nics: nics is '0=mlx5_0,mlx5_1'; it must be auto, all, NICs"),
        ("--refit-lag -1", r"--refit-lag: lag_s is -1"),
        ("--refit-fan-out-width 2", r"--refit-fan-out-width: fan_out_width is 2 and fan_out is False"),
        ("--refit-fan-out --refit-fan-out-width 0", r"--refit-fan-out-width: fan_out_width is 0 and fan_out is True"),
        ("--refit-lease 0.5", r"--refit-lease: lease_s is 0\.5"),
        ("--refit-host 0.0.0.0", r"--refit-host: host is 0\.0\.0\.0, to which engines cannot connect"),
        ("--refit-host ::", r"--refit-host: host is ::, to which engines cannot connect"),
        (
            "--refit-host not.a.host.invalid",
            r"--refit-host is not\.a\.host\.invalid, on which this machine cannot listen",
        ),
        (
            "--refit-host 192.0.2.1",
            r"--refit-host is 192\.0\.2\.1, on which this machine cannot listen \(Cannot assign",
        ),
        ("--refit-interval 0", r"--refit-interval is 0"),
        ("--refit-metrics-port x", r"--refit-metrics-port: 'x' is no address of metrics"),
        ("--refit-telemetry /", r"cannot append telemetry to /: Is a directory"),
        ("--refit-engines http://a http://a/", r"--refit-engines: engine URL http://a is given 2 times"),
        ("--refit-engines ftp://a", r"--refit-engines: engine URL 'ftp://a'"),
    ],
)
def test_a_training_script_refuses_what_no_push_could_work_with(words: str, message: str) -> None:
    parser = refit_training.add_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--refit-engines", "http://a", *words.split()])
    with pytest.raises(UnsupportedConfigurationError, match=message):
        refit_training.check(args)
    if "engines" not in words:  # nor may they wait for the day on which engines are given
        with pytest.raises(UnsupportedConfigurationError, match=message):
            refit_training.check(parser.parse_args(words.split()))


def test_another_ranks_machine_need_not_have_the_address_of_the_first() -> None:
    parser = refit_training.add_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--refit-host", "192.0.2.1"])
    args.rank = 1
    refit_training.check(args)


def test_a_push_names_its_own_flags() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    with pytest.raises(ValueError, match=r"^--staging-bytes: staging_bytes is 10;"):
        options_from(parser.parse_args(["--staging-bytes", "10"]), 7.0)


@pytest.mark.usefixtures("as_logged_before")
@pytest.mark.parametrize("command", ["push", "check"])
def test_minutes_are_refused_in_minutes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--load none --engines http://here:1 --timeout-minutes 90"
    assert main([command, *words.split()]) == 1
    assert capsys.readouterr().err.endswith("error: --timeout-minutes is 90; give a push at most 60\n")


@pytest.mark.parametrize(("interval", "load", "refused"), [(10, None, False), (11, None, True), (11, "there", False)])
def test_an_interval_that_no_step_ends_is_refused(interval: int, load: str | None, refused: bool) -> None:
    """A run that continues pushes what it has loaded."""
    parser = refit_training.add_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--refit-engines", "http://a", "--refit-interval", str(interval)])
    args.train_iters, args.load = 10, load
    with pytest.raises(UnsupportedConfigurationError, match="11, of --train-iters 10") if refused else nullcontext():
        refit_training.check(args)


@pytest.mark.parametrize(("published", "rows"), [(False, 250), (True, 256)])
def test_engines_have_the_rows_of_the_published_model_that_a_run_began_with(
    tmp_path: Path, published: bool, rows: int
) -> None:
    """Published models have more rows than their tokenizers have tokens, and engines that serve them have all."""
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "vocab_size": 256}))
    load_hf = str(tmp_path) if published else None
    args = argparse.Namespace(load_hf=load_hf, tokenizer_type="NullTokenizer", vocab_size=250)
    assert refit_training._vocab_size(args) == rows


class Pushing(refit_training.Pusher):
    """Notes what it is asked, and pushes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def finish(self) -> None:
        self.asked.append("finish")

    def end(self) -> None:
        self.asked.append("end")


@pytest.mark.parametrize(
    ("outcome", "asked"), [(None, ["finish"]), (SystemExit(0), ["end"]), (KeyError("lost"), list[str]())]
)
def test_whoever_leaves_the_training_loop_in_order_lets_the_last_commit_end(
    outcome: BaseException | None, asked: list[str]
) -> None:
    def train() -> int:
        if outcome is not None:
            raise outcome
        return 7

    pushing = Pushing()
    _, record = refit_training.records(pushing)
    with pytest.raises(type(outcome)) if outcome is not None else nullcontext():
        assert record.replace(train)() == 7
    assert pushing.asked == asked


@pytest.mark.parametrize(
    ("iteration", "finetune", "load_hf", "load", "pushed"),
    [
        (0, False, None, None, []),
        (0, False, None, "empty", []),
        (0, False, None, "release", [0]),
        (0, True, None, "release", [0]),
        (4, False, None, "release", [4]),
        (0, False, "/model", None, [0]),
    ],
)
def test_what_a_run_has_loaded_is_pushed_before_its_first_step(
    iteration: int,
    finetune: bool,
    load_hf: str | None,
    load: str | None,
    pushed: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A release, such as `refit import` writes, is loaded without ``--finetune`` and begins at step 0."""
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "latest_checkpointed_iteration.txt").write_text("release")
    found: list[int] = []
    folder = None if load is None else str(tmp_path / load)
    args = argparse.Namespace(refit_engines=["http://a"], finetune=finetune, load_hf=load_hf, load=folder)
    pusher = refit_training.Pusher()
    monkeypatch.setattr(refit_training, "_args", lambda: args)
    monkeypatch.setattr(pusher, "_open", lambda *_: object())
    monkeypatch.setattr(pusher, "_push", found.append)
    for step in (iteration, iteration + 1):
        pusher.before_step([], step)
    assert found == pushed


def test_a_run_that_meets_no_engine_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: object) -> None:
        raise PartyFailedError("cannot start the refit: cannot reach http://a: Connection refused")

    args = argparse.Namespace(refit_engines=["http://a"], finetune=False)
    monkeypatch.setattr(refit_training, "_args", lambda: args)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    pushing = refit_training.Pusher()
    monkeypatch.setattr(pushing, "_open", unreachable)
    with pytest.raises(SystemExit) as raised:
        pushing.before_step([], 0)
    assert raised.value.code == 1
    assert capsys.readouterr().err == "error: cannot start the refit: cannot reach http://a: Connection refused\n"


QUIET = ("megatron", "megatron_patches", "megatron_patches.cpu", "torch.utils.cpp_extension")


@pytest.fixture
def as_logged_before() -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in QUIET}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.usefixtures("as_logged_before")
@pytest.mark.parametrize("command", ["push", "check"])
def test_commands_silence_imports_and_show_warnings_of_refit(command: str, tmp_path: Path) -> None:
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.NOTSET)
    assert main([command, "--load", str(tmp_path / "none"), "--engines", "http://here:1"]) == 1
    assert not logging.getLogger("megatron.core").isEnabledFor(logging.WARNING)
    assert not logging.getLogger("megatron_patches.cpu").isEnabledFor(logging.WARNING)
    assert logging.getLogger("megatron_patches.refit.trainer.fan_out").isEnabledFor(logging.WARNING)
