"""LoRA adapters of PEFT are published to a running vLLM, which serves them beside weights that it keeps.

The oracle is a new engine that loads what PEFT's ``save_pretrained`` has written.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_patches.refit import AdapterPublisher, Fate, OnEngineFailure, RefitOptions, WeightPublisher
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.parties.terms import MemoryMode
from tests.integration.live_refit import PROMPTS, STAGING
from tests.integration.tiny_models import QWEN3
from tests.support.completion import Completion
from tests.support.launch import run_distributed
from tests.support.vllm_host import VllmConnection, VllmHost
from tests.support.vllm_server import MODEL, PACED, VllmServer, complete, vllm_server

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="PEFT is not installed"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks for it
]

LENGTH = 6
LONG = 40
PACE_S = 0.25
OPTIONS = RefitOptions(timeout_s=60.0, staging_bytes=STAGING, on_engine_failure=OnEngineFailure.DROP)
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


class Answers(NamedTuple):
    """What a model answers."""

    probabilities: list[list[float]]
    completions: list[tuple[list[int], list[float]]]


def answers_of(server: VllmServer, model: str) -> Answers:
    """Of a model or an adapter that a server has."""
    done = [complete(server.url, prompt, LENGTH, model=model) for prompt in PROMPTS]
    return Answers(
        server.log_probabilities(PROMPTS, model=model), [(one.tokens, one.log_probabilities) for one in done]
    )


def base_model() -> Any:
    """The same whenever it is made."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {key: value for key, value in QWEN3.items() if key not in {"model_type", "architectures"}}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **settings)).bfloat16()


def adapted(**settings: Any) -> Any:
    """The model with random factors."""
    from peft import LoraConfig, get_peft_model

    usual = {"r": 6, "lora_alpha": 13, "target_modules": TARGETS, "init_lora_weights": False, "use_rslora": True}
    model = get_peft_model(base_model(), LoraConfig(**usual | settings))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def train(model: Any, seed: int) -> None:
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5, foreach=False)
    tokens = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(seed))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def publish_to_server(rank: int, world_size: int, url: str, paths: list[str], folder: str) -> dict[str, Any]:
    """Trains, saves and publishes two versions, and two more; what the server answers, on the first rank."""
    del world_size
    import etp

    model, whole, server = adapted(), adapted(), VllmServer(url, Path())
    etp.shard_module(model, dist.group.WORLD)
    found: dict[str, Any] = {"base": answers_of(server, MODEL)} if rank == 0 else {}
    with AdapterPublisher(model, "math", keep=2, folder=folder, options=OPTIONS) as publisher:
        publisher.attach(url)

        def publish(version: int) -> None:
            report = publisher.publish(version).result(60.0)
            assert {one.fate for one in report.engines.values()} == {Fate.SERVES}, report

        for version, path in enumerate(paths, 5):
            train(model, rank)
            state = etp.full_state_dict(model)
            if rank == 0:
                whole.load_state_dict(state)
                whole.save_pretrained(path)
            publish(version)
            if rank == 0:
                found[path] = answers_of(server, f"math@{version}")
            dist.barrier()
        begun, ended = threading.Event(), list[Completion]()
        if rank == 0:
            found["first again"] = answers_of(server, "math@5")
            found["alone"] = complete(url, PROMPTS[0], LONG, salt="a", model="math@5")

            def ask() -> None:
                ended.append(complete(url, PROMPTS[0], LONG, begun, salt="b", pace_s=PACE_S, model="math@5"))

            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            begun.wait(60.0)
        (session,) = Path(folder).iterdir()
        for version in (7, 8):  # which drop the first while a request runs on it, for which its files stay
            train(model, rank)
            publish(version)
        if rank == 0:
            assert not ended
            found["meanwhile"] = sorted(one.name for one in session.iterdir())
            found["refused"] = refusal_of(server, "math@5")
            asking.join(60.0)
            found["running"] = ended[0]
        for version in (9, 10):
            publish(version)
        if rank == 0:
            found["afterwards"] = sorted(one.name for one in session.iterdir())
            found["base again"] = answers_of(server, MODEL)
    return found


