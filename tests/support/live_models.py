"""Live Megatron models of given configurations, built by one process in the role of any rank of a mesh.

Building a model moves nothing between ranks, so a "fake" process group will do.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.families import family_of
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.models.offline import TrainerOptions, param_shards, trainer_manifest
from megatron_patches.refit.models.shard import ParamShard
from megatron_patches.refit.models.traits import YarnTraits
from megatron_patches.refit.source.describe import describe_model
from tests.support.fake_group import fake_group
from tests.support.launch import run_megatron
from tests.support.live_parallel import mesh_settings, stage_arguments, start_parallel_state


@dataclass(frozen=True)
class Case:
    """A configuration, a mesh, and the ranks to compare."""

    mesh: TrainerMesh
    ranks: tuple[int, ...]
    config: dict[str, object]


@contextmanager
def live_chunks(case: Case, rank: int) -> Iterator[list[Any]]:
    """The model chunks that Megatron builds on ``rank``, converted to bfloat16 as its mixed-precision wrapper does."""
    import megatron_patches

    warnings.simplefilter("ignore")
    megatron_patches.apply()
    from megatron.core import parallel_state

    with fake_group(rank, case.mesh.size):
        start_parallel_state(case.mesh, gloo=False)
        try:
            yield [build_chunk(case, chunk).bfloat16() for chunk in range(case.mesh.vpp)]
        finally:
            parallel_state.destroy_model_parallel()


def build_chunk(case: Case, chunk: int) -> Any:
    """One chunk of the model that the configuration describes."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    traits = family_from_config(case.config).traits
    if traits.latent is not None:
        return build_latent_chunk(case, chunk)
    if traits.layer_kinds:
        from tests.support.live_hybrid import build_hybrid_chunk

        return build_hybrid_chunk(case, chunk)
    config = TransformerConfig(
        num_query_groups=traits.num_kv_heads,
        kv_channels=traits.head_dim,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=traits.linear_bias,
        add_qkv_bias=traits.qkv_bias,
        qk_layernorm=traits.qk_norm,
        **common_settings(case),
    )
    if traits.yarn is not None:
        for name, value in yarn_settings(traits.yarn).items():
            setattr(config, f"yarn_{name}", value)
        config.yarn_correction_range_round_to_int = True
    spec = get_gpt_layer_local_spec(
        normalization="RMSNorm",
        qk_layernorm=traits.qk_norm,
        num_experts=traits.num_experts or None,
        moe_grouped_gemm=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        position_embedding_type="rope" if traits.yarn is None else "yarn",
        **chunk_arguments(case, chunk),
    )


def by_storage(shards: Iterator[ParamShard]) -> dict[str, ParamShard]:
    """Shards by the name of their memory; a cut over one rank counts as none."""
    return {shard.storage: shard if shard.tp_size > 1 else replace(shard, partition_dim=None) for shard in shards}


