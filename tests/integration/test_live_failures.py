"""Whatever fails, and whenever: a live engine goes on with the weights it had, says why, and takes the next push."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.parties.terms import MemoryMode
from tests.integration.live_refit import (
    PROMPTS,
    Deaf,
    Unreachable,
    export_body,
    failing_in_place_body,
    killed_body,
    push_body,
    unreachable_body,
)
from tests.integration.tiny_models import QWEN3
from tests.support.launch import RanksFailedError, run_megatron
from tests.support.live_models import Case
from tests.support.vllm_host import VllmConnection, VllmHost

pytestmark = pytest.mark.timeout(600)
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

CASE = Case(TrainerMesh(etp=2), (), QWEN3)


@dataclass
class Engine:
    """An engine of two workers that serves model 2."""

    address: str
    connection: VllmConnection
    versions: Iterator[int]

    def state(self) -> tuple[list[dict[str, str]], list[list[float]]]:
        return self.connection.parameters(), self.connection.log_probabilities(PROMPTS)

    def push(self, seed: int) -> None:
        args = ([(CASE, next(self.versions))], self.address, (seed,))
        run_megatron(push_body, 2, args=args, timeout_s=120)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    args = (Case(TrainerMesh(), (), QWEN3), 2, str(folder / "checkpoint"))
    run_megatron(export_body, 1, args=args, timeout_s=180)
    # As it is for users: the other live tests have workers that are copies of one another.
    with VllmHost(folder / "checkpoint", folder, spawned=True, tensor_parallel_size=2) as host:
        yield Engine(host.address, host.connect(), itertools.count(1))


@needs_vllm
@pytest.mark.parametrize(
    ("victim", "phase"),
    [(victim, phase) for phase in ("describing", "planning", "linking", "sending") for victim in (1, 0)]
    + [(0, "committing")],
)
def test_a_killed_trainer_leaves_the_old_weights_and_no_wait(engine: Engine, victim: int, phase: str) -> None:
    before = engine.state()
    args = (CASE, engine.address, next(engine.versions), victim, phase)
    started = time.monotonic()
    with pytest.raises(RanksFailedError) as raised:
        run_megatron(killed_body, 2, args=args, timeout_s=120, fresh=True)
    assert time.monotonic() - started < 90
    kinds = {failure.rank: failure.kind for failure in raised.value.failures}
    assert kinds[victim] == "exit"
    assert engine.state() == before
    engine.push(1)
    assert engine.state() != before
    engine.push(2)
    assert engine.state() == before


@needs_vllm
@pytest.mark.parametrize("where", ["memory", "convert", "build", "apply"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_fails_keeps_both_workers_on_the_old_weights(engine: Engine, rank: int, where: str) -> None:
    before = engine.state()
    seed = 4 + rank
    engine.connection.sabotage(rank, where)
    with pytest.raises(RanksFailedError, match=r"sabotaged|was not taken"):
        engine.push(seed)
    assert engine.state() == before
    engine.push(seed)
    assert engine.state() != before
    engine.push(2)
    assert engine.state() == before


@needs_vllm
@pytest.mark.parametrize(("victim", "phase"), [(1, "sending"), (0, "sending"), (0, "committing")])
def test_a_trainer_killed_while_it_pushes_in_place_leaves_the_old_weights(
    engine: Engine, victim: int, phase: str
) -> None:
    before = engine.state()
    args = (CASE, engine.address, next(engine.versions), victim, phase, MemoryMode.IN_PLACE)
    with pytest.raises(RanksFailedError):
        run_megatron(killed_body, 2, args=args, timeout_s=120, fresh=True)
    if phase == "committing":
        # All is received, and nobody has said what to do with it. A server notices by its lease.
        assert engine.connection.parameters() != before[0]
        engine.connection.call({"call": "abandon"})
    assert engine.state() == before


@needs_vllm
def test_a_push_in_place_that_fails_puts_the_version_back_that_was_pushed_before(engine: Engine) -> None:
    before = engine.state()
    sabotages = ((0, "memory"), (1, "verify"), (0, "convert"), (1, "replace"))
    args = (CASE, engine.address, next(engine.versions), sabotages)
    held, reasons = run_megatron(failing_in_place_body, 2, args=args, timeout_s=240)[0]
    assert len(reasons) == len(sabotages)
    assert all("sabotaged" in reason or "was not taken" in reason for reason in reasons)
    assert held[0] != before[0]
    assert held[1:-1] == [held[0]] * len(sabotages)
    assert held[-1] == before[0]
    assert engine.state() == before


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Unreachable, "cannot reach http://127.0.0.1:"), (Deaf, "1 of the workers of http://127.0.0.1:")],
)
def test_an_engine_that_cannot_be_reached_ends_the_preparation_of_all_ranks_at_once(
    kind: type[Unreachable], message: str
) -> None:
    for seconds, reason in run_megatron(unreachable_body, 2, args=(CASE, kind), timeout_s=120):
        assert seconds < 60  # the time-out of a step is 300
        assert message in reason
