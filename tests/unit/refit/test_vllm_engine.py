"""What vLLM's workers call: whatever comes, nothing is raised that would leave other workers' answers unread."""

from __future__ import annotations

import importlib.util
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from megatron_patches.refit.errors import RefitError

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from megatron_patches.refit.control.messages import State
from megatron_patches.refit.vllm import all_or_none, patches
from megatron_patches.refit.vllm import engine as engine_module
from megatron_patches.refit.vllm.engine import EtpWeightTransferEngine
from megatron_patches.refit.vllm.refit_call import RefitCall
from megatron_patches.refit.vllm.worker import RefitWorker

FIRST, SECOND = "1" * 64, "2" * 64
JOIN = {"host": "10.0.0.5", "port": 1, "timeout_s": 1.0, "sources": 1}


def engine(workers: int, settings: dict[str, Any] | None = None) -> EtpWeightTransferEngine:
    parallel = SimpleNamespace(world_size=workers, rank=0)
    additional = {} if settings is None else {"etp": settings}
    config = SimpleNamespace(parallel_config=parallel, model_config=None, additional_config=additional)
    return EtpWeightTransferEngine(cast(Any, None), cast(Any, config), torch.device("cpu"), nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            {"call": "fly"},
            "call is 'fly'; it must be one of admit, join, record, receive, commit, abandon, relay, meet, leave",
        ),
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token", "secret"),
        ("token", "0" * 31 + "\n"),
        ("token", "0" * 64 + "\n"),
        ("token", "0" * 16 + "\r\nx-other: 1"),
        ("token", "A" * 64),
        ("host", "10.0.0.5\r\n"),
        ("host", "a b"),
        ("port", 0),
        ("port", 1 << 16),
        ("port", "80"),
        ("timeout_s", 0.0),
        ("timeout_s", 3601.0),
        ("timeout_s", float("inf")),
        ("timeout_s", float("nan")),
        ("sources", -1),
        ("version", -1),
        ("transport", "x" * 1000),
        ("linked", "yes"),
    ],
)
def test_a_call_of_another_form_is_refused(field: str, value: object) -> None:
    call = {"call": "join", "token": FIRST, **JOIN}
    engine(1).parse_init_info(call)
    with pytest.raises(ValueError, match="Invalid init_info"):
        engine(1).parse_init_info({**call, field: value})


def joins(under_test: EtpWeightTransferEngine, monkeypatch: pytest.MonkeyPatch, **call: object) -> bool:
    """Whether it joins a trainer that asks it to."""
    joined: list[RefitCall] = []

    def note(call: RefitCall, *_: object) -> None:
        joined.append(call)

    monkeypatch.setattr(engine_module, "Joining", note)
    content = {"call": "join", "token": FIRST, **JOIN, **call}
    under_test.init_transfer_engine(under_test.parse_init_info(content))
    return bool(joined)


