"""A trainer pushes over HTTP into a server of any supported release of vLLM, each in an environment of its own.

The server starts with random weights. After a push it must hold the bits of an engine that has loaded the same weights
from their export, and answer with the same tokens and probabilities; after one whose bytes were changed on the way, it
holds and answers what it did before. ``--engine-python`` names the interpreter of another environment.
"""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.memory.packets import Packet
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.parties.terms import MemoryMode
from megatron_patches.refit.trainer.engines import HttpEngine
from megatron_patches.refit.trainer.session import RefitOptions, RefitSession
from megatron_patches.refit.transports.base import Check
from megatron_patches.refit.transports.sending import SendingEnd, StagingSlot
from tests.integration.live_refit import PROMPTS, STAGING, export_all_body, fill, start
from tests.integration.tiny_models import QWEN2, QWEN3, QWEN3_MOE
from tests.support.launch import run_megatron
from tests.support.live_models import Case
from tests.support.prepared import engine_release
from tests.support.vllm_digests import EXTENSION
from tests.support.vllm_host import VllmHost
from tests.support.vllm_server import VllmServer, complete, vllm_server

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(600),
]

# vLLM takes the width of Qwen2's heads from their number, and has kernels for CPUs from 32 on.
BIASES = QWEN2 | {"num_attention_heads": 2, "num_key_value_heads": 2}
CONFIGS = {"qwen2_with_biases": BIASES, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE}
CASES = [("qwen2_with_biases", 1), ("qwen3", 1), ("qwen3", 2), ("qwen3_moe", 1), ("qwen3_moe", 2)]
if engine_release() == "0.26.0":  # with which other tests do more, over other ways
    CASES = CASES[-1:]
ANSWER = 6


class State(NamedTuple):
    """What an engine holds and answers."""

    parameters: list[dict[str, str]]
    probabilities: list[list[float]]
    tokens: list[list[int]]


def state_of(server: VllmServer) -> State:
    tokens = [complete(server.url, prompt, ANSWER).tokens for prompt in PROMPTS]
    return State(server.parameters(), server.log_probabilities(PROMPTS), tokens)


def push_body(
    rank: int, world_size: int, case: Case, url: str, versions: tuple[int, int], memory: MemoryMode
) -> tuple[str, State | None, State | None]:
    """Pushes model 1, fails to push model 2, and pushes it again: why it failed, and what was served before and after.

    ``versions`` are those of model 1 and of the second try; the first has the number between.
    """
    del world_size
    chunks, reason, between = start(case), "", None
    engines = [HttpEngine(url)] if rank == 0 else []
    options = RefitOptions(staging_bytes=STAGING, timeout_s=60.0, memory=memory)
    with contextlib.closing(RefitSession(chunks, engines, vocab_size=37, options=options)) as session:
        session.prepare()
        fill(case, chunks, 1)
        session.push(versions[0])
        before = state_of(VllmServer(url, Path())) if rank == 0 else None
        fill(case, chunks, 2)
        if rank == 1:
            corrupt_next_packet()
        try:
            session.push(versions[0] + 1)
        except RefitError as error:
            reason = str(error)
        if rank == 0:
            between = state_of(VllmServer(url, Path()))
            assert between == before
        session.push(versions[1])
    for engine in engines:
        engine.close()
    return reason, before, state_of(VllmServer(url, Path())) if rank == 0 else None


def corrupt_next_packet() -> None:
    """One bit of the next packet that this process sends changes after it was digested."""
    end_class: Any = SendingEnd
    original = end_class.send

    def send(end: SendingEnd, packet: Packet, slot: StagingSlot, check: Check) -> None:
        if packet.nbytes:
            end_class.send = original
            payload: Any = slot.payload
            payload[packet.nbytes // 2] ^= 4
        original(end, packet, slot, check)

    end_class.send = send


@pytest.mark.parametrize(("model", "tp"), CASES, ids=[f"{model}-tp{tp}" for model, tp in CASES])
def test_a_server_holds_and_answers_what_an_engine_of_the_exported_checkpoint_does(
    model: str, tp: int, tmp_path: Path
) -> None:
    config = CONFIGS[model]
    mesh = TrainerMesh(etp=2, expert_etp=2) if "experts" in config or "num_experts" in config else TrainerMesh(etp=2)
    seeds = (1, 2) if tp == 1 else (2,)  # an engine of two workers takes long to start
    paths = {seed: str(tmp_path / f"model_{seed}") for seed in seeds}
    run_megatron(export_all_body, 1, args=(Case(TrainerMesh(), (), config), paths), timeout_s=180)
    fresh = {}
    for seed, path in paths.items():
        (place := tmp_path / f"fresh_{seed}").mkdir()
        with VllmHost(Path(path), place, tensor_parallel_size=tp) as host:
            engine = host.connect()
            tokens = [engine.complete(prompt, ANSWER).tokens for prompt in PROMPTS]
            fresh[seed] = State(engine.parameters(), engine.log_probabilities(PROMPTS), tokens)
    (folder := tmp_path / "server").mkdir()
    arguments = ("--tensor-parallel-size", str(tp), "--worker-extension-cls", EXTENSION)
    with vllm_server(config, folder, *arguments) as server:
        for number, memory in enumerate(MemoryMode):
            args = (Case(mesh, (), config), server.url, (10 * number + 1, 10 * number + 3), memory)
            reason, first, second = run_megatron(push_body, 2, args=args, timeout_s=240)[0]
            assert "DigestError" in reason
            if engine_release() != "0.26.0":
                assert server.get("weight_info") == {"weight_version": str(args[2][1])}
            assert second == fresh[2]
            assert all(one != other for one, other in zip(first, second, strict=True))
            if 1 in fresh:
                assert first == fresh[1]
