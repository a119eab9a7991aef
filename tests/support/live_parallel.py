"""Megatron's process groups for a mesh, and what a model that is spread over it needs on a machine without GPUs."""

from __future__ import annotations

from typing import Any

import torch

from etp.param import ETPShardedParam
from megatron_patches.refit.models.mesh import TrainerMesh


def start_parallel_state(mesh: TrainerMesh, seed: int = 1, *, gloo: bool = True) -> None:
    """Make Megatron's process groups over the ranks that there are, in place of those of an earlier mesh.

    Args:
        mesh: whose groups.
        seed: for Megatron's own random numbers.
        gloo: whether to make the groups that Megatron uses beside NCCL's.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        virtual_pipeline_model_parallel_size=mesh.vpp if mesh.vpp > 1 else None,
        gtp_remat_size=mesh.etp,
        expert_model_parallel_size=mesh.ep,
        expert_tensor_parallel_size=mesh.expert_tp,
        expert_gtp_remat_size=mesh.expert_etp,
        create_gloo_process_groups=gloo,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def mesh_settings(mesh: TrainerMesh, dtype: torch.dtype) -> dict[str, Any]:
    """Settings of Megatron's configuration that the mesh, the parameters' dtype and the missing GPUs ask for."""
    return {
        "use_cpu_initialization": True,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "virtual_pipeline_model_parallel_size": mesh.vpp if mesh.vpp > 1 else None,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.expert_tp,
        "gtp_weight_remat_size": mesh.etp,
    }


def stage_arguments(mesh: TrainerMesh, chunk: int) -> dict[str, Any]:
    """Arguments of Megatron's models that depend on where the rank's ``chunk`` is in the pipeline, or on nothing."""
    from megatron.core import parallel_state

    stage = chunk if mesh.vpp > 1 else None
    return {
        "max_sequence_length": 64,
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        "parallel_output": False,
        "vp_stage": stage,
    }


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter or buffer, to be drawn anew on purpose: a shard's ``data`` refuses that."""
    return tensor.local_shard() if isinstance(tensor, ETPShardedParam) else tensor.data
