"""Real Megatron models, sharded every way, exported in the middle of a run and opened by transformers."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_patches.refit.models.mesh import TrainerMesh
from tests.support.exported import open_export
from tests.support.launch import run_megatron
from tests.support.live_parallel import mesh_settings, own_part, stage_arguments, start_parallel_state

VOCABULARY = 251  # odd; Megatron pads it to 256
TOKENS = torch.randint(0, VOCABULARY, (2, 18), generator=torch.Generator().manual_seed(1))  # TP cuts the length


@dataclass(frozen=True)
class Case:
    """One model, and how it is spread."""

    name: str
    mesh: TrainerMesh = field(default_factory=TrainerMesh)
    kv_heads: int = 2
    bias: bool = False
    qkv_bias: bool = False
    tied: bool = False
    rope_scaling: bool = False
    yarn: bool = False
    qk_norm: bool = False
    experts: int = 0
    pre_softmax: bool = False

    @property
    def architecture(self) -> str:
        """The class in transformers that has this model's biases and norms."""
        if self.experts:
            return "Qwen3MoeForCausalLM"
        if self.qk_norm:
            return "Qwen3ForCausalLM"
        return "Qwen2ForCausalLM" if self.qkv_bias else "LlamaForCausalLM"


ON_1_RANK = (
    Case("qwen3", qk_norm=True),
    Case("qwen3_scaled_tied", qk_norm=True, rope_scaling=True, tied=True),
    Case("qwen3_yarn", qk_norm=True, yarn=True),
    Case("qwen3_moe", qk_norm=True, experts=4),
    Case("qwen3_moe_scores_as_they_are", qk_norm=True, experts=4, pre_softmax=True),
)
ON_2_RANKS = (
    Case("dp2", TrainerMesh(dp=2)),
    Case("tp2", TrainerMesh(tp=2)),
    Case("tp2_above_kv_heads", TrainerMesh(tp=2), kv_heads=1, bias=True),
    Case("etp2", TrainerMesh(etp=2)),
    Case("etp2_biases_tied", TrainerMesh(etp=2), bias=True, tied=True),
    Case("etp2_qwen2_scaled", TrainerMesh(etp=2), qkv_bias=True, rope_scaling=True),
    Case("etp2_yarn", TrainerMesh(etp=2), yarn=True),
    Case("qwen2_pp2_yarn", TrainerMesh(pp=2), qkv_bias=True, yarn=True),
    Case("pp2_tied", TrainerMesh(pp=2), tied=True),
    Case("qwen3_etp2", TrainerMesh(etp=2), qk_norm=True),
    Case("qwen3_tp2_above_kv_heads", TrainerMesh(tp=2), kv_heads=1, qk_norm=True),
    Case("qwen3_moe_ep2", TrainerMesh(ep=2, dp=2), qk_norm=True, experts=4),
    Case("qwen3_moe_etp2_expert_etp2", TrainerMesh(etp=2, expert_etp=2), qk_norm=True, experts=4),
    Case("qwen3_moe_tp2_expert_tp2", TrainerMesh(tp=2, expert_tp=2), qk_norm=True, experts=4),
)
ON_4_RANKS = (
    Case("tp2_etp2", TrainerMesh(tp=2, etp=2)),
    Case("dp2_etp2", TrainerMesh(etp=2, dp=2)),
    Case("etp4", TrainerMesh(etp=4), kv_heads=4),
    Case("pp2_etp2_tied", TrainerMesh(pp=2, etp=2), tied=True),
    Case("pp2_etp2_interleaved", TrainerMesh(pp=2, etp=2, vpp=2)),
    Case("qwen3_tp2_etp2_tied", TrainerMesh(tp=2, etp=2), qk_norm=True, tied=True),
    Case("qwen3_moe_etp2_ep2_expert_etp2", TrainerMesh(etp=2, ep=2, expert_etp=2, dp=2), qk_norm=True, experts=4),
    Case("qwen3_moe_tp2_etp2_ep2", TrainerMesh(tp=2, etp=2, ep=2), qk_norm=True, experts=6),
    Case("qwen3_moe_pp2_ep2", TrainerMesh(pp=2, ep=2, dp=2), qk_norm=True, experts=4, pre_softmax=True),
)
YARN = {
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 16,  # shorter than TOKENS
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "correction_range_round_to_int": True,
}
"""As Megatron's flags set them; of those that may differ, none is a default."""