class Meeting:
    """Notes what it is to send to other engines, or to take from them."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, int]] = []

    def relay(self, call: RefitCall) -> None:
        self.asked.append((call.version, call.key, call.first))

    meet = relay


@pytest.mark.parametrize("name", ["relay", "meet"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"token": SECOND}, "by another session than the one that this engine has joined since"),
        ({"host": "10.0.0.6"}, "asked to connect to a trainer at 10.0.0.6"),
    ],
)
def test_engines_meet_only_where_the_own_trainer_says(
    name: str, change: dict[str, Any], told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    under_test, session = engine(1, {"unguarded": True, "trainers": ["10.0.0.5"]}), Meeting()
    under_test._session, under_test._token = cast(Any, session), FIRST
    call = {"call": name, "token": FIRST, **JOIN, "sources": 2, "key": SECOND, "first": 1, "version": 7, **change}
    under_test.init_transfer_engine(under_test.parse_init_info(call))
    assert session.asked == ([(7, SECOND, 1)] if told is None else [])
    assert (told or "") in caplog.text
    with pytest.raises(ValueError, match=f"to {name}, a call names"):
        engine(1).parse_init_info({**call, "key": ""})


def test_no_trainer_is_joined_where_nobody_asks_who_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_test = engine(1)
    assert not joins(under_test, monkeypatch)
    assert "this server obeys whoever reaches it, so its workers join no trainer" in caplog.text
    under_test.init_transfer_engine(under_test.parse_init_info({"call": "admit"}))
    assert under_test.state() is None
    assert joins(under_test, monkeypatch)
    state = under_test.state()
    assert state is not None
    assert state.waits_for == ("the trainer at 10.0.0.5:1, or other workers, to agree on a plan",)
    assert joins(engine(1, {"unguarded": True}), monkeypatch)


def test_a_worker_tells_its_operator_what_a_refit_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``/collective_rpc`` asks it."""
    worker, under_test = RefitWorker(), engine(1, {"unguarded": True})
    worker.weight_transfer_engine = under_test
    assert worker.refit_state() is None
    assert joins(under_test, monkeypatch)
    log = under_test._log
    assert log is not None
    under_test._session = cast(Any, SimpleNamespace(awaited="a packet from any of source ranks [0, 3]"))
    for state, version, waits_for in (
        (State.READY, -1, ()),
        (State.SENDING, 7, ("a packet from any of source ranks [0, 3]",)),
        (State.COMMITTING, 7, ("the trainer at 10.0.0.5:1 to commit",)),
        (State.READY, 7, ()),
    ):
        log.enter(state, version)
        found = worker.refit_state()
        assert found is not None
        assert found.pop("seconds") < 5.0
        assert found == {"state": state.value, "version": version, "waits_for": waits_for}


@pytest.mark.parametrize(
    ("trainers", "call", "allowed"),
    [
        ([], {}, False),
        (["10.0.0.5"], {}, True),
        (["10.0.0.6"], {}, False),
        (["192.168.0.0/16", "10.0.0.0/24"], {}, True),
        (["10.0.0.0/30"], {}, False),
        (["10.0.0.5"], {"host": "trainer-0"}, False),
        (["Trainer-0"], {"host": "trainer-0"}, True),
        (["trainer-0"], {"host": "TRAINER-1"}, False),
        (["fd00::1"], {"host": "fd00::1"}, True),
        (["fe80::1%eth0"], {"host": "fe80::1%eth0"}, True),
        (["fd00::/64"], {"host": "fd00::1"}, True),
        (["fd00::/64"], {}, False),
    ],
)
def test_an_engine_connects_to_no_trainer_but_those_that_its_operator_has_named(
    trainers: list[str],
    call: dict[str, object],
    allowed: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    under_test = engine(1, {"unguarded": True, "trainers": trainers})
    assert joins(under_test, monkeypatch, **call) == allowed
    assert ("which is not among those that this engine was started with" in caplog.text) != allowed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer": ["a"]}, "unknown field `trainer`"),
        ({"trainers": "10.0.0.5"}, "Expected `array"),
        ({"trainers": ["10.0.0.5/8"]}, "has host bits set"),
        ({"trainers": ["trainer-0:29600"]}, "'trainer-0:29600' must be like .*; trainers choose their ports"),
        ({"trainers": [""]}, "must be like 10.0.0.5"),
        ({"trainers": ["10.0.0.5, 10.0.0.6"]}, "'10.0.0.5, 10.0.0.6' must be like 10.0.0.5"),
        ({"trainers": ["[::1"]}, "must be like 10.0.0.5"),
        ({"unguarded": "yes"}, "Expected `bool`"),
        ({"nics": "mlx5_0;mlx5_1"}, "nics is 'mlx5_0;mlx5_1'; it must be auto, all, NICs"),
    ],
)
def test_settings_that_make_no_sense_stop_the_server(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RefitError, match=f"--additional-config: etp: .*{message}"):
        engine(1, settings)


def test_a_worker_uses_the_nics_that_its_operator_has_set() -> None:
    config = cast(Any, SimpleNamespace(additional_config={"etp": {"nics": "mlx5_0"}}))
    assert RefitCall(call="receive").links(config).nics == "mlx5_0"