def refusal_of(server: VllmServer, model: str) -> int:
    """The status with which a server answers a request for a model."""
    try:
        server.log_probabilities(PROMPTS, model=model)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    return 200


def fresh(base: Path, adapter: str, place: Path) -> Answers:
    """What an engine answers that has loaded an adapter from a folder."""
    place.mkdir()
    with VllmHost(base, place, **LORA) as host:
        engine = host.connect()
        done = [engine.complete(prompt, LENGTH, adapter) for prompt in PROMPTS]
        return Answers(
            engine.log_probabilities(PROMPTS, adapter), [(one.tokens, one.log_probabilities) for one in done]
        )


def test_a_server_answers_with_each_version_what_an_engine_does_that_has_loaded_it(tmp_path: Path) -> None:
    (base := tmp_path / "base").mkdir()
    (folder := tmp_path / "versions").mkdir()
    base_model().save_pretrained(base)
    paths = [str(tmp_path / name) for name in ("first", "second")]
    options = ("--load-format", "auto", "--enable-lora", "--max-lora-rank", "8", *PACED)
    with vllm_server(QWEN3, base, *options) as server:
        args = (server.url, paths, str(folder))
        found, _ = run_distributed(publish_to_server, 2, "gloo", 240.0, args)
        assert found["base"] == found["base again"]
        assert found[paths[0]] == found["first again"]
        assert len({str(found[name]) for name in ("base", *paths)}) == 3
        assert found["running"][:2] == found["alone"][:2]
        assert (found["meanwhile"], found["refused"]) == (["math@5", "math@6", "math@7", "math@8"], 404)
        assert found["afterwards"] == ["math@10", "math@8", "math@9"]  # the last one dropped goes with the next
        run_example(server, base, tmp_path)
    for path in paths:
        assert found[path] == fresh(base, path, tmp_path / f"engine of {Path(path).name}")


def run_example(server: VllmServer, base: Path, place: Path) -> None:
    """The example of docs/adapters.md runs as it stands, but for the address of the server, and the adapter's name."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "adapters.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (place / "MODEL").symlink_to(base)
    example = example.replace("http://127.0.0.1:8000", server.url).replace('"math"', f'"example", folder="{place}"')
    (place / "train.py").write_text(example)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        [sys.executable, *launcher],
        check=False,
        cwd=place,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("example@3 serves: ") == 2, done.stdout
    assert refusal_of(server, "example@3") == 200


def reason_of_call(call: Callable[[], object]) -> str:
    """Why a call fails."""
    with pytest.raises(RefitError) as caught:
        call()
    return str(caught.value)


def reason_of(publisher: WeightPublisher, engine: Any) -> str:
    """Why an engine does not serve version 1."""
    with publisher:
        name = publisher.attach(engine)
        try:
            return str(publisher.publish(1).result(60.0).engines[name].reason)
        except RefitError as error:
            return str(error)


def test_adapters_that_an_engine_would_not_apply_in_full_are_refused(tmp_path: Path) -> None:
    (base := tmp_path / "base").mkdir()
    (folder := tmp_path / "versions").mkdir()
    (plain := tmp_path / "plain").mkdir()
    base_model().save_pretrained(base)
    how: dict[str, Any] = {"options": OPTIONS, "folder": str(folder)}
    # As if the trainer's model had a layer more: its tensors have names that no layer of the engine has.
    deeper, high = adapted(target_modules=["q_proj"]), adapted(r=9)
    layers = deeper.base_model.model.model.layers
    layers.append(copy.deepcopy(layers[0]))
    head = adapted(target_modules=["lm_head"])
    with VllmHost(base, tmp_path, tensor_parallel_size=2, **LORA) as host:
        engine = host.connect()
        model = adapted(use_rslora=False, rank_pattern={"q_proj": 3}, alpha_pattern={"down_proj": 5})
        with AdapterPublisher(model, "math", **how) as publisher:
            publisher.attach(engine)
            publisher.publish(1).result(60.0)
            before = engine.log_probabilities(PROMPTS, "math@1")
            assert close_to_peft(model, before)
            engine.sabotage(1, "adapter")
            report = publisher.publish(2).result(60.0).engines[engine.name]
            assert (report.fate, str(report.reason).count("was not taken: a worker of this engine")) == (Fate.FAILED, 2)
            assert "serves no adapter math@2" in reason_of_call(lambda: engine.complete(PROMPTS[0], 1, "math@2"))
        same = adapted()
        same.save_pretrained(saved := str(tmp_path / "saved"))
        with AdapterPublisher(same, "same", **how) as publisher:
            publisher.attach(engine)
            publisher.publish(1).result(60.0)
        assert engine.log_probabilities(PROMPTS, "same@1") == engine.log_probabilities(PROMPTS, saved)
        reasons = [reason_of(AdapterPublisher(other, "other", **how), engine) for other in (deeper, high, head)]
        again = reason_of(AdapterPublisher(model, "math", **how), engine)
        assert engine.log_probabilities(PROMPTS, "math@1") == before
    assert "the engine has no module model.layers.4.self_attn.q_proj" in reasons[0]
    assert "model.layers.0.self_attn.q_proj has rank 9, and the engine takes at most 8 (--max-lora-rank)" in reasons[1]
    assert "the engine has no module lm_head to which an adapter can be added" in reasons[2]
    assert "this engine has served another math@1" in again
    assert not any("\n" in reason for reason in (*reasons, again))
    assert not list(folder.iterdir())
    merged = model.merge_and_unload()
    with VllmHost(base, plain) as host:
        engine = host.connect()
        reason = reason_of(AdapterPublisher(high, "other", **how), engine)
        assert "the engine was started without --enable-lora; start it with it" in reason
        with WeightPublisher(merged, options=OPTIONS) as publisher:  # merged weights are weights like others
            publisher.attach(engine)
            pushed = publisher.publish(1).result(60.0)
            assert {one.fate for one in pushed.engines.values()} == {Fate.SERVES}, pushed
        assert close_to_peft(merged, engine.log_probabilities(PROMPTS))


def of_base(engine: VllmConnection) -> list[list[float]]:
    """An engine's log-probabilities without an adapter; see :meth:`VllmConnection.log_probabilities`."""
    return [engine.log_probabilities([prompt])[0] for prompt in PROMPTS]


