"""What vLLM's workers call: whatever comes, nothing is raised that would leave other workers' answers unread."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.rendezvous import Rendezvous

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from megatron_patches.refit.vllm import all_or_none
from megatron_patches.refit.vllm import engine as engine_module
from megatron_patches.refit.vllm.engine import EtpWeightTransferEngine
from megatron_patches.refit.vllm.joining import join
from megatron_patches.refit.vllm.refit_call import RefitCall
from megatron_patches.refit.vllm.worker_session import ServingModel


def engine(workers: int) -> EtpWeightTransferEngine:
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=workers), model_config=None)
    return EtpWeightTransferEngine(cast(Any, None), cast(Any, config), torch.device("cpu"), nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"call": "fly"}, "call is 'fly'; it must be one of join, receive, commit, abandon"),
        ({"call": "receive", "version": 1}, "this engine has joined no session"),
        ({"call": "commit", "version": 1}, "asked to commit version 1, but this engine has joined no session"),
    ],
)
def test_a_call_that_cannot_be_carried_out_is_logged(
    call: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_or_none, "get_world_group", lambda: SimpleNamespace(world_size=1))
    under_test = engine(1)
    with caplog.at_level(logging.ERROR):
        under_test.init_transfer_engine(under_test.parse_init_info(call))
    assert f"refit: {call['call']} failed; version 0 serves on" in caplog.text
    assert message in caplog.text


@pytest.mark.parametrize("call", [{"call": "join", "novelty": 1}, {}])
def test_a_call_of_another_version_of_the_package_is_refused(
    call: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="Invalid init_info"):
        engine(1).parse_init_info(call)
    under_test = engine(2)
    with caplog.at_level(logging.ERROR):
        under_test.init_transfer_engine(under_test.parse_init_info(call))
    assert "Invalid init_info" in caplog.text


@pytest.mark.parametrize(("field", "value"), [("transport", "pigeon"), ("memory", "elsewhere")])
def test_a_worker_that_does_not_know_what_it_is_asked_for_does_not_join(field: str, value: str) -> None:
    """The trainer is told so at once; for whoever has joined and then keeps silent it waits for the time-out."""
    rendezvous = Rendezvous(1, 60.0)
    try:
        call = {"call": "join", **asdict(rendezvous.invitation), field: value}
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = SimpleNamespace(parallel_config=parallel)
        serving = ServingModel(nn.Linear(1, 1), cast(Any, config), torch.device("cpu"))
        with pytest.raises(ValueError, match=value):
            join(RefitCall(**cast(Any, call)), serving, 0)
        with pytest.raises(RefitError, match="1 of the workers of it did not join"):
            rendezvous.check_joined([0], "it")
    finally:
        rendezvous.close()


class Session:
    """Notes what it is asked."""

    version = 0

    def __init__(self) -> None:
        self.asked: list[str] = []

    def receive(self, version: int, *_: object) -> None:
        self.asked.append(f"receive {version}")

    def commit(self, version: int) -> None:
        self.asked.append(f"commit {version}")

    def abandon(self) -> None:
        self.asked.append("abandon")

    def end(self) -> None:
        self.asked.append("end")


def test_what_another_trainer_asks_disturbs_no_session(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for joining, which ends it."""
    sessions = [Session(), Session()]
    left = iter(sessions)
    monkeypatch.setattr(all_or_none, "get_world_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(engine_module, "join", lambda *_: next(left))
    under_test = engine(1)

    def ask(call: str, token: str = "") -> None:
        under_test.init_transfer_engine(under_test.parse_init_info({"call": call, "token": token, "version": 7}))

    ask("join", "first")
    ask("join", "second")
    assert sessions[0].asked == ["end"]
    with caplog.at_level(logging.ERROR):
        for call in ("receive", "commit", "abandon"):
            ask(call, "first")
    assert sessions[1].asked == []
    for call in ("receive", "commit"):
        assert f"asked to {call} version 7, but by another session than the one that this engine" in caplog.text
    for call in ("receive", "commit", "abandon"):
        ask(call, "second")
    ask("abandon")  # by whoever looks after an engine whose trainer has died
    assert sessions[1].asked == ["receive 7", "commit 7", "abandon", "abandon"]


def test_what_needs_no_session_does_nothing() -> None:
    under_test = engine(1)
    under_test.init_transfer_engine(under_test.parse_init_info({"call": "abandon"}))
    under_test.shutdown()
    assert under_test.version == 0
