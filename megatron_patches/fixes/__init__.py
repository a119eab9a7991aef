"""Fixes for bugs of megatron-core 0.19.2 with sharded weights, one file per bug.

Every fix is inactive if no weight is sharded, so ``--etp-size 1`` is bitwise equal to stock Megatron, except that
``--rope-scaling-factor`` has an effect, the ``--yarn-`` flags have one with ``--multi-latent-attention``, the backward
pass of recomputed MLPs with biases ends, and gradients of experts' biases are right with sequence parallelism.
"""

from __future__ import annotations

from megatron_patches.fixes import (
    aligned_grad_sync,
    dataloader_state,
    dataset_build,
    embeddings,
    evaluation,
    expert_biases,
    expert_gradients,
    expert_groups,
    frozen,
    fused_accumulation,
    graph_scopes,
    grouped_experts,
    latent_yarn,
    muon,
    parameter_norm,
    recomputed_biases,
    rotary_scaling,
    te_construction,
    zeros_in_gradients,
)
from megatron_patches.registry import PatchRecord


def records() -> tuple[PatchRecord, ...]:
    """Every fix."""
    return (
        dataloader_state.RECORD,
        dataset_build.RECORD,
        expert_biases.RECORD,
        expert_groups.RECORD,
        expert_gradients.RECORD,
        evaluation.RECORD,
        embeddings.RECORD,
        aligned_grad_sync.RECORD,
        frozen.RECORD,
        fused_accumulation.RECORD,
        graph_scopes.RECORD,
        grouped_experts.RECORD,
        latent_yarn.RECORD,
        *muon.RECORDS,
        parameter_norm.RECORD,
        *recomputed_biases.RECORDS,
        rotary_scaling.RECORD,
        te_construction.RECORD,
        *zeros_in_gradients.RECORDS,
    )
