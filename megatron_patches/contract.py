"""Lists the parts of megatron-core 0.19.2 that are used without being replaced: the seam's names and their callers.

If any of these changes in a new version, review it before supporting that version. ``registry.verify`` compares them
with the installed sources, as it does the sources of what is replaced.
"""

from __future__ import annotations

from megatron_patches.registry import SourceRecord, Table, relied_upon

_ENGINE = "megatron.core.tensor_parallel.generalized_tensor_parallelism"

_SEAM: tuple[tuple[str, str | None, str], ...] = (
    ("GTPChain", None, "832ff1b638d7f785"),
    ("GTPEmbeddingWeight", None, "df0e7bda41711d8c"),
    (
        "attach_gtp_to_presharded_module",
        "module, gtp_remat_group, pad_length, is_grouped=False",
        "46435673e13eadd1",
    ),
    (
        "classify_gtp_remat_chains",
        "model, *, cuda_graph_modules=None, moe_shared_expert_overlap=False, cuda_graph_impl='none'",
        "92d3777338f00469",
    ),
    (
        "configure_gtp_remat_from_recipe",
        "*, fp4=False, fp8_recipe=None, fp8=False, calculate_per_token_loss=False",
        "c670e53bf31453ef",
    ),
    ("dequantize_gtp_native_fp8", "param", "101d3e3ff3ed587e"),
    ("get_ag_stream", "chain_id: str=GTPChain.GRAPHED.value, group=None", "e9f627389601f258"),
    ("get_rs_stream", "chain_id: str=GTPChain.GRAPHED.value, group=None", "0862f8bc9fd21f40"),
    ("gtp_native_fp8_load_context", "module", "3710e6f5862ddf28"),
    ("gtp_remat_shard_dim0", "dim0, gtp_remat_group", "dcdfc7416959b51b"),
    ("is_gtp_param", "param", "b65983b69619f6ba"),
    (
        "make_sharded_tensors_for_checkpoint_with_gtp_remat",
        (
            "state_dict, prefix, tensor_parallel_layers_axis_map=None, sharded_offsets=(), "
            "extra_state_suffix='_extra_state', *, tp_group, dp_cp_group, intra_dp_cp_group=None"
        ),
        "0c7d90226319450b",
    ),
    ("set_cuda_graph_mempool", "device, mempool", "c6c2be298b976c75"),
    (
        "wait_async_comms",
        "chain_id: str=None, skip_rs: bool=False, finalize_after_drain: bool=False",
        "5b10e24acb8931f7",
    ),
    ("wait_for_gtp_grad_reduction_on_current_stream", "", "99378446a46ec546"),
    ("wrap_module_params_gtp", "module, weight_names, gtp_remat_group, is_grouped=None", "e9f038d4ce4e0524"),
)

_CALLERS: Table = {
    "megatron.core.tensor_parallel.gtp_api": {"": ("397c9ad291d8565c", "the names to replace")},
    "megatron.core.tensor_parallel.layers": {
        "VocabParallelEmbedding": ("176379dbe1bf98be", "cuts the embedding and gathers it in forward"),
        "RowParallelLinear": ("d08e2c12b0e86e47", "cuts its weight when built"),
        "LinearWithGradAccumulationAndAsyncCommunication": ("8ef62e685ce853b7", "gathers in forward and backward"),
        "param_is_not_gtp_duplicate": ("35ed8dbc114c8f2f", "counts a shard's gradient norm once"),
        "copy_gtp_attributes": ("4f764e90ef774045", "marks the optimizer's copies"),
    },
    "megatron.core.transformer.utils": {
        "make_sharded_tensors_for_checkpoint": ("310e152a83325987", "asks the seam for the place of each shard")
    },
    "megatron.core.distributed.finalize_model_grads": {
        "finalize_model_grads": ("018f8aa3f1b46fca", "waits for the seam before data-parallel reduction"),
        "_allreduce_replicated_grads_over_gtp_remat_group": (
            "07d9bfe476230404",
            "averages replicated gradients over the shard group",
        ),
    },
    "megatron.core.optimizer.optimizer": {
        "_backfill_gtp_sharded_param_map": ("4754e2e0d747cde0", "finds a shard's optimizer state")
    },
    "megatron.core.optimizer.emerging_optimizers": {
        "TensorParallelMuon": (
            "53a2423addbcb326",
            "orthogonalizes a matrix, and is replaced by a subclass with a step of its own",
        ),
        "_muon_config_to_kwargs": ("8a4eeda57fb39948", "gives that subclass its arguments"),
    },
    "megatron.core.parallel_state": {"initialize_model_parallel": ("9534561a0c23f87d", "builds the shard groups")},
    "megatron.core.model_parallel_config": {
        "resolve_tensor_parallel_weight_shards": ("0efa4a663dbace04", "derives the shard group's size")
    },
    "megatron.core.full_cuda_graph": {
        "FullCudaGraphWrapper": (
            "035a5978b6c9733b",
            "captures forward and backward passes and the end of their reductions in one graph",
        ),
        "get_shared_capture_stream": ("77530b1eec2ca699", "is the stream on which whole iterations are captured"),
    },
    "megatron.core.transformer.cuda_graphs": {
        "_CudaGraphRunner": (
            "6faf9f73643aa4c0",
            "calls wait_async_comms at the end of each graph, and asks shards for their neighbours",
        ),
        "_CudagraphReplayNode": ("045bdbdab8f336d2", "calls a shard's _grad_accum_hook behind a replay"),
        "get_gtp_runner_streams": ("9400ce43ea240d72", "names the streams that layers are replayed on"),
    },
    "megatron.training.global_vars": {
        "set_global_variables": ("3e26f317b89c7f92", "counts microbatches over all data")
    },
}


def records() -> tuple[SourceRecord, ...]:
    """Every definition that is used without being replaced."""
    seam = (
        SourceRecord(
            target=f"{_ENGINE}:{name}",
            signature=signature,
            sha256=sha256,
            reason="replaced through gtp_api, with the same meaning",
        )
        for name, signature, sha256 in _SEAM
    )
    return (*seam, *relied_upon(_CALLERS))
