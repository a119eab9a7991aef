"""An engine behind a client of vLLM's contract: in which order it is called, and when a version gets its label."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from megatron_patches.refit.control.http_calls import HttpCalls
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.trainer.contract_engine import ContractEngine, GuardedSyncClient
from megatron_patches.refit.trl import EtpWeightTransfer
from tests.multiproc import bodies_trl as bodies
from tests.multiproc.test_trl_transfer import sync, tensors
from tests.support.plain_engine import PlainEngine, running

pytestmark = [pytest.mark.multiproc, pytest.mark.cpu_only("the engine of these tests keeps weights in host memory")]


class Client:
    """Passes the calls on to an engine of tests.

    Attributes:
        phases: the calls, in order.
        refuses: whether the engine votes down what it is to commit.
    """

    def __init__(self, engine: PlainEngine) -> None:
        self._engine = engine
        self.phases: list[str] = []
        self.refuses = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.phases.append(init_info["call"])
        if init_info["call"] == "admit":  # of a worker
            return
        if init_info["call"] != "commit":
            self._engine.call(init_info)
            return
        if self.refuses:
            self._engine.call({"call": "abandon"})
        self._engine.commit(init_info["version"], reset_cache=False)

    def start_weight_update(self) -> None:
        self.phases.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.phases.append("update")
        self._engine.call({"call": "receive", **update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.phases.append(f"finish {weight_version}")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[PlainEngine]:
    with running("engine", tmp_path) as one:
        yield one


def test_a_version_is_labelled_once_it_serves_and_never_if_it_is_voted_down(engine: PlainEngine) -> None:
    client = Client(engine)
    behind = ContractEngine(client, 1)
    transfer = EtpWeightTransfer([behind], options=bodies.OPTIONS)
    behind.end_update()
    sync(transfer, tensors())
    behind.end_update()
    assert client.phases == ["join", "record", "start", "update", "commit", "finish 1"]
    client.phases.clear()
    client.refuses = True
    with pytest.raises(PartyFailedError, match="version 2 has not been received"):
        sync(transfer, tensors(2.0))
    behind.end_update()
    assert engine.run("content") == (1, bodies.content(tensors()))
    assert client.phases == ["start", "update", "commit", "abandon", "finish None"]
    client.refuses = False
    transfer.destroy()
    sync(transfer, tensors(3.0))
    assert engine.run("content") == (3, bodies.content(tensors(3.0)))
    assert client.phases[-1] == "finish 3"
    transfer.destroy()


def test_a_ray_actor_which_has_no_guard_is_told_to_admit_the_trainer(engine: PlainEngine) -> None:
    client = Client(engine)
    behind = ContractEngine(client, 1, "Ray actor 07")
    transfer = EtpWeightTransfer([behind], options=bodies.OPTIONS)
    sync(transfer, tensors())
    assert behind.name == "Ray actor 07"
    assert client.phases[:3] == ["admit", "join", "record"]
    transfer.destroy()


def test_a_client_that_never_answers_is_given_up_and_not_called_before_it_has_answered() -> None:
    class Hanging(Client):
        def __init__(self) -> None:
            self.phases, self.answers = [], Event()

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            self.phases.append(init_info["call"])
            self.answers.wait(30)

    client = Hanging()
    behind = ContractEngine(client, 1, "Ray actor 07", timeout_s=0.2)
    why = r"Ray actor 07 gave no answer to init_weight_transfer_engine \(commit\) within 0.2 s; .* raise timeout_s"
    with pytest.raises(RefitError, match=why):
        behind.commit(7, reset_cache=False)
    with pytest.raises(RefitError, match="Ray actor 07 has not answered an earlier call yet"):
        behind.set_weight_version(7)
    assert client.phases == ["commit"]
    client.answers.set()
    deadline = time.monotonic() + 10
    while True:  # until the late answer is there
        try:
            behind.set_weight_version(7)
        except RefitError:
            assert time.monotonic() < deadline
        else:
            break
    assert client.phases == ["commit", "finish 7"]


def test_nobody_waits_for_the_workers_of_an_actor_that_is_dead() -> None:
    class Dead(Client):
        def __init__(self) -> None:
            """Of no engine."""

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            raise RefitError(f"{init_info['call']}: The actor died")

    transfer = EtpWeightTransfer([ContractEngine(Dead(), 1, "Ray actor 07")], options=bodies.OPTIONS)
    began = time.monotonic()
    with pytest.raises(PartyFailedError, match="admit: The actor died"):
        sync(transfer, tensors())
    assert time.monotonic() - began < 5
    transfer.destroy()


def test_a_guarded_server_is_called_as_vllm_documents_its_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, object]] = []

    def note(_: HttpCalls, method: str, route: str, body: object = None) -> dict[str, Any]:
        asked.append((method, route, body))
        return {}

    monkeypatch.setattr(HttpCalls, "call", note)
    client = GuardedSyncClient("http://10.0.0.5:8000/")
    client.init_weight_transfer_engine({"call": "join"})
    client.start_weight_update()
    client.update_weights({"version": 7})
    client.finish_weight_update("7")
    client.finish_weight_update()
    assert asked == [
        ("POST", "init_weight_transfer_engine", {"init_info": {"call": "join"}}),
        ("POST", "start_weight_update", None),
        ("POST", "update_weights", {"update_info": {"version": 7}}),
        ("POST", "finish_weight_update", {"weight_version": "7"}),
        ("POST", "finish_weight_update", None),
    ]
    assert ContractEngine(client, 4).name == "http://10.0.0.5:8000"