def test_base_weights_are_pushed_beside_adapters(tmp_path: Path) -> None:
    """An engine that wraps its layers for adapters holds and answers what one does that has loaded the new weights."""
    first, second, model = base_model(), base_model(), adapted()
    for name, parameter in second.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(saved := str(tmp_path / "saved"))
    for name, base in (("pushed", first), ("fresh", second)):
        base.save_pretrained(tmp_path / name / "model")
    hosts = [VllmHost(tmp_path / name / "model", tmp_path / name, **LORA) for name in ("pushed", "fresh")]
    with hosts[0] as one, hosts[1] as other:
        pushed, fresh = one.connect(), other.connect()
        wanted = fresh.parameters(), of_base(fresh), fresh.log_probabilities(PROMPTS, saved)
        with AdapterPublisher(model, "math", options=OPTIONS, folder=str(tmp_path)) as publisher:
            publisher.attach(pushed)
            publisher.publish(1).result(60.0)
            with_first = pushed.log_probabilities(PROMPTS, "math@1")
            for memory in MemoryMode:
                with WeightPublisher(second, options=replace(OPTIONS, memory=memory)) as weights:
                    weights.attach(pushed)
                    report = weights.publish(1).result(60.0)
                assert {one.fate for one in report.engines.values()} == {Fate.SERVES}, report
                assert (pushed.parameters(), of_base(pushed), pushed.log_probabilities(PROMPTS, "math@1")) == wanted
                with WeightPublisher(first, options=OPTIONS) as weights:
                    weights.attach(pushed)
                    weights.publish(2).result(60.0)
                assert pushed.log_probabilities(PROMPTS, "math@1") == with_first != wanted[-1]


def close_to_peft(model: Any, found: list[list[float]]) -> bool:
    """Whether an engine's log-probabilities of the prompts are those of the trainer's model, but for rounding."""
    with torch.no_grad():
        for prompt, engine in zip(PROMPTS, found, strict=True):
            tokens = torch.tensor([prompt])
            logits = model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
            mine = logits.gather(1, tokens[0, 1:, None])[:, 0]
            if (mine - torch.tensor(engine)).abs().max() > 0.2:
                return False
    return True