def compare(case: Case) -> None:
    """Fail unless the shards of a case's ranks, and the sizes of their memory, are those of a live model."""
    family = family_from_config(case.config)
    options = TrainerOptions(vocab_multiple=40 // case.mesh.tp)
    for rank in case.ranks:
        with live_chunks(case, rank) as chunks:
            if family.traits.latent is not None or family.traits.layer_kinds:
                assert family_of(chunks[0], family.traits.vocab_size).traits == family.traits
            live = by_storage(item.shard for item in describe_model(chunks))
            sizes = {item.shard.storage: item.memory.numel() for item in describe_model(chunks)}
        found = by_storage(param_shards(family, case.mesh, rank, options))
        assert found == live
        manifest = trainer_manifest(family, case.mesh, rank, options)
        assert {storage.name: storage.numel for storage in manifest.storages} == sizes


def compare_in_fresh_process(cases: Mapping[str, Case]) -> dict[str, str]:
    """What is wrong with each case; nothing, it is hoped.

    In a process of its own, as the patches that let Megatron run on a CPU stay in the process; in one for all, as
    Megatron takes long to import.
    """
    (wrong,) = run_megatron(_compare_all, 1, None, 240.0, args=(cases,), fresh=True)
    return wrong


def _compare_all(rank: int, world_size: int, cases: Mapping[str, Case]) -> dict[str, str]:
    del rank, world_size
    wrong = dict.fromkeys(cases, "")
    for name, case in cases.items():
        try:
            compare(case)
        except Exception:  # noqa: BLE001  # whatever it is, it is the verdict on that case
            wrong[name] = traceback.format_exc()
    return wrong


def chunk_arguments(case: Case, chunk: int) -> dict[str, Any]:
    """Arguments of Megatron's models that do not depend on the family."""
    return {
        "vocab_size": 40,
        "share_embeddings_and_output_weights": family_from_config(case.config).traits.tied_embeddings,
        **stage_arguments(case.mesh, chunk),
    }


def common_settings(case: Case) -> dict[str, Any]:
    """Settings of Megatron's configuration that all families share, or that a machine without GPUs asks for."""
    mesh, traits = case.mesh, family_from_config(case.config).traits
    settings: dict[str, Any] = {
        "num_layers": traits.num_layers,
        "hidden_size": traits.hidden_size,
        "ffn_hidden_size": traits.ffn_hidden_size,
        "num_attention_heads": traits.num_heads,
        "normalization": "RMSNorm",
        **mesh_settings(mesh, torch.bfloat16),
    }
    if mesh.first or mesh.last:
        settings["num_layers_in_first_pipeline_stage"] = mesh.first or None
        settings["num_layers_in_last_pipeline_stage"] = mesh.last or None
    if traits.num_experts:
        settings |= {
            "num_moe_experts": traits.num_experts,
            "moe_ffn_hidden_size": traits.moe_ffn_hidden_size,
            "moe_latent_size": traits.moe_latent_size or None,
            "expert_gtp_weight_remat_size": mesh.expert_etp,
            "moe_router_topk": traits.experts_per_token,
            "sequence_parallel": mesh.tp > 1,
        }
    if traits.router is not None:
        grouped = traits.router.groups > 1
        settings["moe_router_num_groups"] = traits.router.groups if grouped else None
        settings["moe_router_group_topk"] = traits.router.groups_per_token if grouped else None
        settings["moe_router_topk_scaling_factor"] = traits.router.scaling
    return settings


def yarn_settings(yarn: YarnTraits) -> dict[str, Any]:
    """Megatron's settings of YaRN, as the configuration of latent attention names them."""
    return {
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }


class PlainAttention(torch.nn.Module):
    """The causal product of query, key and value by torch: Megatron's own for CPUs takes no latent heads."""

    def __init__(self, *, softmax_scale: float | None = None, **settings: object) -> None:  # noqa: ARG002
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: object,  # noqa: ARG002
        **named: object,  # noqa: ARG002
    ) -> torch.Tensor:
        """From [sequence, batch, heads, rows of a head] to [sequence, batch, heads x rows of a value]."""
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def build_latent_chunk(case: Case, chunk: int) -> Any:
    """One chunk of a model like DeepSeek-V3."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    mesh, traits = case.mesh, family_from_config(case.config).traits
    latent, positions = traits.latent, {"rope_type": "rope"}
    if traits.yarn is not None:
        positions = {"rope_type": "yarn", **yarn_settings(traits.yarn)}
    config = MLATransformerConfig(
        q_lora_rank=latent.q_rank or None,
        kv_lora_rank=latent.kv_rank,
        qk_head_dim=latent.nope_dim,
        qk_pos_emb_head_dim=latent.rope_dim,
        v_head_dim=latent.v_dim,
        **positions,
        apply_rope_fusion=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        moe_layer_freq=[int(traits.has_experts(layer)) for layer in range(traits.num_layers)],
        moe_shared_expert_intermediate_size=traits.shared_ffn_hidden_size or None,
        moe_router_enable_expert_bias=traits.router_bias,
        moe_router_score_function="sigmoid",
        layernorm_epsilon=traits.norm_eps,
        mtp_num_layers=traits.mtp_layers or None,
        **common_settings(case),
    )
    stage = chunk if mesh.vpp > 1 else None
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=stage)
    layers = [*spec.layer_specs, *(item.submodules.mtp_model_layer for item in (mtp.layer_specs if mtp else ()))]
    for layer in layers:
        layer.submodules.self_attention.submodules.core_attention = PlainAttention
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=mtp,
        position_embedding_type="rope",
        **chunk_arguments(case, chunk),
    )