@pytest.mark.parametrize("field", ["transport", "memory", "payload"])
def test_a_worker_does_not_begin_what_it_does_not_know(field: str) -> None:
    """The trainer is told so at once; for whoever has joined and then keeps silent it waits for the time-out."""
    with pytest.raises(ValueError, match=f"Invalid init_info: Invalid enum value 'pigeon' - at `.*{field}`"):
        engine(1).parse_init_info({"call": "join", **JOIN, field: "pigeon"})


class Session:
    """Notes what it is asked, while it is joined and afterwards."""

    version = 0

    def __init__(self) -> None:
        self.asked: list[str] = []

    def record(self) -> None:
        self.asked.append("record")

    def finish(self) -> Session:
        self.asked.append("finish")
        return self

    def receive(self, version: int, *_: object, key: str) -> None:
        assert not key
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
    monkeypatch.setattr(engine_module, "Joining", lambda *_: next(left))
    under_test = engine(1)

    def ask(call: str, token: str = "") -> None:
        content = {"call": call, "token": token, "version": 7, **JOIN}
        under_test.init_transfer_engine(under_test.parse_init_info(content))

    ask("admit")
    ask("join", FIRST)
    ask("join", SECOND)
    assert sessions[0].asked == ["end"]
    with caplog.at_level(logging.ERROR):
        for call in ("record", "receive", "commit", "abandon"):
            ask(call, FIRST)
    assert sessions[1].asked == []
    for call in ("record the layout", "receive version 7", "commit version 7"):
        assert f"asked to {call}, but by another session than the one that this engine" in caplog.text
    for call in ("record", "receive", "commit", "abandon"):
        ask(call, SECOND)
    ask("leave", FIRST)
    assert sessions[1].asked == ["record", "finish", "receive 7", "commit 7", "abandon"]
    ask("leave", SECOND)
    assert sessions[1].asked[5:] == ["end"]
    for call in ("record", "receive", "commit", "abandon", "leave"):
        ask(call, SECOND)
    assert len(sessions[1].asked) == 6
    assert "asked to commit version 7, but this engine has joined no session" in caplog.text


def test_what_needs_no_session_does_nothing() -> None:
    under_test = engine(1)
    under_test.init_transfer_engine(under_test.parse_init_info({"call": "abandon"}))
    under_test.shutdown()
    assert under_test.version == 0


def test_an_update_of_vllms_own_contract_receives_a_version_and_its_end_drops_what_was_not_committed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    under_test, session = engine(2), Session()
    under_test._session, under_test._token = cast(Any, session), FIRST
    under_test.start_weight_update()
    under_test.update_weights({"version": 7, "step": 3, "linked": True, "key": "", "token": FIRST})
    under_test.finish_weight_update()
    assert session.asked == ["receive 7", "abandon"]
    with caplog.at_level(logging.ERROR):
        under_test.update_weights({"names": ["lm_head.weight"]})  # nothing is raised: there is a second worker
    assert "Invalid init_info: unknown names" in caplog.text


class Worker:
    """The part of vLLM's worker that notes whether an update is open."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._weight_update_active = False

    def start_weight_update(self) -> None:
        assert not self._weight_update_active
        self._weight_update_active = True
        self.calls.append("start")

    def finish_weight_update(self) -> None:
        self._weight_update_active = False
        self.calls.append("finish")

    def shutdown_weight_transfer_engine(self) -> None:
        assert not self._weight_update_active
        self.calls.append("shutdown")


def test_an_update_that_was_left_open_ends_when_another_one_starts_or_the_trainer_is_released(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker import gpu_worker

    monkeypatch.setattr(gpu_worker, "Worker", Worker)
    for name in ("start_weight_update", "shutdown_weight_transfer_engine"):
        monkeypatch.setattr(Worker, name, getattr(Worker, name))  # to be put back
    patches.end_open_updates()
    patches.end_open_updates()
    worker = Worker()
    worker.start_weight_update()
    assert not caplog.text
    worker.start_weight_update()
    worker.finish_weight_update()
    worker.start_weight_update()
    assert worker.calls == ["start", "finish", "start", "finish", "start"]
    assert caplog.text.count("was started and never finished") == 1
    worker.shutdown_weight_transfer_engine()
    worker.shutdown_weight_transfer_engine()
    assert worker.calls[5:] == ["finish", "shutdown", "shutdown"]
