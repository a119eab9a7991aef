"""Engines with other options than the other live tests have: one push into all of them, and the answers of each.

As in :mod:`tests.integration.test_live_refit`, every engine is started from a checkpoint of model 2 and gets model 1
and model 2: then it must hold and answer what it held and answered before it had seen model 1. It is asked for what
follows a prompt of more than two blocks, twice, so that its prefix cache is filled with model 1.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch

from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.trainer.session import RefitOptions, RefitSession
from tests.integration.live_refit import LONG_PROMPT, PROMPTS, STAGING, export_body, fill, start
from tests.integration.tiny_models import LLAMA
from tests.support.completion import Completion
from tests.support.launch import run_megatron
from tests.support.live_models import Case
from tests.support.vllm_host import VllmConnection, VllmHost

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(600),
]

CASE = Case(TrainerMesh(), (), LLAMA)
LONG_TEXTS: Mapping[str, Any] = {"max_model_len": 128, "hf_overrides": {"max_position_embeddings": 128}}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "as_it_is": {},
    "chunked_prefill": {"enable_chunked_prefill": True, "max_num_batched_tokens": 32, "max_num_seqs": 8},
    "cache_in_fp8": {"kv_cache_dtype": "fp8"},
    "models_of_transformers": {"model_impl": "transformers"},
    "drafts_of_n_grams": {"speculative_config": NGRAMS},
}
# vLLM refuses a cache in FP8 on other processors.
HAS_FP8_CACHE = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
POSSIBLE = [name for name in OPTIONS if HAS_FP8_CACHE or name != "cache_in_fp8"]


class State(NamedTuple):
    """What an engine holds and answers."""

    parameters: list[dict[str, str]]
    probabilities: list[list[float]]
    first: Completion
    """Of a prompt that the engine has not been asked before with these weights."""
    again: Completion


def state(engine: VllmConnection) -> State:
    first, again = (engine.complete(LONG_PROMPT, 12) for _ in range(2))
    return State(engine.parameters(), engine.log_probabilities(PROMPTS), first, again)


def push_body(rank: int, world_size: int, addresses: list[str], seeds: tuple[int, ...]) -> list[list[State]]:
    """Pushes one model after another into all engines; what each then holds and answers, after each push."""
    del rank, world_size
    chunks, after = start(CASE), []
    engines = [VllmConnection(address) for address in addresses]
    for engine, address in zip(engines, addresses, strict=True):
        engine.name = address  # reports tell engines apart by name
    options = RefitOptions(staging_bytes=STAGING, timeout_s=150.0)
    with contextlib.closing(RefitSession(chunks, engines, vocab_size=37, options=options)) as session:
        session.prepare()
        for version, seed in enumerate(seeds):
            fill(CASE, chunks, seed)
            session.push(version)
            after.append([state(engine) for engine in engines])
    return after


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[State]]:
    """Of each engine, fresh and after each of two pushes."""
    folder = tmp_path_factory.mktemp("options")
    checkpoint = folder / "checkpoint"
    run_megatron(export_body, 1, args=(CASE, 2, str(checkpoint)), timeout_s=180)
    with contextlib.ExitStack() as stack:
        hosts = []
        for name in POSSIBLE:
            (place := folder / name).mkdir()
            hosts.append(stack.enter_context(VllmHost(checkpoint, place, **LONG_TEXTS, **OPTIONS[name])))
        fresh = [state(host.connect()) for host in hosts]
        after = run_megatron(push_body, 1, args=([host.address for host in hosts], (1, 2)), timeout_s=300)[0]
    return dict(zip(POSSIBLE, map(list, zip(fresh, *after, strict=True)), strict=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_an_engine_with_other_options_has_the_bits_and_answers_of_a_fresh_one(
    name: str, states: dict[str, list[State]]
) -> None:
    if name not in POSSIBLE:
        pytest.skip("vLLM has no cache in FP8 on processors without AVX-512 or AMX")
    fresh, other, same = states[name]
    assert fresh.first.cached == other.first.cached == same.first.cached == 0
    assert fresh.again.cached == other.again.cached == same.again.cached == 64
    computed = {key for key in fresh.parameters[0] if "cos_sin" in key or "inv_freq" in key}
    assert all(other.parameters[0][key] != digest for key, digest in fresh.parameters[0].items() if key not in computed)
    assert other.probabilities != fresh.probabilities
    assert other.first != fresh.first
    assert same == fresh
