"""Random Hugging Face checkpoints of every family, read into Megatron models that are spread in every way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_patches.refit.models.mesh import TrainerMesh
from tests.integration import tiny_models
from tests.integration.tiny_models import VOCABULARY
from tests.support.launch import run_megatron
from tests.support.live_models import Case, build_chunk
from tests.support.live_parallel import start_parallel_state
from tests.support.random_checkpoint import quantized, random_tensors, read_tensors, write_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.multiproc]

Config = dict[str, object]

CONFIGS: dict[str, Config] = {
    "llama": tiny_models.LLAMA | {"tie_word_embeddings": False},
    "llama_tied": tiny_models.LLAMA,
    "llama_biases": tiny_models.LLAMA | {"attention_bias": True, "mlp_bias": True},
    "qwen2": tiny_models.QWEN2,
    "qwen3": tiny_models.QWEN3,
    "qwen3_moe": tiny_models.QWEN3_MOE,
    "deepseek_v3": tiny_models.DEEPSEEK_V3_ODD,
    "nemotron_h": tiny_models.NEMOTRON_H_ODD,
}


@dataclass(frozen=True)
class Spread:
    """A model, its mesh, and the dtype of its parameters; the checkpoint is in float32."""

    config: str
    mesh: TrainerMesh
    dtype: torch.dtype = torch.float32


ON_1_RANK = (
    *(Spread(name, TrainerMesh()) for name in CONFIGS),
    Spread("qwen3_moe", TrainerMesh(), torch.bfloat16),
    Spread("nemotron_h", TrainerMesh(), torch.bfloat16),
)
ON_2_RANKS = (
    Spread("llama", TrainerMesh(tp=2)),
    Spread("llama", TrainerMesh(etp=2), torch.bfloat16),
    Spread("llama_tied", TrainerMesh(pp=2)),
    Spread("llama_biases", TrainerMesh(tp=2)),
    Spread("qwen2", TrainerMesh(dp=2)),
    Spread("qwen3", TrainerMesh(etp=2)),
    Spread("qwen3_moe", TrainerMesh(ep=2, dp=2)),
    Spread("qwen3_moe", TrainerMesh(tp=2, expert_tp=2)),
    Spread("deepseek_v3", TrainerMesh(etp=2, expert_etp=2)),
    Spread("deepseek_v3", TrainerMesh(tp=2, ep=2)),
    Spread("nemotron_h", TrainerMesh(tp=2, expert_tp=2)),
    Spread("nemotron_h", TrainerMesh(etp=2, expert_etp=2)),
)
ON_4_RANKS = (
    Spread("llama", TrainerMesh(tp=2, etp=2)),
    Spread("llama_tied", TrainerMesh(pp=2, etp=2)),
    Spread("llama_biases", TrainerMesh(etp=4)),
    Spread("qwen3", TrainerMesh(pp=2, etp=2, vpp=2), torch.bfloat16),
    Spread("qwen3_moe", TrainerMesh(etp=2, ep=2, expert_etp=2, dp=2)),
    Spread("qwen3_moe", TrainerMesh(pp=2, ep=2, dp=2)),
    Spread("deepseek_v3", TrainerMesh(tp=2, etp=2, ep=2)),
    Spread("nemotron_h", TrainerMesh(tp=2, etp=2, ep=2)),
)


def build(spread: Spread, rank: int, config: Config | None = None) -> list[Any]:
    """This rank's model chunks, with NaN in every element that a checkpoint must provide."""
    from megatron_patches.refit.source.describe import describe_model

    start_parallel_state(spread.mesh)
    case = Case(spread.mesh, (rank,), config or CONFIGS[spread.config])
    chunks = [build_chunk(case, chunk).to(spread.dtype) for chunk in range(spread.mesh.vpp)]
    for live in describe_model(chunks):
        low, high = live.shard.rows
        live.memory[: (high - low) * live.shard.row_numel].fill_(torch.nan)
    return chunks


@dataclass(frozen=True)
class Loaded:
    """What one rank saw of a load.

    Attributes:
        read: bytes that it read.
        needed: bytes in the checkpoint of what its parameters hold.
        conversions: see :class:`megatron_patches.refit.checkpoints.load_hf.LoadReport`.
        unset: parameters and buffers that still hold something that is not a number.
    """

    read: int
    needed: int
    conversions: dict[tuple[str, str], int]
    unset: list[str]


