"""DeepSeek-V3 and NemotronH as Megatron computes them, sharded and exported, give transformers' logits."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.models.mesh import TrainerMesh
from tests.support.exported import open_export
from tests.support.launch import run_megatron
from tests.support.live_models import Case, build_chunk
from tests.support.live_parallel import own_part, start_parallel_state
from tests.support.random_checkpoint import read_tensors

VOCABULARY = 37
TOKENS = torch.randint(0, VOCABULARY, (2, 18), generator=torch.Generator().manual_seed(1))
DEEPSEEK_V3: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "torch_dtype": "float32",
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
NEMOTRON_H: dict[str, object] = {
    "architectures": ["NemotronHForCausalLM"],
    "torch_dtype": "float32",
    "hybrid_override_pattern": "ME*M-E",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 5,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
}
CONFIGS = {"DeepseekV3ForCausalLM": DEEPSEEK_V3, "NemotronHForCausalLM": NEMOTRON_H}
YARN: dict[str, object] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,  # shorter than the texts of the tests
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
"""No value is a default."""
CHANGES: dict[str, dict[str, object]] = {
    "DeepseekV3ForCausalLM": {"rope_scaling": YARN},
    "NemotronHForCausalLM": {"moe_latent_size": 20, "tie_word_embeddings": True},
}
"""What every other mesh's model has besides."""
MESHES = {
    1: (TrainerMesh(),),
    2: (TrainerMesh(etp=2, expert_etp=2), TrainerMesh(tp=2, expert_tp=2), TrainerMesh(ep=2, dp=2)),
    4: (TrainerMesh(tp=2, etp=2, ep=2),),
}


def build(case: Case, rank: int) -> Any:
    """The model in float32, with other random values in every shard, norm and router bias."""
    start_parallel_state(case.mesh)
    model = build_chunk(case, 0).float().eval()
    model.config.params_dtype = torch.float32  # Mamba layers convert their inputs to it
    where = case.mesh.coordinates(rank)
    tensors = [*model.named_parameters(), *(item for item in model.named_buffers() if "expert_bias" in item[0])]
    for name, tensor in tensors:
        place: tuple[object, ...] = (where.tp if getattr(tensor, "tensor_model_parallel", False) else None,)
        if ".experts." in name:
            place = where.ep, where.expert_tp, where.expert_etp
        elif hasattr(tensor, "group"):
            place = *place, where.etp
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {place}".encode()))
        if "norm" in name:
            own_part(tensor).uniform_(0.5, 1.5, generator=generator)
        elif "dt_bias" in name:
            own_part(tensor).uniform_(-12.0, 0.0, generator=generator)  # time steps below transformers' least one
        else:
            own_part(tensor).normal_(0.0, 0.2, generator=generator)
    return model


def export(rank: int, world_size: int, folder: str, architecture: str) -> list[torch.Tensor]:
    """Logits of every mesh's model, each of which is exported."""
    import megatron_patches

    megatron_patches.apply()
    from megatron_patches.refit.checkpoints.export import ExportOptions, export_checkpoint

    positions = torch.arange(TOKENS.shape[1])[None].expand_as(TOKENS)
    found = []
    for number, mesh in enumerate(MESHES[world_size]):
        model = build(
            Case(mesh, (rank,), CONFIGS[architecture] | (CHANGES[architecture] if number % 2 == 0 else {})), rank
        )
        with torch.no_grad():
            found.append(model(TOKENS, positions, None)[..., :VOCABULARY].clone())
        export_checkpoint([model], Path(folder) / str(number), vocab_size=VOCABULARY)
    export_checkpoint([model], Path(folder) / "half", vocab_size=VOCABULARY, options=ExportOptions(dtype="bfloat16"))
    return found


@pytest.mark.integration
@pytest.mark.multiproc
@pytest.mark.parametrize("ranks", MESHES)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_of_the_export_equal_megatrons(tmp_path: Path, architecture: str, ranks: int) -> None:
    results = run_megatron(export, ranks, timeout_s=240, args=(str(tmp_path), architecture), fresh=True)
    for number, expected in enumerate(results[0]):
        model = open_export(tmp_path / str(number), architecture)
        scaled = "rope_scaling" in CHANGES[architecture] and number % 2 == 0
        assert (model.config.to_dict().get("rope_parameters", {}).get("rope_type") == "yarn") == scaled
        with torch.no_grad():
            logits = model(TOKENS).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    whole, half = read_tensors(tmp_path / str(number)), read_tensors(tmp_path / "half")
    for name, values in whole.items():
        bias = name.endswith("e_score_correction_bias")  # float32 in transformers and vLLM, whatever type a model has
        assert half[name].dtype == (torch.float32 if bias else torch.bfloat16)
        assert half[name].equal(values.to(half[name].dtype)), name


def export_without_shared_experts(rank: int, world_size: int, folder: str) -> str:
    """The error of an export of a hybrid whose experts are all routed."""
    import megatron_patches

    megatron_patches.apply()
    from megatron_patches.refit.checkpoints.export import export_checkpoint

    model = build(Case(TrainerMesh(), (rank,), NEMOTRON_H | {"n_shared_experts": 0}), rank)
    try:
        export_checkpoint([model], Path(folder) / "model", vocab_size=VOCABULARY)
    except RefitError as error:
        return str(error)
    return ""


@pytest.mark.integration
def test_a_hybrid_without_shared_experts_is_refused(tmp_path: Path) -> None:
    """Otherwise transformers would add shared experts with random weights."""
    (error,) = run_megatron(export_without_shared_experts, 1, timeout_s=240, args=(str(tmp_path),), fresh=True)
    assert "it has no shared experts" in error
    assert "train with --moe-shared-expert-intermediate-size" in error
    assert list(tmp_path.iterdir()) == []
