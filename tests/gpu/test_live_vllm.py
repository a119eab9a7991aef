"""A trainer pushes into vLLM servers on this machine's GPUs, with CUDA graphs and the kernels that vLLM chooses there.

The oracle is a server that was started from the checkpoint of the same weights: its parameters, log-probabilities and
completions must be found, bit by bit, in one that got them by a push.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from examples.serving import write_byte_tokenizer
from examples.vllm_process import starting_server, visible_gpus
from megatron_patches.refit import KVScales
from megatron_patches.refit.layout.weight_format import WeightFormat
from megatron_patches.refit.parties.terms import MemoryMode
from megatron_patches.refit.trainer.engine_client import SleepMode
from tests.gpu import bodies_live_vllm as bodies
from tests.gpu.bodies_live_vllm import After, Push, State
from tests.gpu.devices import needs_fp8, needs_te
from tests.support.launch import run_megatron
from tests.support.vllm_digests import EXTENSION
from tests.support.vllm_server import MODEL, VllmServer

pytestmark = [
    pytest.mark.gpu,
    needs_te(),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

ROOT = Path(__file__).resolve().parents[2]
BACKEND = "cpu:gloo,cuda:nccl"
LIMIT_S = 180.0
"""Of what a trainer does at a time."""
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": bodies.LENGTH,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LARGE = DENSE | {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16}

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
ARGUMENTS = (
    *("--dtype", "bfloat16", "--max-model-len", str(bodies.LENGTH), "--max-num-seqs", "8"),
    *("--enable-prompt-tokens-details", "--worker-extension-cls", EXTENSION),
    *("--max-num-batched-tokens", "512"),  # fewer shapes for which DeepGEMM compiles kernels
    *("--compilation-config", json.dumps(GRAPHS)),
    *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30)),
)
VARIABLES = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "OMP_NUM_THREADS": "2",
}
NO_DEEP_GEMM = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_MOE_USE_DEEP_GEMM": "0"}
"""Which compiles its kernels for minutes; the tests of block FP8 have it."""
REPEATABLE = {"VLLM_BATCH_INVARIANT": "1"}
"""vLLM's first LoRA kernel adds its 64 parts of a sum in any order otherwise (``lora/ops/triton_ops/utils.py``)."""


class Servers:
    """vLLM servers with this package's plugin, one at a time.

    Args:
        folder: for logs, and for what lets vLLM find the plugin.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._count, self._running = folder, 0, contextlib.ExitStack()
        # vLLM finds the plugin by its entry point, which the metadata of an installation has.
        metadata = folder / "metadata" / "megatron_etp-0.1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-etp\nVersion: 0.1.0\n")
        plugin = "[vllm.general_plugins]\netp = megatron_patches.refit.vllm.plugin:register\n"
        (metadata / "entry_points.txt").write_text(plugin)
        # Without Transformer Engine where that has a folder of its own: a server does without it.
        vllm = Path(importlib.util.find_spec("vllm").origin).parents[1]
        self._path = os.pathsep.join(str(entry) for entry in (ROOT, metadata.parent, vllm))

    def start(
        self, model: Path, *arguments: str, load: str = "auto", variables: Mapping[str, str] = MappingProxyType({})
    ) -> VllmServer:
        """A server of a checkpoint, in place of the one before; with ``load="dummy"``, of the model's shapes alone."""
        self.close()
        self._count += 1
        log = self._folder / f"server_{self._count}.log"
        if not (model / "tokenizer.json").exists():
            write_byte_tokenizer(model, 255)
        given = [*ARGUMENTS, "--load-format", load, *arguments]
        of_process = {**VARIABLES, **variables, "PYTHONPATH": self._path}
        running = self._running.enter_context(starting_server(model, MODEL, "etp", given, of_process, log))
        running.wait()
        return VllmServer(running.url, log, process=running.process.pid)

    def fresh(self, model: Path, *arguments: str, variables: Mapping[str, str] = MappingProxyType({})) -> State:
        """What a server holds and answers that loads a checkpoint."""
        return bodies.state_of(self.start(model, *arguments, variables=variables))

    def close(self) -> None:
        """End the server."""
        self._running.close()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    """They end with the test."""
    with contextlib.closing(Servers(tmp_path)) as found:
        yield found


def export(config: dict[str, Any], weight_format: WeightFormat, models: Mapping[Path, int]) -> None:
    """Models as checkpoints, by their numbers."""
    paths = {str(path): number for path, number in models.items()}
    run_megatron(bodies.export, 1, BACKEND, LIMIT_S, args=(config, weight_format, paths))


def push(config: dict[str, Any], server: VllmServer, pushes: list[Push], **options: Any) -> list[After]:
    """Pushes of one session."""
    (found,) = run_megatron(bodies.push, 1, BACKEND, LIMIT_S, args=(config, server.url, pushes, options))
    return found