def load_and_export(rank: int, world_size: int, spreads: tuple[Spread, ...], folder: str) -> list[Loaded]:
    """Loads and exports each model."""
    import megatron_patches

    megatron_patches.apply()
    from megatron_patches.refit.checkpoints.export import export_checkpoint
    from megatron_patches.refit.checkpoints.load_hf import load_hf_checkpoint
    from megatron_patches.refit.source.describe import describe_model

    found = []
    for number, spread in enumerate(spreads):
        chunks = build(spread, rank)
        elements = sum(int(live.memory.isnan().sum()) for live in describe_model(chunks))
        report = load_hf_checkpoint(chunks, Path(folder) / spread.config, tokens=VOCABULARY, staging_bytes=1000)
        assert report.padding_rows == 40 - VOCABULARY
        unset = [live.shard.name for live in describe_model(chunks) if not live.memory.isfinite().all()]
        for live in describe_model(chunks):  # rows of no token are zero, and no random number is
            if live.shard.shape[-1] == 64 and "layers" not in live.shard.name:
                low, high = live.shard.rows
                elements -= int((live.memory[: (high - low) * live.shard.row_numel] == 0).sum())
        export_checkpoint(chunks, Path(folder) / f"back{number}", vocab_size=VOCABULARY)
        found.append(Loaded(report.bytes_by_rank[rank], 4 * elements, dict(report.conversions), unset))
    return found


@pytest.mark.parametrize(
    "spreads",
    [
        pytest.param(ON_1_RANK, id="1_rank"),
        pytest.param(ON_2_RANKS, id="2_ranks"),
        pytest.param(ON_4_RANKS, id="4_ranks"),
    ],
)
def test_what_is_exported_from_a_loaded_model_is_what_was_loaded(tmp_path: Path, spreads: tuple[Spread, ...]) -> None:
    ranks = spreads[0].mesh.size
    originals = {}
    for name in {spread.config for spread in spreads}:
        originals[name] = random_tensors(CONFIGS[name])
        write_checkpoint(tmp_path / name, CONFIGS[name], originals[name], files=1 + len(name) % 3)
    results = run_megatron(load_and_export, ranks, timeout_s=240, args=(spreads, str(tmp_path)), fresh=True)
    for number, spread in enumerate(spreads):
        back, original = read_tensors(tmp_path / f"back{number}"), originals[spread.config]
        assert back.keys() == original.keys()
        for name, values in back.items():
            assert torch.equal(values, original[name].to(values.dtype)), (spread, name)
        narrowed = [name for name, values in back.items() if values.dtype == torch.bfloat16]
        for result in results:
            loaded = result[number]
            assert loaded.unset == []
            assert loaded.conversions == ({("float32", "bfloat16"): len(narrowed)} if narrowed else {})
            assert loaded.read == loaded.needed


WIDE: Config = {"hidden_size": 192, "intermediate_size": 328, "num_hidden_layers": 2}
"""Sizes with several blocks, which shards and heads do not follow."""
FP8: Config = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
IN_FP8: dict[str, Config] = {
    "llama": CONFIGS["llama"] | WIDE | FP8,
    "qwen3_moe": CONFIGS["qwen3_moe"] | WIDE | FP8 | {"moe_intermediate_size": 200},
    "deepseek_v3": CONFIGS["deepseek_v3"] | WIDE | FP8 | {"moe_intermediate_size": 136, "kv_lora_rank": 148},
}
IN_FP8_SPREAD = (
    Spread("llama", TrainerMesh(tp=2), torch.bfloat16),
    Spread("llama", TrainerMesh(etp=2)),
    Spread("qwen3_moe", TrainerMesh(tp=2, expert_tp=2), torch.bfloat16),
    Spread("deepseek_v3", TrainerMesh(etp=2, expert_etp=2), torch.bfloat16),
)


def load_and_export_fp8(rank: int, world_size: int, folder: str) -> list[dict[tuple[str, str], int]]:
    """Loads each model from its checkpoint in block FP8, and exports it as it is trained."""
    import megatron_patches

    megatron_patches.apply()
    from megatron_patches.refit.checkpoints.export import export_checkpoint
    from megatron_patches.refit.checkpoints.load_hf import load_hf_checkpoint

    found = []
    for number, spread in enumerate(IN_FP8_SPREAD):
        chunks = build(spread, rank, IN_FP8[spread.config])
        report = load_hf_checkpoint(chunks, Path(folder) / spread.config, tokens=VOCABULARY)
        export_checkpoint(chunks, Path(folder) / f"back{number}", vocab_size=VOCABULARY)
        found.append(dict(report.conversions))
    return found


