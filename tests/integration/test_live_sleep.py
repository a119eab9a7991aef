"""Versions for a server that sleeps: woken for them and left awake, put back to sleep, or refused.

vLLM has no sleep mode on CPUs; :mod:`tests.support.vllm_sleep` has what takes its place in a worker.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_patches.refit import Fate, OnEngineFailure, RefitOptions, WeightPublisher
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.trainer.engine_client import SleepMode
from megatron_patches.refit.trainer.engines import HttpEngine
from tests.integration.live_refit import PROMPTS, STAGING
from tests.integration.test_live_http import ANSWER, State, corrupt_next_packet, state_of
from tests.integration.test_live_kv_scales import fill, random_model
from tests.integration.test_live_modules import fresh
from tests.integration.tiny_models import LLAMA
from tests.support.vllm_server import VllmServer, complete, vllm_server

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(600),
]

EXTENSION = "tests.support.vllm_sleep.SleepingWorker"


class Publishing:
    """A trainer and a server, whose answers to model 1 and 2 are known.

    Args:
        server: the server.
        mode: what becomes of it if it sleeps.
        first: number of the first version.
        payload: what versions travel as.

    Attributes:
        nbytes: of the last version, as sent.
    """

    def __init__(
        self, server: VllmServer, mode: SleepMode, first: int, payload: PayloadKind = PayloadKind.WHOLE
    ) -> None:
        self.server, self.engine, self.version = server, HttpEngine(server.url), first
        self.model, self.nbytes = random_model(), 0
        options = RefitOptions(
            sleeping=mode,
            payload=payload,
            timeout_s=60.0,
            staging_bytes=STAGING,
            on_engine_failure=OnEngineFailure.RAISE,
        )
        self.publisher = WeightPublisher(self.model, options=options)
        self.publisher.attach(self.engine)

    def publish(self, seed: int) -> Fate:
        """Publishes a model. What became of it."""
        fill(self.model, seed)
        self.version += 1
        (report,) = self.publisher.publish(self.version).result(60.0).engines.values()
        self.nbytes = report.nbytes
        return report.fate

    def sleep(self, level: int) -> None:
        self.server.post(f"sleep?level={level}")
        assert self.engine.is_sleeping()

    def wake(self) -> None:
        for tag in ("weights", "kv_cache"):
            self.server.post(f"wake_up?tags={tag}")
        assert not self.engine.is_sleeping()


def test_a_server_that_sleeps_is_woken_put_back_or_refused(tmp_path: Path) -> None:
    model = random_model()
    fill(model, 2)
    model.save_pretrained(tmp_path / "model_2")
    states = {2: fresh(str(tmp_path / "model_2"), tmp_path / "fresh")}
    with vllm_server(LLAMA, tmp_path, "--worker-extension-cls", EXTENSION) as server, ThreadPoolExecutor(1) as asking:
        one = Publishing(server, SleepMode.REFUSE, 0)
        assert one.publish(1) is Fate.SERVES
        states[1] = state_of(server)
        assert states[1] != states[2]
        for level in (1, 2):  # it has joined awake, and then may not join asleep
            one.sleep(level)
            with pytest.raises(PartyFailedError, match=r"the engine sleeps, .*: POST /wake_up") as raised:
                one.publish(2)
            assert "\n" not in str(raised.value)
            assert one.engine.is_sleeping()
            one.wake()
            if level == 1:
                assert state_of(server) == states[1]
        one.publisher.close()

        one = Publishing(server, SleepMode.WAKE, 100)
        for level, seed in ((2, 2), (2, 1), (1, 2)):
            one.sleep(level)
            answer = asking.submit(complete, server.url, PROMPTS[0], ANSWER)
            assert one.publish(seed) is Fate.SERVES
            assert not one.engine.is_sleeping()
            assert answer.result(60.0).tokens == states[seed].tokens[0]
            assert state_of(server) == states[seed]

        one.sleep(2)
        corrupt_next_packet()
        with pytest.raises(PartyFailedError, match=r"DigestError.*sleeps on, with its weights awake: push again"):
            one.publish(1)
        assert one.engine.is_sleeping()  # its weights are of no version
        assert one.publish(1) is Fate.SERVES
        assert state_of(server) == states[1]
        one.publisher.close()

        one = Publishing(server, SleepMode.RESTORE, 200)
        for level, seed in ((2, 2), (1, 1)):
            one.sleep(level)
            assert one.publish(seed) is Fate.SERVES
            assert one.engine.is_sleeping()
            assert server.parameters() != states[seed].parameters
            one.wake()
            assert state_of(server) == states[seed]
        assert one.publish(2) is Fate.SERVES  # awake before, and after
        assert state_of(server) == states[2]
        one.publisher.close()

        push_deltas(server, states[1])


def push_deltas(server: VllmServer, serving: State) -> None:
    """Pushes what serves already. Sleep at level 2 discards what changes are relative to."""
    one = Publishing(server, SleepMode.WAKE, 300, PayloadKind.DELTA)
    assert one.publish(1) is Fate.SERVES
    whole = one.nbytes
    for level, sent in ((2, whole), (2, whole), (1, 0)):
        one.sleep(level)
        assert one.publish(1) is Fate.SERVES
        assert one.nbytes == sent
        assert not one.engine.is_sleeping()
        assert state_of(server) == serving
    one.publisher.close()