def build(case: Case) -> list[Any]:
    """Megatron for the case's mesh, and this rank's model chunks: norms and biases are random, replicas equal."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    mesh = case.mesh
    start_parallel_state(mesh, 123)
    torch.manual_seed(3)
    experts: dict[str, Any] = {}
    if case.experts:
        experts = {
            "num_moe_experts": case.experts,
            "moe_ffn_hidden_size": 48,
            "moe_router_topk": 2,
            "moe_router_pre_softmax": case.pre_softmax,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "sequence_parallel": mesh.tp > 1,
            "expert_gtp_weight_remat_size": mesh.expert_etp,
        }
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=case.kv_heads,
        kv_channels=24,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=case.bias,
        add_qkv_bias=case.bias or case.qkv_bias,
        qk_layernorm=case.qk_norm,
        init_method_std=0.1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **mesh_settings(mesh, torch.float32),
        **experts,
    )
    for field_name, value in YARN.items() if case.yarn else ():
        setattr(config, f"yarn_{field_name}", value)
    chunks = []
    for stage in range(mesh.vpp):
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(
                normalization="RMSNorm", qk_layernorm=case.qk_norm, num_experts=case.experts or None
            ),
            vocab_size=256,
            position_embedding_type="yarn" if case.yarn else "rope",
            rotary_base=50000,
            rope_scaling=case.rope_scaling,
            share_embeddings_and_output_weights=case.tied,
            **stage_arguments(mesh, stage),
        )
        for name, param in model.named_parameters():
            if "norm" in name or "bias" in name:
                cut = (
                    parallel_state.get_tensor_model_parallel_rank()
                    if getattr(param, "tensor_model_parallel", False)
                    else -1
                )
                place = f"{name} {stage} {parallel_state.get_pipeline_model_parallel_rank()} {cut}"
                generator = torch.Generator().manual_seed(zlib.crc32(place.encode()))
                own_part(param).uniform_(0.3, 1.7, generator=generator)
        fill_experts(case, model, stage)
        chunks.append(model.eval())
    return chunks


def fill_experts(case: Case, model: Any, stage: int) -> None:
    """Other values for each expert: Megatron starts those of all expert-parallel ranks alike."""
    from megatron.core import parallel_state

    for name, param in model.named_parameters():
        if ".experts." in name:
            groups = model.pg_collection
            shard = param.group.rank() if hasattr(param, "group") else 0
            stage_rank = parallel_state.get_pipeline_model_parallel_rank()
            place = f"{name} {stage} {stage_rank} {groups.ep.rank()} {groups.expt_tp.rank()} {shard}"
            generator = torch.Generator().manual_seed(zlib.crc32(place.encode()))
            own_part(param).normal_(0.0, 0.2, generator=generator)


def forward(case: Case, chunks: list[Any]) -> torch.Tensor | None:
    """Logits on the last pipeline stage; chunk by chunk through the pipeline, without a schedule."""
    from megatron.core import parallel_state

    positions = torch.arange(TOKENS.shape[1])[None].expand_as(TOKENS)
    mask = torch.ones(1, 1, TOKENS.shape[1], TOKENS.shape[1]).triu(1).bool()
    me, stages = parallel_state.get_pipeline_model_parallel_rank(), case.mesh.pp
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    hidden = torch.empty(TOKENS.shape[1], TOKENS.shape[0], 64)
    logits = None
    with torch.no_grad():
        for number, chunk in enumerate(chunks):
            if not chunk.pre_process:
                dist.recv(hidden, ranks[(me - 1) % stages], group)
                chunk.set_input_tensor(hidden)
            output = chunk(TOKENS, positions, mask)
            if chunk.post_process:
                logits = output[..., :VOCABULARY].clone()
            else:
                dist.send(output.contiguous(), ranks[(me + 1) % stages], group)
            hidden = hidden if number else hidden.clone()
    return logits


def export_cases(rank: int, world_size: int, cases: tuple[Case, ...], folder: str) -> dict[str, Any]:
    """Builds, computes and exports every case; returns logits (last stage) and bytes written, by case."""
    import megatron_patches

    megatron_patches.apply()
    from megatron_patches.refit.checkpoints.export import ExportOptions, export_checkpoint

    found = {}
    for case in cases:
        chunks = build(case)
        logits = forward(case, chunks)
        report = export_checkpoint(
            chunks,
            Path(folder) / case.name,
            vocab_size=VOCABULARY,
            options=ExportOptions(max_shard_bytes=200_000, eos_token_id=7, staging_bytes=4096),
        )
        found[case.name] = (logits, dict(report.bytes_by_rank), report.nbytes)
    return found


def assert_transformers_agrees(path: Path, expected: torch.Tensor, architecture: str) -> None:
    model = open_export(path, architecture)
    assert model.generation_config.eos_token_id == 7
    with torch.no_grad():
        logits = model(TOKENS).logits
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.integration
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(ON_1_RANK, id="1_rank"),
        pytest.param(ON_2_RANKS, id="2_ranks", marks=pytest.mark.quick),
        pytest.param(ON_4_RANKS, id="4_ranks"),
    ],
)
def test_logits_of_the_export_equal_megatrons(tmp_path: Path, cases: tuple[Case, ...]) -> None:
    ranks = {ON_1_RANK: 1, ON_2_RANKS: 2, ON_4_RANKS: 4}[cases]
    results = run_megatron(export_cases, ranks, timeout_s=240, args=(cases, str(tmp_path)), fresh=True)
    for case in cases:
        per_rank = [result[case.name] for result in results]
        logits = next(logits for logits, _, _ in per_rank if logits is not None)
        assert_transformers_agrees(tmp_path / case.name, logits, case.architecture)
        _, written, total = per_rank[0]
        assert sum(written.values()) == total
        assert len(list((tmp_path / case.name).glob("*.safetensors"))) > 1
        fair = total / ranks
        if case.mesh.pp == 1:  # stages differ in what they hold
            assert max(written.values()) < 1.05 * fair, "replicas share the writing"


def fail_on_one_rank(rank: int, world_size: int, folder: str) -> list[str]:
    """Exports that go wrong on one rank only; returns the message of each on this rank."""
    import megatron_patches

    megatron_patches.apply()
    from megatron_patches.refit.checkpoints.export import ExportOptions, export_checkpoint
    from megatron_patches.refit.errors import ExportError
    from megatron_patches.refit.layout.weight_format import WeightFormat
    from megatron_patches.refit.source.block_quantizer import BlockQuantizer

    chunks = build(Case("etp2", TrainerMesh(etp=2)))
    messages = []

    def attempt(path: Path, vocab_size: int = VOCABULARY, kind: WeightFormat = WeightFormat.TRAINED) -> None:
        try:
            export_checkpoint(chunks, path, vocab_size=vocab_size, options=ExportOptions(weight_format=kind))
        except ExportError as error:
            messages.append(str(error))

    target = Path(folder) / "out"
    if rank == 1:
        chunks[0].decoder.layers[0].register_parameter("extra", torch.nn.Parameter(torch.randn(3)))
    attempt(target)
    if rank == 1:
        del chunks[0].decoder.layers[0].extra
    attempt(target, vocab_size=VOCABULARY + 1 if rank == 1 else VOCABULARY)
    attempt(target, vocab_size=1000)
    (Path(folder) / "file").write_text("")
    attempt(Path(folder) / "file" / "out")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(BlockQuantizer, "cast", _lack_memory)
        attempt(target, kind=WeightFormat.FP8_BLOCK)
    return messages


def _lack_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.integration
@pytest.mark.multiproc
def test_a_failure_on_one_rank_is_everyones_and_leaves_nothing(tmp_path: Path) -> None:
    first, second = run_megatron(fail_on_one_rank, 2, args=(str(tmp_path),), fresh=True)
    assert first == second
    assert len(first) == 5
    assert "failed on rank 1" in first[0]
    assert "no tensor of LlamaForCausalLM corresponds to the Megatron parameter decoder.layers.0.extra" in first[0]
    assert "rank 1 describes another model than rank 0: vocab_size 252 instead of 251" in first[1]
    assert "256 rows, padding included, which cannot hold 1000 tokens" in first[2]
    assert "cannot write to" in first[3]
    assert "failed on rank 1" in first[4]
    assert "CUDA out of memory" in first[4]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
