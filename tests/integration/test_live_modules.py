"""Models of transformers, under FSDP2 and under ``etp.shard_module``, are published to a running vLLM server."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_patches.refit import Fate, RefitOptions, WeightPublisher
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.parties.terms import MemoryMode
from tests.integration.live_refit import PROMPTS, STAGING
from tests.integration.test_live_http import ANSWER, State, state_of
from tests.integration.tiny_models import LLAMA, QWEN3
from tests.support.launch import run_distributed
from tests.support.vllm_digests import EXTENSION
from tests.support.vllm_host import VllmHost
from tests.support.vllm_server import VllmServer, vllm_server

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(600),
]


def under_etp(model: torch.nn.Module) -> None:
    import etp

    etp.shard_module(model, dist.group.WORLD)


def under_fsdp(model: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def train_and_publish(
    rank: int, world_size: int, shard: Callable[[Any], None], config: dict[str, Any], url: str, paths: list[str]
) -> list[State]:
    """Trains, saves and publishes a model, twice. What the server held and answered after each, on the first rank."""
    from torch.distributed.tensor import DTensor
    from transformers import AutoConfig, AutoModelForCausalLM

    import etp

    def build() -> Any:
        torch.manual_seed(0)
        settings = {key: value for key, value in config.items() if key not in {"model_type", "architectures"}}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings)).bfloat16()

    model, whole = build(), build()
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    found = []
    options = RefitOptions(timeout_s=60.0, staging_bytes=STAGING)
    with WeightPublisher(model, options=options) as publisher:
        publisher.attach(url)
        for version, path in enumerate(paths, 5):
            tokens = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(rank))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(input_ids=tokens)
            state = {
                name: value.full_tensor() if isinstance(value, DTensor) else value
                for name, value in etp.full_state_dict(model).items()
            }
            if rank == 0:
                whole.load_state_dict(state)
                whole.save_pretrained(path)
            report = publisher.publish(version).result(60.0)
            assert {one.fate for one in report.engines.values()} == {Fate.SERVES}, report
            if rank == 0:
                found.append(state_of(VllmServer(url, Path())))
            dist.barrier()
    return found


def fresh(path: str, place: Path) -> State:
    """What an engine that has loaded a checkpoint holds and answers."""
    place.mkdir()
    with VllmHost(Path(path), place) as host:
        engine = host.connect()
        tokens = [engine.complete(prompt, ANSWER).tokens for prompt in PROMPTS]
        return State(engine.parameters(), engine.log_probabilities(PROMPTS), tokens)


def change_some(model: torch.nn.Module, seed: int, share: float = 0.02) -> None:
    """Flips a bit of a share of each weight's elements."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        bits = weight.data.view(torch.int16)
        bits ^= (torch.rand(bits.shape, generator=generator) < share).to(torch.int16) << 7  # of the exponent


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_changed_alone_makes_a_server_hold_and_answer_what_the_whole_does(dtype: str, tmp_path: Path) -> None:
    """Beside and in place, where an engine serves the bits that arrive, and where it converts them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in LLAMA.items() if key not in {"model_type", "architectures"}}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(LLAMA["model_type"], **settings)).bfloat16()
    nbytes = sum(2 * weight.numel() for weight in model.parameters())
    options: dict[str, Any] = {"timeout_s": 60.0, "staging_bytes": STAGING}
    with vllm_server(LLAMA, tmp_path, "--worker-extension-cls", EXTENSION, "--dtype", dtype) as server:
        for memory in MemoryMode:
            sent = []
            with WeightPublisher(
                model, options=RefitOptions(payload=PayloadKind.DELTA, memory=memory, **options)
            ) as one:
                name = one.attach(server.url)
                for version in range(1, 4):
                    report = one.publish(version).result(60.0).engines[name]
                    assert report.fate is Fate.SERVES, report
                    sent.append(report.nbytes)
                    if version < 3:
                        change_some(model, version)
            assert sent[0] == nbytes
            assert all(0 < changed < 0.1 * nbytes for changed in sent[1:])
            found = state_of(server)
            with WeightPublisher(model, options=RefitOptions(**options)) as one:
                one.attach(server.url)
                assert one.publish(1).result(60.0).engines[name].nbytes == nbytes
            assert found == state_of(server)
            change_some(model, 9)


@pytest.mark.parametrize(("shard", "config"), [(under_fsdp, LLAMA), (under_etp, QWEN3)], ids=["fsdp2", "etp"])
def test_a_server_holds_and_answers_what_an_engine_of_the_saved_model_does(
    shard: Callable[[Any], None], config: dict[str, Any], tmp_path: Path
) -> None:
    paths = [str(tmp_path / f"version_{number}") for number in range(2)]
    (folder := tmp_path / "server").mkdir()
    with vllm_server(config, folder, "--worker-extension-cls", EXTENSION) as server:
        args = (shard, config, server.url, paths)
        served, _ = run_distributed(train_and_publish, 2, "gloo", 240.0, args)
    assert served[0].parameters != served[1].parameters
    assert served[0] == fresh(paths[0], tmp_path / "first")
    assert served[1] == fresh(paths[1], tmp_path / "second")


def test_examples_of_the_documentation_run_as_they_stand(tmp_path: Path) -> None:
    """But for the address of the server, which has any free port here."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    root = Path(__file__).resolve().parents[2]
    blocks = re.findall(r"^```python\n(.*?)^```", (root / "docs" / "publish.md").read_text(), re.MULTILINE | re.DOTALL)
    examples = [block for block in blocks if "http://" in block]  # the others are parts of programs
    settings = {key: value for key, value in QWEN3.items() if key not in {"model_type", "architectures"}}
    model = Qwen3ForCausalLM(Qwen3Config(**settings)).bfloat16()
    model.save_pretrained(tmp_path / "MODEL")
    (folder := tmp_path / "server").mkdir()
    nbytes = 2 * sum(parameter.numel() for parameter in model.parameters())
    with vllm_server(QWEN3, folder) as server:
        for number, example in enumerate(examples):
            assert example.count("http://127.0.0.1:8000") == 1
            (tmp_path / "train.py").write_text(example.replace("http://127.0.0.1:8000", server.url))
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
            done = subprocess.run(
                [sys.executable, *launcher],
                check=False,
                cwd=tmp_path,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 0, done.stderr
            sent = nbytes * (1 + number)  # the second example's weights are in float32
            assert done.stdout.count(f"serves: {sent} bytes, {{'sending': ") == 2, done.stdout
    assert len(examples) == 2
