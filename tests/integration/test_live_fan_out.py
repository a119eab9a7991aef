"""A vLLM engine that starts late takes the version that another one serves, and has the bits of a fresh engine."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_patches.refit.parties.messages import State
from megatron_patches.refit.session import RefitOptions, RefitSession
from megatron_patches.refit.source.mesh import TrainerMesh
from tests.integration.live_refit import PROMPTS, STAGING, export_body, fill, start
from tests.integration.tiny_models import LLAMA, NEMOTRON_H
from tests.support.launch import run_megatron
from tests.support.live_models import Case
from tests.support.vllm_host import VllmConnection, VllmHost

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(600),
    pytest.mark.slow,
]
OPTIONS = {"nemotron_h": {"worker_extension_cls": "tests.support.vllm_mamba.CpuKernels"}}


class Named(VllmConnection):
    """An engine with a name of its own."""

    def __init__(self, name: str, address: str) -> None:
        super().__init__(address)
        self.name = name


def late_body(rank: int, world_size: int, case: Case, addresses: list[str]) -> list[Any]:
    """Pushes model 2 and model 1 to one engine; the other one takes model 1 from it, and both model 2 in a push."""
    del rank, world_size
    chunks = start(case)
    first, late = (Named(name, address) for name, address in zip(("first", "late"), addresses, strict=True))
    options = RefitOptions(staging_bytes=STAGING, timeout_s=150.0, fan_out=True)
    pushing = RefitSession(chunks, [first], vocab_size=int(str(case.config["vocab_size"])), options=options)
    found: list[Any] = []
    with contextlib.closing(pushing):
        pushing.prepare()
        for version, seed in ((1, 2), (2, 1)):
            fill(case, chunks, seed)
            pushing.push(version)
        fill(case, chunks, 3)  # the trainer no longer has what the engine serves
        pushing.attach(late)
        deadline = time.monotonic() + 150.0
        while pushing._fan_out is not None and pushing._fan_out.is_bringing(late):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        standing = pushing.state().get("late")
        asking = [VllmConnection(address) for address in addresses]
        found.append(standing is not None and (standing.state, standing.version))
        found.append((asking[1].parameters(), asking[1].log_probabilities(PROMPTS)))
        fill(case, chunks, 2)
        for version in (3, 4):  # it joins during the first
            pushing.push(version)
            while pushing.state()["late"].state is State.JOINING:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        found.append([(one.parameters(), one.log_probabilities(PROMPTS)) for one in asking])
    return found


def run(config: dict[str, object], folder: Path, **options: Any) -> tuple[list[Any], Any, str]:
    """What :func:`late_body` found, what the first engine held when it was fresh, and the log of the first engine."""
    checkpoint = folder / "model_1"
    run_megatron(export_body, 1, args=(Case(TrainerMesh(), (), config), 1, str(checkpoint)))
    places = [folder / "first", folder / "late"]
    with contextlib.ExitStack() as stack:
        hosts = []
        for place, how in zip(places, ("auto", "dummy"), strict=True):
            place.mkdir()
            hosts.append(stack.enter_context(VllmHost(checkpoint, place, load_format=how, **options)))
        connections = [host.connect() for host in hosts]
        fresh = connections[0].parameters(), connections[0].log_probabilities(PROMPTS)
        case = Case(TrainerMesh(), (), config)
        found = run_megatron(late_body, 1, args=(case, [host.address for host in hosts]), timeout_s=400)[0]
    return found, fresh, (places[0] / "host.log").read_text()


def test_an_engine_takes_a_version_from_another(tmp_path: Path) -> None:
    (standing, after, both), fresh, _ = run(LLAMA, tmp_path)
    assert standing == (State.READY, 2)
    assert after == fresh
    assert both[0] == both[1]
    assert both[0] != fresh


def test_an_engine_that_keeps_a_weight_in_another_form_sends_nothing(tmp_path: Path) -> None:
    (standing, after, both), fresh, log = run(NEMOTRON_H, tmp_path, **OPTIONS["nemotron_h"])
    assert standing is False
    assert after != fresh
    assert "cannot send what it serves: it keeps model.layers.0.mixer.A as float32, computed from the bfloat16" in log
    assert both[0] == both[1]  # it joined at the next push
    assert both[0] != fresh
