"""Megatron trainings whose steps are replayed from CUDA graphs report the very numbers of the same without graphs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gpu.bodies_megatron_graphs import train_counting_replays
from tests.gpu.devices import needs_gpus, needs_te
from tests.integration.cases import FP8_MODEL, GPT2, LLAMA, MOE, Case
from tests.integration.megatron_run import PRETRAIN_GPT, PRETRAIN_HYBRID, MegatronPool
from tests.support.launch import on_gpus

pytestmark = [
    pytest.mark.gpu,
    needs_te(),
    pytest.mark.skipif(not on_gpus(), reason="Megatron's trainings run on GPUs with --device cuda"),
]

TRANSPORTS = ("copy_engine", "c10d")
# Graphs need these, and another generator starts from other weights.
BOTH = "--te-rng-tracker --no-check-for-nan-in-loss-and-grad"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce"
PADDED_MOE = f"{MOE} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
BLOCKWISE = f"{OVERLAPPED} --fp8-format e4m3 --fp8-recipe blockwise"
TENSORWISE = f"{OVERLAPPED} --fp8-format hybrid --fp8-recipe tensorwise"
VIRTUAL_STAGES = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
FOUR_LAYERS = LLAMA.replace("--num-layers 2", "--num-layers 4")
# 20 steps, of which Megatron captures the fourth.
REPLAYED_STEPS = 16


def hybrid(pattern: str) -> str:
    """Flags of a model whose layers are those of the pattern: attention (*), MLP (-), experts (E)."""
    return f"{LLAMA.removeprefix('--num-layers 2 ')} --hybrid-layer-pattern {pattern}"


@dataclass(frozen=True)
class Graphs:
    """What is captured of a training.

    Attributes:
        name: what it covers.
        graphs: flags of the run with graphs only.
        ranks: processes of both runs.
        sharded: flags of both runs that shard weights.
        model: the model's flags.
        common: further flags of both runs.
        per_step: the least number of graphs that a rank replays in a step.
    """

    name: str
    graphs: str
    ranks: int = 2
    sharded: str = "--etp-size 2"
    model: str = LLAMA
    common: str = OVERLAPPED
    per_step: int = 1

    @property
    def script(self) -> Path:
        """The training script."""
        return PRETRAIN_HYBRID if "--hybrid-layer-pattern" in self.model else PRETRAIN_GPT

    def arguments(self, transport: str) -> tuple[str, ...]:
        """Command line without graphs."""
        case = Case(self.name, self.ranks, self.sharded, model=self.model, common=f"{self.common} {BOTH}")
        return case.sharded_arguments(transport)


EXPERTS = "--etp-size 2 --expert-etp-size 2"
# Each layer, or part of it, has a graph for its forward and one for its backward pass. There are two layers of a kind
# on each rank, and four microbatches.
GRAPHS = (
    Graphs("full_iteration", "full_iteration"),
    Graphs("full_iteration_tied_recomputed", "full_iteration", model=GPT2, common="--recompute-activations"),
    Graphs("full_iteration_experts", "full_iteration", sharded=EXPERTS, common=PADDED_MOE),
    Graphs("full_iteration_fp8", "full_iteration", model=FP8_MODEL, common=BLOCKWISE),
    Graphs("full_iteration_fp8_tensor", "full_iteration", model=FP8_MODEL, common=TENSORWISE),
    Graphs("layers_fp8", "local", model=FP8_MODEL, common=BLOCKWISE, per_step=32),
    *(
        Graphs(
            f"{name}_experts_fp8_{recipe}",
            graphs,
            sharded=EXPERTS,
            model=FP8_MODEL,
            common=f"{precision} {PADDED_MOE}",
            per_step=per_step,
        )
        for recipe, precision in (("block", BLOCKWISE), ("tensor", TENSORWISE))
        for name, graphs, per_step in (("full_iteration", "full_iteration", 1), ("layers_of", "local", 32))
    ),
    Graphs("layers", "local", per_step=16),
    Graphs("layers_no_prefetch", "local", sharded="--etp-size 2 --etp-prefetch-depth 0", per_step=16),
    Graphs("layers_of_experts", "local", sharded=EXPERTS, common=PADDED_MOE, per_step=16),
    Graphs("attention", "local --cuda-graph-modules attn", per_step=16),
    Graphs("mlp", "local --cuda-graph-modules mlp", per_step=16),
    Graphs("attention_and_mlp", "local --cuda-graph-modules attn mlp", model=GPT2, per_step=16),
    Graphs("hybrid_mlp", "local --cuda-graph-modules mlp", model=hybrid("*-*-"), per_step=16),
    Graphs(
        "hybrid_attention",
        "local --cuda-graph-modules attn",
        sharded=EXPERTS,
        model=hybrid("*E*E"),
        common=MOE,
        per_step=16,
    ),
    Graphs(
        "hybrid_experts",
        "local --cuda-graph-modules moe",
        sharded=EXPERTS,
        model=hybrid("*E*E"),
        common=PADDED_MOE,
        per_step=16,
    ),
    Graphs(
        "attention_and_router",
        "local --cuda-graph-modules attn moe_router",
        sharded=EXPERTS,
        common=PADDED_MOE,
        per_step=16,
    ),
    Graphs(
        "attention_router_and_preprocess",
        "local --cuda-graph-modules attn moe_router moe_preprocess",
        sharded=EXPERTS,
        common=PADDED_MOE,
        per_step=16,
    ),
    Graphs("stages_full_iteration", "full_iteration", ranks=4, model=FOUR_LAYERS, common=VIRTUAL_STAGES),
)


@pytest.mark.parametrize(
    ("graphs", "transport"),
    [
        pytest.param(
            graphs, transport, id=f"{graphs.ranks}ranks-{graphs.name}-{transport}", marks=needs_gpus(graphs.ranks)
        )
        for graphs in GRAPHS
        for transport in TRANSPORTS
    ],
)
def test_replayed_trainings_report_what_eager_ones_do(graphs: Graphs, transport: str) -> None:
    arguments, script = graphs.arguments(transport), graphs.script
    # Processes of its own, because Megatron keeps its graphs in classes.
    pool = MegatronPool()
    try:
        eager = pool.train(graphs.ranks, arguments, script)
        captured = (*arguments, "--cuda-graph-impl", *graphs.graphs.split())
        replayed = pool.run(train_counting_replays, graphs.ranks, 240.0, (captured, script))
    finally:
        pool.close()
    assert any(trajectory.losses for trajectory in eager)
    for expected, (found, replays) in zip(eager, replayed, strict=True):
        assert len(expected.grad_norms) == 20
        assert found.losses == expected.losses
        assert found.grad_norms == expected.grad_norms
        assert found.evaluations == expected.evaluations
        assert replays >= REPLAYED_STEPS * graphs.per_step
