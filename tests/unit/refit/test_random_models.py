"""Random models of every family, spread at random over trainer and engine: planned, proved, and moved bit by bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.models.offline import TrainerOptions
from megatron_patches.refit.planning.plan import PartOf, PlanOptions
from megatron_patches.refit.planning.proof import prove
from megatron_patches.refit.simulation.cluster import Hosts, Sides, describe_cluster
from megatron_patches.refit.simulation.oracle import verify_in_memory
from megatron_patches.refit.target.vllm_layout import EngineMesh
from tests.support.quick import examples

SIZES = (1, 2, 3, 4)


@st.composite
def configs(draw: st.DrawFn, family: str) -> dict[str, object]:
    """A small model of a family; heads divide by 2 and 4, little else is round."""
    kv_heads = draw(st.sampled_from((1, 2, 4)))
    dense: dict[str, object] = {
        "num_hidden_layers": draw(st.sampled_from((2, 3, 4))),
        "hidden_size": draw(st.integers(1, 7)),
        "intermediate_size": 4 * draw(st.integers(1, 4)),
        "num_attention_heads": 4 * draw(st.integers(1, 2)),
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 3)),
        "vocab_size": draw(st.integers(1, 90)),
        "max_position_embeddings": 8,
        "tie_word_embeddings": draw(st.booleans()),
    }
    experts: dict[str, object] = {
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 4 * draw(st.integers(1, 3)),
        "n_shared_experts": draw(st.integers(0, 2)),
        "n_routed_experts": draw(st.sampled_from((4, 6))),
    }
    config = dense | experts | {"architectures": [f"{family}ForCausalLM"], "num_experts": experts["n_routed_experts"]}
    if family == "Llama" and draw(st.booleans()):
        config |= {"attention_bias": True, "mlp_bias": True}
    if family == "DeepseekV3":
        config |= {
            "q_lora_rank": 4 * draw(st.integers(0, 2)),
            "kv_lora_rank": 6,
            "qk_nope_head_dim": draw(st.integers(1, 3)),
            "qk_rope_head_dim": 2,
            "v_head_dim": draw(st.integers(1, 3)),
            "first_k_dense_replace": draw(st.integers(0, 2)),
            "num_nextn_predict_layers": draw(st.integers(0, 1)),
        }
    if family == "NemotronH":
        kinds = draw(st.lists(st.sampled_from("M*-E"), min_size=2, max_size=4))
        config |= {
            "hybrid_override_pattern": "".join(kinds),
            "num_hidden_layers": len(kinds),
            "mamba_num_heads": 4,
            "mamba_head_dim": draw(st.integers(1, 3)),
            "n_groups": 4,
            "ssm_state_size": draw(st.integers(1, 3)),
            "conv_kernel": draw(st.integers(1, 4)),
            "moe_shared_expert_intermediate_size": 4 * draw(st.integers(1, 2)),
        }
    return config


@st.composite
def trainers(draw: st.DrawFn) -> TrainerMesh:
    pp = draw(st.sampled_from((1, 1, 2)))
    plain = TrainerMesh(
        tp=draw(st.sampled_from((1, 2, 4))),
        etp=draw(st.sampled_from(SIZES)),
        pp=pp,
        vpp=draw(st.sampled_from((1, 2))) if pp > 1 else 1,
        dp=draw(st.sampled_from((1, 2))),
        first=draw(st.sampled_from((0, 1))) if pp > 1 else 0,
    )
    whole = plain.stage_size
    axes = [
        (expert_tp, ep, expert_etp)
        for expert_tp in (1, 2)
        for ep in (1, 2)
        for expert_etp in (1, 2, 3)
        if whole % (expert_tp * ep * expert_etp) == 0
    ]
    expert_tp, ep, expert_etp = draw(st.sampled_from(axes))
    return replace(plain, expert_tp=expert_tp, ep=ep, expert_etp=expert_etp)


engines = st.builds(
    EngineMesh,
    tp=st.sampled_from((1, 2, 4)),
    pp=st.sampled_from((1, 2)),
    dp=st.sampled_from((1, 2)),
    expert_parallel=st.booleans(),
)


def arrives_whole(
    config: dict[str, object],
    trainer: TrainerMesh,
    engine: EngineMesh,
    seed: int,
    transformer_engine: bool,
    colocated: bool,
) -> bool:
    """Plan a refit and carry it out; False where the model is refused."""
    family = family_from_config(config)
    if not family.traits.num_experts:
        trainer = replace(trainer, expert_tp=1, ep=1, expert_etp=1)
    options = TrainerOptions(
        vocab_multiple=1 + seed % 5,
        pad_for_alignment=(1, 4, 16)[seed % 3],
        transformer_engine=transformer_engine,
    )
    try:
        hosts = Hosts(ranks_per_host=3, colocated=colocated)
        sides = describe_cluster(Sides(family=family, trainer=trainer, engine=engine, options=options, hosts=hosts))
    except UnsupportedModelError:
        return False
    plan_options, staging_bytes = PlanOptions(split_bytes=1 + seed % 200), 64 + seed % 4000
    plan = sides.plan(plan_options)
    verdict = prove(plan, sides.sources, sides.destinations, plan_options)
    found = verify_in_memory(plan, sides.sources, sides.destinations, seed, staging_bytes)
    assert found.elements == verdict.elements
    assert found.peak_staged_bytes <= staging_bytes
    rank = seed % engine.size
    part = sides.plan(plan_options, PartOf("destination", rank))
    assert part.digests == {link: digest for link, digest in plan.digests.items() if link[1] == rank}
    assert part.transfers == tuple(item for item in plan.transfers if item.destination == rank)
    return True


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe", "DeepseekV3", "NemotronH"])
def test_random_models_arrive_whole(family: str) -> None:
    outcomes: Counter[bool] = Counter()

    @settings(
        max_examples=max(16, examples(72)),
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(configs(family), trainers(), engines, st.integers(0, 2**32), st.booleans(), st.booleans())
    def one(
        config: dict[str, object],
        trainer: TrainerMesh,
        engine: EngineMesh,
        seed: int,
        transformer_engine: bool,
        colocated: bool,
    ) -> None:
        outcomes[arrives_whole(config, trainer, engine, seed, transformer_engine, colocated)] += 1

    one()
    assert outcomes[True], "all were refused"
