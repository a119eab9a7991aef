"""Scales of KV caches in FP8, given with a version: an engine answers as one that is restarted with them."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from megatron_patches.refit import Fate, KVScales, OnEngineFailure, RefitOptions, WeightPublisher
from megatron_patches.refit.control.messages import State
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.parties.terms import MemoryMode
from tests.integration.live_refit import LONG_PROMPT, PROMPTS, STAGING
from tests.integration.tiny_models import LLAMA
from tests.support.completion import Completion
from tests.support.vllm_host import VllmConnection, VllmHost

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    # vLLM refuses a cache in FP8 on other processors.
    pytest.mark.skipif(
        not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()), reason="no cache in FP8"
    ),
    pytest.mark.timeout(600),
]

LAYERS = 4
LONG_TEXTS: dict[str, Any] = {"max_model_len": 128, "hf_overrides": {"max_position_embeddings": 128}}
OPTIONS: dict[str, Any] = {"timeout_s": 60.0, "staging_bytes": STAGING, "on_engine_failure": OnEngineFailure.RAISE}


class Answers(NamedTuple):
    """What an engine answers."""

    probabilities: list[list[float]]
    text: Completion


def answers(engine: VllmConnection) -> Answers:
    return Answers(engine.log_probabilities(PROMPTS), engine.complete(LONG_PROMPT, 12))


def scales(seed: int) -> list[KVScales]:
    """Random scales of every layer, far from one; of queries too."""
    values = torch.rand(LAYERS, 3, generator=torch.Generator().manual_seed(seed)) * 0.2 + 0.02
    return [KVScales(k_scale=k, v_scale=v, q_scale=q) for k, v, q in values.tolist()]


def by_number(seed: int) -> dict[int | str, KVScales]:
    return dict(enumerate(scales(seed)))


def by_name(seed: int) -> dict[int | str, KVScales]:
    """The names of a Hugging Face model, or those of vLLM."""
    ends = ("", ".attn") * LAYERS
    return {f"model.layers.{layer}.self_attn{ends[layer]}": one for layer, one in enumerate(scales(seed))}


def held(engine: VllmConnection) -> list[tuple[float, ...]]:
    """Scales of every layer: buffers, and the numbers that follow them."""
    found: list[tuple[float, ...]] = engine.run("kv_scales")
    return found


def expected(seed: int | None) -> list[tuple[float, ...]]:
    given = scales(seed) if seed is not None else [KVScales(k_scale=1.0, v_scale=1.0, q_scale=1.0)] * LAYERS
    single = [torch.tensor([one.q_scale, one.k_scale, one.v_scale]).tolist() for one in given]
    return [(q, q, k, k, k, v, v, v) for q, k, v in single]


def random_model() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in LLAMA.items() if key not in {"model_type", "architectures"}}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings)).bfloat16()


def fill(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.copy_(torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1]))


def refused(publisher: WeightPublisher, engine: VllmConnection, version: int, given: Any, *reasons: str) -> None:
    """A version is refused in one line that has the reasons; the engine serves on."""
    before = answers(engine), held(engine)
    with pytest.raises(PartyFailedError) as raised:
        publisher.publish(version, kv_scales=given)
    assert "\n" not in str(raised.value)
    for reason in reasons:
        assert reason in str(raised.value)
    assert (answers(engine), held(engine)) == before


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine with its cache in FP8, and one that is started from the checkpoint of version 2."""
    folder = tmp_path_factory.mktemp("scales")
    model = random_model()
    hosts = []
    for name, seed in (("pushed", 1), ("fresh", 2)):
        fill(model, seed)
        model.save_pretrained(folder / name / "model")
        hosts.append(VllmHost(folder / name / "model", folder / name, kv_cache_dtype="fp8", **LONG_TEXTS))
    with hosts[0] as one, hosts[1] as other:
        yield one.connect(), other.connect()