LORA = ("--enable-lora", "--max-lora-rank", "8")
PER_TENSOR, PER_CHANNEL, PER_BLOCK = (("--quantization", f"fp8_per_{of}") for of in ("tensor", "channel", "block"))


@needs_fp8()
@pytest.mark.timeout(480)  # DeepGEMM compiles kernels for the first server
@pytest.mark.parametrize(
    ("config", "weight_format", "arguments", "variables"),
    [
        pytest.param(DENSE, WeightFormat.TRAINED, (), {}, id="bf16"),
        pytest.param(EXPERTS, WeightFormat.TRAINED, (), {}, id="bf16_experts"),
        pytest.param(DENSE, WeightFormat.FP8_BLOCK, (), {}, id="fp8"),
        pytest.param(DENSE, WeightFormat.FP8_BLOCK, (), NO_DEEP_GEMM, id="fp8_cutlass"),
        pytest.param(DENSE, WeightFormat.FP8_BLOCK_FP32_SCALES, (), {}, id="fp8_fp32_scales"),
        pytest.param(EXPERTS, WeightFormat.FP8_BLOCK, (), {}, id="fp8_experts"),
        pytest.param(EXPERTS, WeightFormat.FP8_BLOCK, (), NO_DEEP_GEMM, id="fp8_experts_triton"),
        pytest.param(DENSE, WeightFormat.TRAINED, PER_TENSOR, {}, id="online"),
        pytest.param(DENSE, WeightFormat.TRAINED, PER_CHANNEL, {}, id="online_channel"),
        pytest.param(DENSE, WeightFormat.TRAINED, PER_BLOCK, {}, id="online_block"),
        pytest.param(EXPERTS, WeightFormat.TRAINED, PER_TENSOR, {}, id="online_experts"),
    ],
)
def test_a_server_holds_and_answers_what_a_fresh_one_does(
    servers: Servers,
    tmp_path: Path,
    config: dict[str, Any],
    weight_format: WeightFormat,
    arguments: tuple[str, ...],
    variables: dict[str, str],
) -> None:
    """Beside and in place, in bf16, with blocks that it loads or quantizing itself; the other weights are refused.

    Each way twice, because what vLLM does to weights that it leaves as they came is left out from then on.
    """
    models = [tmp_path / "model_0", tmp_path / "model_1"]
    export(config, weight_format, {path: number for number, path in enumerate(models)})
    wanted = [servers.fresh(path, *arguments, variables=variables) for path in models]
    assert wanted[0].probabilities != wanted[1].probabilities
    server = servers.start(models[0], *arguments, load="dummy", variables=variables)
    first, beside = push(config, server, [Push(1, 1), Push(2, 0)], weight_format=weight_format)
    other = WeightFormat.TRAINED if weight_format.is_quantized else WeightFormat.FP8_BLOCK
    (refused,) = push(config, server, [Push(3, 1)], weight_format=other)
    again, in_place = push(
        config, server, [Push(4, 0), Push(5, 1)], weight_format=weight_format, memory=MemoryMode.IN_PLACE
    )
    assert first.state == wanted[1]
    assert again.state == wanted[0]
    assert beside.state == wanted[0]
    assert "in the engine" in refused.reason
    assert "\n" not in refused.reason
    assert refused.state == wanted[0]
    assert in_place.state == wanted[1]
    for after in (beside, in_place):
        assert after.kl < after.kl_before / 4  # trainer and engine agree, but for what is lost in quantizing


def add_kv_scales(checkpoint: Path, scales: Mapping[int | str, KVScales]) -> None:
    """Write scales of the KV cache into a checkpoint, as vLLM loads them."""
    named = {
        f"model.layers.{layer}.self_attn.attn.{kind}_scale": torch.tensor([getattr(one, f"{kind}_scale")])
        for layer, one in scales.items()
        for kind in "qkv"
    }
    save_file(named, checkpoint / "kv_scales.safetensors", metadata={"format": "pt"})  # without an index it reads all