@pytest.mark.quick
def test_block_fp8_is_dequantized_slice_by_slice(tmp_path: Path) -> None:
    meant = {}
    for name, config in IN_FP8.items():
        stored, meant[name] = quantized(random_tensors(config, torch.bfloat16))
        write_checkpoint(tmp_path / name, config, stored, files=2)
    results = run_megatron(load_and_export_fp8, 2, timeout_s=240, args=(str(tmp_path),), fresh=True)
    assert results[0] == results[1]
    for number, spread in enumerate(IN_FP8_SPREAD):
        back, original = read_tensors(tmp_path / f"back{number}"), meant[spread.config]
        assert back.keys() == original.keys()
        for name, values in back.items():
            assert torch.equal(values, original[name].to(values.dtype)), (spread, name)
        dtype = str(spread.dtype).removeprefix("torch.")
        matrices = sum(1 for values in original.values() if values.dtype == torch.float32 and values.dim() == 2)
        assert results[0][number]["float8_e4m3fn", dtype] == matrices > 10


@dataclass(frozen=True)
class Refused:
    """A checkpoint that does not fit.

    Attributes:
        name: of its folder.
        message: part of the error, on every rank.
        config: of the model.
        touched: whether weights may have changed: only contents that contradict each other are found afterwards.
    """

    name: str
    message: str
    config: str = "llama_tied"
    touched: bool = False


REFUSED = (
    Refused("nowhere", "nowhere is not a directory"),
    Refused("missing", "model.layers.3.mlp.down_proj.weight is missing in"),
    Refused("extra", "lm_head.bias is unexpected in"),
    Refused("shape", "model.norm.weight in"),
    Refused("layers", "num_hidden_layers is 3 in config.json and 4 in this run"),
    Refused("tokens", "vocab_size is 36 in config.json, and the run's tokenizer has 37 tokens"),
    Refused("rows", "vocab_size is 41 in config.json, and the model's embedding has 40 rows; pass --padded-vocab-size"),
    Refused("integers", "model.norm.weight is int32; only float32, bfloat16, float16 and block FP8"),
    Refused("cut_off", "is cut off: "),
    Refused("head", "of lm_head.weight[", touched=True),
    Refused("copy", "of model.layers.4.embed_tokens.weight[", config="deepseek_v3", touched=True),
)


def write_refused(folder: Path) -> None:
    """Write the checkpoints of :data:`REFUSED`."""
    tied = tiny_models.LLAMA
    good = random_tensors(tied)
    write_checkpoint(folder / "missing", tied, {name: good[name] for name in good if "3.mlp.down" not in name})
    write_checkpoint(folder / "extra", tied, {**good, "lm_head.bias": torch.randn(VOCABULARY)})
    write_checkpoint(folder / "shape", tied, {**good, "model.norm.weight": torch.randn(65)})
    write_checkpoint(folder / "layers", tied | {"num_hidden_layers": 3}, good)
    for name, rows in (("tokens", 36), ("rows", 41)):
        write_checkpoint(folder / name, tied | {"vocab_size": rows}, random_tensors(tied | {"vocab_size": rows}))
    write_checkpoint(folder / "integers", tied, {**good, "model.norm.weight": torch.ones(64, dtype=torch.int32)})
    write_checkpoint(folder / "cut_off", tied, good)
    with (folder / "cut_off" / "model.safetensors").open("r+b") as file:
        file.truncate(1000 + file.seek(0, 2) // 2)
    write_checkpoint(folder / "head", tied, {**good, "lm_head.weight": torch.randn(VOCABULARY, 64)})
    copied = random_tensors(tiny_models.DEEPSEEK_V3_ODD)
    copied["model.layers.4.embed_tokens.weight"][VOCABULARY - 1, 3] += 1
    write_checkpoint(folder / "copy", tiny_models.DEEPSEEK_V3_ODD, copied)


def load_refused(rank: int, world_size: int, folder: str) -> list[tuple[str, bool]]:
    """Each error's message, and whether all weights are as before."""
    import megatron_patches

    megatron_patches.apply()
    from megatron_patches.refit.checkpoints.load_hf import load_hf_checkpoint
    from megatron_patches.refit.errors import RefitError
    from megatron_patches.refit.source.describe import describe_model

    found = []
    for case in REFUSED:
        chunks = build(Spread(case.config, TrainerMesh(etp=2, expert_etp=2 if "deep" in case.config else 1)), rank)
        before = [live.memory.clone() for live in describe_model(chunks)]
        with pytest.raises(RefitError) as raised:
            load_hf_checkpoint(chunks, Path(folder) / case.name, tokens=VOCABULARY)
        after = [live.memory for live in describe_model(chunks)]
        same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, after, strict=True))
        found.append((str(raised.value), same))
    return found


def test_what_does_not_fit_is_refused_on_all_ranks_before_a_weight_changes(tmp_path: Path) -> None:
    write_refused(tmp_path)
    first, second = run_megatron(load_refused, 2, timeout_s=240, args=(str(tmp_path),), fresh=True)
    assert first == second
    for case, (message, same) in zip(REFUSED, first, strict=True):
        assert case.message in message
        assert same is not case.touched