@pytest.mark.parametrize(
    ("memory", "payload"), [(MemoryMode.BESIDE, PayloadKind.WHOLE), (MemoryMode.IN_PLACE, PayloadKind.DELTA)]
)
def test_scales_serve_with_their_version(
    memory: MemoryMode, payload: PayloadKind, engines: Sequence[VllmConnection]
) -> None:
    pushed, fresh = engines
    model = random_model()
    with_ones = answers(fresh)
    with WeightPublisher(model, options=RefitOptions(memory=memory, payload=payload, **OPTIONS)) as publisher:
        publisher.attach(pushed)

        def publish(version: int, seed: int, given: Any) -> None:
            fill(model, seed)
            report = publisher.publish(version, kv_scales=given).result(60.0)
            assert report.engines[pushed.name].fate is Fate.SERVES, report

        if memory is MemoryMode.BESIDE:
            of_its_own = [(one.q_scale, one.k_scale, one.v_scale) for one in scales(9)]
            pushed.run("set_kv_scales", of_its_own)
            publish(0, 1, None)
            assert held(pushed) == expected(9)
            pushed.run("set_kv_scales", [(1.0, 1.0, 1.0)] * LAYERS)
            publish(1, 2, None)
            assert held(pushed) == expected(None)
            assert answers(pushed) == with_ones
        publish(2, 1, by_number(5))
        assert held(pushed) == expected(5)
        publish(3, 2, by_name(6))
        assert held(pushed) == expected(6)
        fresh.run("set_kv_scales", [(one.q_scale, one.k_scale, one.v_scale) for one in scales(6)])
        fresh.resume(reset_cache=True)  # what its prefix cache has is in other scales
        assert held(fresh) == expected(6)
        wanted = answers(fresh)
        assert wanted != with_ones
        assert answers(pushed) == wanted
        publish(4, 2, None)  # those given last stay
        assert (held(pushed), answers(pushed)) == (expected(6), wanted)

        name = next(iter(by_name(6)))
        refused(publisher, pushed, 5, by_number(6) | {4: scales(6)[0]}, "no attention layer 4; it has model.layers.0")
        refused(
            publisher,
            pushed,
            5,
            by_number(6) | {name: scales(6)[0]},
            "gives scales as",
            "of every attention layer once",
        )
        refused(publisher, pushed, 5, {3: scales(6)[3]}, "gives no scales for model.layers.0.self_attn.attn")
        for value in (0.0, -1.0, math.nan, math.inf, 1e-60):
            bad = by_number(6) | {2: KVScales(k_scale=0.5, v_scale=value)}
            refused(publisher, pushed, 5, bad, f"v_scale of layer 2 is {value!r}; it must be positive and finite")

        pushed.sabotage(0, "apply" if memory is MemoryMode.BESIDE else "replace")
        fill(model, 1)
        report = publisher.publish(5, kv_scales=by_number(7)).result(60.0).engines[pushed.name]
        assert report.fate is Fate.FAILED
        assert "version 5 was not taken" in str(report.reason)
        assert (held(pushed), answers(pushed)) == (expected(6), wanted)
    fresh.run("set_kv_scales", [(1.0, 1.0, 1.0)] * LAYERS)
    fresh.resume(reset_cache=True)


def test_an_engine_that_takes_a_version_from_another_takes_its_scales(
    engines: Sequence[VllmConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed, late = engines
    monkeypatch.setattr(late, "name", "the late engine", raising=False)
    model = random_model()
    fill(model, 1)
    with WeightPublisher(model, options=RefitOptions(fan_out=True, **OPTIONS)) as publisher:
        publisher.attach(pushed)
        publisher.publish(1, kv_scales=by_number(8)).result(60.0)
        publisher.attach(late)
        deadline = time.monotonic() + 60.0
        while late.name not in publisher.state() or publisher.state()[late.name].state is not State.READY:
            assert time.monotonic() < deadline, publisher.state()
            time.sleep(0.05)
    assert held(late) == held(pushed) == expected(8)
    assert answers(late) == answers(pushed)