def random_kv_scales(seed: int) -> dict[int | str, KVScales]:
    """Of every layer; vLLM rounds those of a checkpoint to the type of the model, so they are numbers of that."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.rand(DENSE["num_hidden_layers"], 3, generator=generator) * 0.2 + 0.02).bfloat16().tolist()
    return {layer: KVScales(k_scale=k, v_scale=v, q_scale=q) for layer, (k, v, q) in enumerate(values)}


@needs_fp8()
@pytest.mark.timeout(360)
@pytest.mark.parametrize("attention", ["FLASH_ATTN", "TRITON_ATTN"])
def test_kv_scales_of_a_version_are_those_of_a_checkpoint(servers: Servers, tmp_path: Path, attention: str) -> None:
    """A version without any keeps those given last."""
    arguments = ("--kv-cache-dtype", "fp8", "--attention-backend", attention)
    given = [random_kv_scales(3), random_kv_scales(4)]
    plain, *scaled = (tmp_path / name for name in ("plain", "scales_0", "scales_1"))
    export(DENSE, WeightFormat.FP8_BLOCK, dict.fromkeys([plain, *scaled], 0))
    for path, scales in zip(scaled, given, strict=True):
        add_kv_scales(path, scales)
    wanted = [servers.fresh(path, *arguments, variables=NO_DEEP_GEMM) for path in scaled]
    server = servers.start(plain, *arguments, variables=NO_DEEP_GEMM)
    ones = bodies.state_of(server)
    assert wanted[0].probabilities != wanted[1].probabilities
    assert ones.completions != wanted[0].completions
    pushes = [Push(1, 0, given[0]), Push(2, 0, given[1]), Push(3, 0, given[0]), Push(4, 0)]
    found = push(DENSE, server, pushes, weight_format=WeightFormat.FP8_BLOCK)
    for number, after in zip((0, 1, 0, 0), found, strict=True):
        assert after.state == wanted[number]


@pytest.mark.timeout(240)
def test_a_server_that_receives_only_changes_holds_and_answers_what_a_fresh_one_does(
    servers: Servers, tmp_path: Path
) -> None:
    """1 % and then 30 % of all elements; an element that only the first push brought is compared as well.

    With two GPUs, one trains and the other serves.
    """
    first, last = tmp_path / "model_0", tmp_path / "model_1"
    export(LARGE, WeightFormat.TRAINED, {first: 0})
    server = servers.start(first, load="dummy", variables={"CUDA_VISIBLE_DEVICES": visible_gpus()[-1]})
    args = (LARGE, server.url, (0.01, 0.3), str(last))
    (((whole, some, more), found),) = run_megatron(bodies.push_changes, 1, BACKEND, LIMIT_S, args=args)
    print(f"MB of a whole version, of 1 % and of 30 %: {whole / 1e6:.1f}, {some / 1e6:.1f}, {more / 1e6:.1f}")  # noqa: T201
    assert found == servers.fresh(last)
    assert some < 0.1 * whole
    assert some < more < 0.4 * whole


@pytest.mark.timeout(240)
def test_a_server_that_sleeps_is_woken_put_back_or_refused(servers: Servers, tmp_path: Path) -> None:
    """With vLLM's own sleep mode, at both levels; prints the memory of the GPU that is in use at each stage."""
    models = [tmp_path / "model_0", tmp_path / "model_1"]
    export(LARGE, WeightFormat.TRAINED, {path: number for number, path in enumerate(models)})
    other = servers.fresh(models[1])
    server = servers.start(models[0], "--enable-sleep-mode")
    wanted = [bodies.state_of(server), other]
    assert wanted[0].probabilities != wanted[1].probabilities
    naps = [(SleepMode.WAKE, 1, 1), (SleepMode.WAKE, 2, 0), (SleepMode.RESTORE, 1, 1), (SleepMode.RESTORE, 2, 0)]
    ((found, refusal),) = run_megatron(bodies.push_to_a_sleeper, 1, BACKEND, LIMIT_S, args=(LARGE, server.url, naps))
    for (mode, level, number), woken in zip(naps, found, strict=True):
        used = ", ".join(f"{stage} {gibibytes:.2f}" for stage, gibibytes in woken.memory.items())
        print(f"{mode}, level {level}, GiB of the GPU in use: {used}")  # noqa: T201 - docs/engines.md has them
        assert woken.slept
        assert woken.sleeps == (mode is SleepMode.RESTORE)
        assert woken.state == wanted[number]
    assert "the engine sleeps" in refusal
    assert "\n" not in refusal


@pytest.mark.timeout(240)
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="PEFT is not installed")
def test_published_adapters_answer_as_those_that_a_server_loads(servers: Servers, tmp_path: Path) -> None:
    base, saved = tmp_path / "base", {version: tmp_path / f"saved_{version}" for version in (1, 2)}
    run_megatron(bodies.save_base, 1, BACKEND, LIMIT_S, args=(DENSE, str(base)))
    server = servers.start(base, *LORA, variables=REPEATABLE)
    before = bodies.state_of(server)
    paths = {version: str(path) for version, path in saved.items()}
    args = (DENSE, server.url, paths, str(tmp_path))
    ((found, after),) = run_megatron(bodies.publish_adapters, 1, BACKEND, LIMIT_S, args=args)
    assert after == before
    assert found[1].completions != found[2].completions
    named = [f"fresh{version}={path}" for version, path in paths.items()]
    other = servers.start(base, *LORA, "--lora-modules", *named, variables=REPEATABLE)
    for version, state in found.items():
        wanted = bodies.state_of(other, f"fresh{version}")
        # Where a factor lies in a worker's memory depends on when it was loaded.
        assert state._replace(parameters=[]) == wanted._replace(parameters=[])
