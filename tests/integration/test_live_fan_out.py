"""A vLLM engine that starts late takes the version that another one serves, and has the bits of a fresh engine."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_patches.refit.control.messages import State
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.trainer.session import RefitOptions, RefitSession
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


class Told(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def late_body(rank: int, world_size: int, case: Case, addresses: list[str]) -> list[Any]:
    """What a late engine holds: after it took model 2 from the first one, after model 1, and after a push of model 2.

    With the state and version in which it was when it had taken model 1, or could not, and the trainer's log.
    """
    del rank, world_size
    told, logger = Told(), logging.getLogger("megatron_patches.refit.trainer.subscription")
    logger.addHandler(told)
    logger.setLevel(logging.WARNING)  # a command that ran in this process before may have silenced the package
    chunks = start(case)
    first, late = (Named(name, address) for name, address in zip(("first", "late"), addresses, strict=True))
    options = RefitOptions(staging_bytes=STAGING, timeout_s=150.0, fan_out=True)
    pushing = RefitSession(chunks, [first], vocab_size=int(str(case.config["vocab_size"])), options=options)
    asking, found = VllmConnection(addresses[1]), list[Any]()
    with contextlib.closing(pushing):
        pushing.prepare()
        for version, seed in ((1, 2), (2, 1)):
            fill(case, chunks, seed)
            pushing.push(version)
            fill(case, chunks, 3)  # the trainer no longer has what the engine serves
            pushing.attach(late)
            while True:
                standing = pushing.state()["late"]
                may_come = bool(json.loads(pushing.candidates())["sources"])
                if standing.state is State.READY and (standing.version == version or not may_come):
                    break
                time.sleep(0.05)  # the whole run has a time-out
            found.append((asking.parameters(), asking.log_probabilities(PROMPTS)))
            if seed == 2:
                pushing.detach("late")
        fill(case, chunks, 2)
        pushing.push(3)
        found.append((asking.parameters(), asking.log_probabilities(PROMPTS)))
    return [(standing.state, standing.version), *found, told.messages]


def run(config: dict[str, object], folder: Path, *, workers: int, **options: Any) -> tuple[list[Any], Any, str]:
    """What :func:`late_body` found, what the late engine held of model 1 when it was fresh, and the trainer's log."""
    checkpoint = folder / "model_1"
    run_megatron(export_body, 1, args=(Case(TrainerMesh(), (), config), 1, str(checkpoint)))
    spread: tuple[dict[str, Any], dict[str, Any]] = ({"load_format": "dummy", "tensor_parallel_size": workers}, {})
    with contextlib.ExitStack() as stack:
        hosts = []
        for name, how in zip(("first", "late"), spread, strict=True):
            (place := folder / name).mkdir()
            hosts.append(stack.enter_context(VllmHost(checkpoint, place, **how, **options)))
        _, late = (host.connect() for host in hosts)
        fresh = late.parameters(), late.log_probabilities(PROMPTS)
        case = Case(TrainerMesh(), (), config)
        *found, told = run_megatron(late_body, 1, args=(case, [host.address for host in hosts]), timeout_s=400)[0]
    return found, fresh, "\n".join(told)


def test_an_engine_takes_versions_from_the_two_workers_of_another(tmp_path: Path) -> None:
    (standing, other, same, pushed), fresh, _ = run(LLAMA, tmp_path, workers=2)
    assert standing == (State.READY, 2)
    assert other != fresh
    assert same == fresh
    assert pushed == other


def test_an_engine_that_keeps_a_weight_in_another_form_sends_nothing(tmp_path: Path) -> None:
    (standing, other, same, pushed), fresh, log = run(NEMOTRON_H, tmp_path, workers=1, **OPTIONS["nemotron_h"])
    assert standing[1] == -1  # it does not even try
    assert other == same == fresh
    assert "first sends nothing to other engines: engine worker 0" in log
    assert "cannot send what it serves: it keeps model.layers.0.mixer.A as float32, computed from the bfloat16" in log
    assert pushed != fresh
