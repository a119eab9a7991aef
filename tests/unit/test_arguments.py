"""The flags, their meaning for Megatron, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from etp.config import EtpConfig, GradReduction, TransportName
from megatron_patches import weight_shard_api
from megatron_patches.arguments import (
    UnsupportedConfigurationError,
    add_arguments,
    apply_to_megatron,
    check,
    check_graphs,
    config_from_args,
    is_active,
)
from megatron_patches.refusals import GRAPH_REFUSALS, REFUSALS
from megatron_patches.weight_shard_api import WeightShardApi


def parsed(*flags: str, **megatron: object) -> argparse.Namespace:
    """``flags`` parsed, with what Megatron's own parser would have set; ``megatron`` overrides that."""
    args = add_arguments(argparse.ArgumentParser()).parse_args(flags)
    defaults: dict[str, object] = {
        "world_size": 8,
        "rank": 0,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "tensor_parallel_num_weight_shards": None,
        "expert_tensor_parallel_num_weight_shards": None,
        "num_experts": None,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "eval_micro_batch_size": None,
        "eval_global_batch_size": None,
        "calculate_per_token_loss": False,
        "ckpt_format": "torch_dist",
        "non_persistent_ckpt_type": None,
        "use_cpu_initialization": False,
        "transformer_impl": "transformer_engine",
        "cuda_graph_impl": "none",
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "optimizer": "adam",
        "use_distributed_optimizer": False,
        "dist_ckpt_optim_fully_reshardable": False,
    }
    for name, value in {**defaults, **megatron}.items():
        setattr(args, name, value)
    return args


def applied(*flags: str, **megatron: object) -> argparse.Namespace:
    """:func:`parsed`, with Megatron's shard counts set."""
    args = parsed(*flags, **megatron)
    apply_to_megatron(args)
    return args


@pytest.mark.parametrize(("flags", "resharded"), [((), False), (("--etp-size", "2"), True)])
def test_shards_choose_the_layout_of_distributed_optimizer_state(flags: tuple[str, ...], resharded: bool) -> None:
    assert applied(*flags, use_distributed_optimizer=True).dist_ckpt_optim_fully_reshardable is resharded


@pytest.mark.parametrize(
    ("flags", "megatron", "overlapped"),
    [
        ("", {}, True),
        ("--etp-size 4", {}, False),
        ("--etp-size 2", {}, True),
        ("--etp-size 2", {"context_parallel_size": 2}, True),
        ("--etp-size 2", {"pipeline_model_parallel_size": 2}, False),
        ("--etp-size 4", {"num_experts": 0}, False),
        ("--etp-size 4", {"num_experts": 8}, True),
        ("--etp-size 4 --expert-etp-size 2", {"num_experts": 8, "expert_model_parallel_size": 2}, False),
    ],
)
def test_nothing_is_overlapped_over_one_replica(flags: str, megatron: dict[str, object], overlapped: bool) -> None:
    args = applied(*flags.split(), world_size=8, overlap_grad_reduce=True, overlap_param_gather=True, **megatron)
    assert args.overlap_grad_reduce is args.overlap_param_gather is overlapped


def test_defaults_leave_megatron_alone() -> None:
    args = applied()
    assert (args.etp_size, args.expert_etp_size) == (1, 1)
    assert args.tensor_parallel_num_weight_shards is None
    assert args.expert_tensor_parallel_num_weight_shards is None
    assert not is_active(args)
    assert config_from_args(args).engine == EtpConfig()


def test_sizes_multiply_tensor_parallelism() -> None:
    args = applied("--etp-size", "4", "--expert-etp-size", "2", num_experts=8, expert_tensor_parallel_size=1)
    assert args.tensor_parallel_num_weight_shards == 8
    assert args.expert_tensor_parallel_num_weight_shards == 2
    assert is_active(args)


def test_expert_tensor_parallelism_defaults_to_tensor_parallelism() -> None:
    args = applied("--expert-etp-size", "2", num_experts=8)
    assert args.expert_tensor_parallel_num_weight_shards == 4


def test_megatrons_own_flag_is_taken_for_the_size() -> None:
    args = applied(tensor_parallel_num_weight_shards=8)
    assert args.etp_size == 4


@pytest.mark.parametrize("shards", [0, 1, 5])
def test_megatrons_own_flag_alone_is_named(shards: int) -> None:
    message = f"--tensor-parallel-num-weight-shards is {shards}; it must be a positive multiple of tensor parallelism 2"
    with pytest.raises(UnsupportedConfigurationError, match=message):
        applied(tensor_parallel_num_weight_shards=shards)


def test_two_flags_that_disagree() -> None:
    with pytest.raises(UnsupportedConfigurationError, match="--tensor-parallel-num-weight-shards is 8; give one"):
        applied("--etp-size", "2", tensor_parallel_num_weight_shards=8)


@pytest.mark.parametrize("size", ["0", "-2"])
def test_sizes_below_one(size: str) -> None:
    with pytest.raises(UnsupportedConfigurationError, match=f"--etp-size is {size}; it must be at least 1"):
        applied("--etp-size", size)


@pytest.mark.parametrize(
    "name",
    [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "micro_batch_size",
        "eval_micro_batch_size",
    ],
)
def test_sizes_of_megatron_by_which_nothing_divides(name: str) -> None:
    """They are divided by before Megatron looks at them."""
    with pytest.raises(UnsupportedConfigurationError, match=f"--{name.replace('_', '-')} is 0; it must be at least 1"):
        applied("--etp-size", "2", **{name: 0})


def test_every_flag_reaches_the_engine() -> None:
    flags = (
        "--etp-size 2 --etp-transport c10d --etp-prefetch-depth 3 --etp-resident-bytes 4096 --etp-pad-for-alignment 8 "
        "--etp-reduce-once-per-iteration --no-etp-fp32-accumulation --etp-print-chains --etp-timeout 12.5"
    )
    config = config_from_args(applied(*flags.split(), calculate_per_token_loss=True))
    assert config.print_chains
    assert config.engine == EtpConfig(
        transport=TransportName.C10D,
        prefetch_depth=3,
        resident_bytes=4096,
        pad_for_alignment=8,
        grad_reduction=GradReduction.SUM,
        fp32_accumulation=False,
        reduce_once_per_iteration=True,
        timeout_s=12.5,
    )


@pytest.mark.parametrize("async_save", [False, True])
def test_parameters_that_another_process_saves_stay_where_it_can_read_them(
    monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    """Symmetric memory has no handle for another process, which the writer of --async-save would wait for."""
    moved: list[object] = []
    monkeypatch.setattr(weight_shard_api, "move_into_symmetric_memory", lambda chunk, _runtime: moved.append(chunk))
    chunk = torch.nn.Linear(2, 2)
    WeightShardApi(config_from_args(applied("--etp-size", "2", async_save=async_save))).classify_chains(chunk)
    assert moved == ([] if async_save else [chunk])


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--etp-prefetch-depth", "-1"),
        ("--etp-resident-bytes", "-1"),
        ("--etp-pad-for-alignment", "-1"),
        ("--etp-timeout", "-1.0"),
    ],
)
def test_a_value_out_of_range_is_named_by_its_flag(flag: str, value: str) -> None:
    with pytest.raises(UnsupportedConfigurationError, match=f"^{flag} is {value}; it must be"):
        config_from_args(applied(f"{flag}={value}"))


def test_help_says_what_etp_is_not() -> None:
    text = " ".join(add_arguments(argparse.ArgumentParser()).format_help().split())
    assert "NOT Megatron's expert tensor parallelism (--expert-tensor-parallel-size)" in text
    for flag in ("--etp-size", "--expert-etp-size", "--etp-transport", "--etp-timeout", "--no-etp-fp32-accumulation"):
        assert flag in text


def test_size_that_does_not_divide_data_parallelism() -> None:
    with pytest.raises(UnsupportedConfigurationError) as error:
        check(applied("--etp-size", "3"))
    assert str(error.value) == (
        "--etp-size 3 does not divide the data-parallel size 4 (8 ranks over tensor 2 x pipeline 1 x context 1); "
        "use one of 1, 2, 4, or change the number of ranks"
    )


@pytest.mark.parametrize(("flags", "batch"), [((), None), (("--etp-size", "2"), 8)])
def test_the_default_batch_is_one_microbatch_of_each_rank_that_reads_data(
    flags: tuple[str, ...], batch: int | None
) -> None:
    args = applied(*flags, micro_batch_size=2, global_batch_size=None)
    assert args.global_batch_size == batch


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"eval_global_batch_size": 6}, "--eval-global-batch-size 6 does not divide by --micro-batch-size 1"),
        ({"eval_global_batch_size": 2}, "--eval-global-batch-size 2 does not divide by --micro-batch-size 1"),
        ({"eval_micro_batch_size": 4}, "--global-batch-size 8 does not divide by --eval-micro-batch-size 4"),
        ({"global_batch_size": 6}, "--global-batch-size 6 does not divide by --micro-batch-size 1"),
    ],
)
def test_evaluations_that_would_skip_data(sizes: dict[str, int], named: str) -> None:
    with pytest.raises(UnsupportedConfigurationError, match=f"^{named} x data-parallel size 4; use a multiple of"):
        check(applied("--etp-size", "2", **sizes))
    check(applied(**sizes))  # Megatron's own check is right without shards


def test_expert_size_that_does_not_divide() -> None:
    with pytest.raises(UnsupportedConfigurationError, match=r"--expert-etp-size 4 does not divide .* size 2"):
        check(applied("--expert-etp-size", "4", num_experts=8, expert_model_parallel_size=2))


@pytest.mark.parametrize("experts", [None, 0])
def test_expert_size_without_experts(experts: int | None) -> None:
    with pytest.raises(UnsupportedConfigurationError, match="the model has no experts; set --num-experts"):
        check(applied("--expert-etp-size", "2", num_experts=experts))


def test_ranks_that_do_not_divide_by_the_model() -> None:
    with pytest.raises(UnsupportedConfigurationError, match="8 ranks do not divide by tensor 3"):
        check(applied("--etp-size", "2", tensor_model_parallel_size=3))


@pytest.mark.parametrize(
    ("settings", "culprit"),
    [
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
        ({"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute"),
        (
            {"overlap_moe_expert_parallel_comm": True, "overlap_grad_reduce": True, "align_grad_reduce": True},
            "--overlap-moe-expert-parallel-comm and --overlap-grad-reduce",
        ),
        (
            {
                "overlap_moe_expert_parallel_comm": True,
                "overlap_grad_reduce": True,
                "align_grad_reduce": False,
                "pipeline_model_parallel_size": 2,
                "world_size": 16,
            },
            "--overlap-moe-expert-parallel-comm and --overlap-grad-reduce",
        ),
        ({"moe_single_grouped_weight": True}, "--moe-single-grouped-weight"),
        ({"use_transformer_engine_op_fuser": True}, "--use-transformer-engine-op-fuser"),
        ({"use_grouped_gemm_for_shared_expert": True}, "--use-grouped-gemm-for-shared-expert"),
        ({"transformer_impl": "inference_optimized"}, "--transformer-impl inference_optimized"),
        ({"experimental_attention_variant": "dsa"}, "--experimental-attention-variant dsa"),
        ({"hybrid_layer_pattern": "M-D-"}, "layers of DeepSeek sparse attention (D) in --hybrid-layer-pattern"),
        ({"hybrid_override_pattern": "MD"}, "layers of DeepSeek sparse attention (D) in --hybrid-layer-pattern"),
        ({"mtp_hybrid_override_pattern": "D"}, "layers of DeepSeek sparse attention (D) in --hybrid-layer-pattern"),
        (
            {
                "pipeline_model_parallel_layout": "Ett|tt|m|L",
                "pipeline_model_parallel_size": 2,
                "world_size": 16,
            },
            "--pipeline-model-parallel-layout Ett|tt|m|L",
        ),
        (
            {"save": ".", "mtp_num_layers": 1, "pipeline_model_parallel_size": 2},
            "--save, MTP layers on the last pipeline stage and tied embeddings",
        ),
        (
            {"save": ".", "hybrid_layer_pattern": "M*|-E/*E", "pipeline_model_parallel_size": 2},
            "--save, MTP layers on the last pipeline stage and tied embeddings",
        ),
        (
            {
                "save": ".",
                "mtp_num_layers": 2,
                "pipeline_model_parallel_layout": "Et*3|tmmL",
                "pipeline_model_parallel_size": 2,
            },
            "--save, MTP layers on the last pipeline stage and tied embeddings",
        ),
        ({"mtp_detach_heads": True}, "--mtp-detach-heads"),
        ({"qk_clip": True}, "--qk-clip"),
        ({"mla_down_proj_fusion": True}, "--mla-down-proj-fusion"),
        ({"cpu_offloading_num_layers": 1}, "--cpu-offloading-num-layers"),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "attn_proj"]},
            "--offload-modules with sharded weights (qkv_linear, attn_proj, and expert_fc1 with --expert-etp-size)",
        ),
        ({"moe_use_upcycling": True}, "--moe-use-upcycling"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
        ({"ckpt_format": "torch"}, "--ckpt-format torch"),
        ({"ckpt_format": "fsdp_dtensor"}, "--ckpt-format fsdp_dtensor"),
        ({"ckpt_convert_format": "torch"}, "--ckpt-convert-format torch"),
        ({"non_persistent_ckpt_type": "local"}, "--non-persistent-ckpt-type local"),
        (
            {"distrib_optim_fully_reshardable_mem_efficient": True},
            "--distrib-optim-fully-reshardable-mem-efficient",
        ),
        ({"ddp_average_in_collective": True}, "--ddp-average-in-collective"),
        ({"overlap_param_gather_with_optimizer_step": True}, "--overlap-param-gather-with-optimizer-step"),
        ({"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances 2"),
        (
            {"use_tp_pp_dp_mapping": True, "pipeline_model_parallel_size": 2},
            "--use-tp-pp-dp-mapping and --pipeline-model-parallel-size 2",
        ),
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
        ({"perform_rl_step": True}, "--perform-rl-step"),
        ({"data_parallel_random_init": True}, "--data-parallel-random-init"),
        ({"init_model_with_meta_device": True}, "--init-model-with-meta-device"),
        ({"use_cpu_initialization": True}, "--use-cpu-initialization with --transformer-impl transformer_engine"),
        ({"inprocess_restart": True}, "--inprocess-restart"),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "--fp8-recipe delayed"),
        ({"fp8": "e4m3", "fp8_recipe": "custom"}, "--fp8-recipe custom"),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_output_proj": True}, "--fp8-output-proj"),
        (
            {"fp8": "e4m3", "fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True},
            "--reuse-grad-buf-for-mxfp8-param-ag",
        ),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param_gather": True}, "--fp8-param-gather"),
        (
            {"fp8": "e4m3", "fp8_recipe": "blockwise", "transformer_impl": "local"},
            "--fp8-format without Transformer Engine",
        ),
        ({"fp4": "e2m1", "fp4_recipe": "custom"}, "--fp4-recipe custom"),
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": True}, "--fp4-param-gather"),
        (
            {"fp4": "e2m1", "fp4_recipe": "nvfp4", "transformer_impl": "local"},
            "--fp4-format without Transformer Engine",
        ),
        ({"te_precision_config_file": "precision.yaml"}, "--te-precision-config-file"),
        ({"kitchen_config_file": "kitchen.yaml"}, "--kitchen-config-file"),
        ({"kitchen_recipe_number": 0}, "--kitchen-recipe-number"),
        ({"save_wgrads_interval": 4}, "--save-wgrads-interval"),
        ({"save_params_interval": 4}, "--save-params-interval"),
        ({"tp_comm_overlap": True}, "--tp-comm-overlap"),
        ({"optimizer": "soap"}, "--optimizer soap"),
        (
            {"optimizer": "muon", "use_distributed_optimizer": True},
            "--optimizer muon or lion and --use-distributed-optimizer",
        ),
        (
            {"optimizer": "lion", "use_distributed_optimizer": True},
            "--optimizer muon or lion and --use-distributed-optimizer",
        ),
    ],
)
def test_refusals_name_the_culprit_and_the_way_out(settings: dict[str, object], culprit: str) -> None:
    args = applied("--etp-size", "2", **settings)
    with pytest.raises(UnsupportedConfigurationError) as error:
        check(args)
    way_out = next(refusal.way_out for refusal in REFUSALS if refusal.applies(args))
    assert str(error.value) == f"--etp-size does not work with {culprit}; {way_out}"
    check(applied(**settings))  # without shards nothing is refused


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (
            {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
            "--fp8-recipe mxfp8 on a GPU before Blackwell; use --fp8-recipe block",
        ),
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4"}, "--fp4-format on a GPU before Blackwell; use --fp8-format e4m3"),
    ],
)
def test_what_the_gpu_cannot_multiply_is_refused(
    settings: dict[str, object], refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(applied("--etp-size", "2", **settings))  # there is no GPU that cannot
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(UnsupportedConfigurationError, match=refusal):
        check(applied("--etp-size", "2", **settings))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    check(applied("--etp-size", "2", **settings))


def test_muon_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    args = applied("--etp-size", "2", optimizer="muon")
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "0.3.0")
    check(args)
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "0.30.0")
    with pytest.raises(UnsupportedConfigurationError, match=r"emerging-optimizers 0\.3; pip install"):
        check(args)


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap_moe_expert_parallel_comm": True},
        {
            "overlap_moe_expert_parallel_comm": True,
            "overlap_grad_reduce": True,
            "align_grad_reduce": True,
            "pipeline_model_parallel_size": 2,
        },
        {"use_tp_pp_dp_mapping": True},
        {"use_tp_pp_dp_mapping": True, "pipeline_model_parallel_size": 2, "num_experts": 4, "expert_etp_size": 2},
        {"experimental_attention_variant": "gated_delta_net"},
        {"hybrid_layer_pattern": "MG*-E/M"},
        {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2},  # nothing is saved
        {"save": ".", "mtp_num_layers": 1},
        {
            "save": ".",
            "mtp_num_layers": 1,
            "pipeline_model_parallel_size": 2,
            "untie_embeddings_and_output_weights": True,
        },
        {
            "save": ".",
            "mtp_num_layers": 1,
            "pipeline_model_parallel_layout": "Et|tt|m|L",
            "pipeline_model_parallel_size": 4,
            "world_size": 16,
        },
        {"ckpt_convert_format": "torch_dist"},
        {"num_distributed_optimizer_instances": 1},
        {
            "fine_grained_activation_offloading": True,
            "offload_modules": ["core_attn", "moe_act", "attn_norm", "mlp_norm", "expert_fc1"],
        },
        {"cpu_offloading_num_layers": 0, "offload_modules": ["qkv_linear"]},
        {"fp8": "hybrid", "fp8_recipe": "tensorwise", "moe_router_padding_for_quantization": True},
        {"fp8": "e4m3", "fp8_recipe": "blockwise", "first_last_layers_bf16": True, "etp_pad_for_alignment": 0},
    ],
)
def test_what_works_is_not_refused(settings: dict[str, object]) -> None:
    check(applied("--etp-size", "2", **settings))


@pytest.mark.parametrize(
    ("settings", "culprit"),
    [
        ({"cuda_graph_impl": "transformer_engine"}, "--cuda-graph-impl transformer_engine"),
        (
            {"cuda_graph_impl": "full_iteration", "overlap_param_gather": True},
            "--cuda-graph-impl full_iteration and --overlap-param-gather",
        ),
        (
            {"cuda_graph_impl": "local", "etp_reduce_once_per_iteration": True},
            "--cuda-graph-impl local and --etp-reduce-once-per-iteration",
        ),
    ],
)
def test_what_cannot_be_captured_is_refused(settings: dict[str, object], culprit: str) -> None:
    with pytest.raises(UnsupportedConfigurationError) as error:
        check_graphs(applied("--etp-size", "2", **settings))
    way_out = next(refusal.way_out for refusal in GRAPH_REFUSALS if refusal.culprit == culprit)
    assert str(error.value) == f"--etp-size does not work with {culprit}; {way_out}"
    check_graphs(applied(**settings))  # without shards nothing is refused


def test_layer_graphs_of_sharded_experts_alone_are_refused() -> None:
    with pytest.raises(UnsupportedConfigurationError, match=r"--expert-etp-size does not .* only experts"):
        check_graphs(applied("--expert-etp-size", "2", num_experts=4, cuda_graph_impl="local"))


def test_offloading_what_sharded_experts_save_is_refused() -> None:
    settings = {"fine_grained_activation_offloading": True, "offload_modules": ["expert_fc1"], "num_experts": 4}
    with pytest.raises(UnsupportedConfigurationError, match="--offload-modules with sharded weights"):
        check(applied("--expert-etp-size", "2", **settings))


def test_delayed_gradients_of_sharded_experts_are_refused() -> None:
    settings = {"num_experts": 4, "overlap_dispatch_backward_with_experts_wgrad": True}
    with pytest.raises(UnsupportedConfigurationError, match="--overlap-dispatch-backward-with-experts-wgrad"):
        check(applied("--expert-etp-size", "2", **settings))
    check(applied("--etp-size", "2", **settings))


@pytest.mark.parametrize("implementation", ["none", "local", "full_iteration"])
def test_what_can_be_captured_is_not_refused(implementation: str) -> None:
    check_graphs(applied("--etp-size", "2", cuda_graph_impl=implementation))


def test_a_whole_iteration_is_captured_only_if_its_stages_do_not_wait_for_the_device() -> None:
    stages = {"cuda_graph_impl": "full_iteration", "pipeline_model_parallel_size": 2}
    check_graphs(applied("--etp-size", "2", **stages, overlap_p2p_comm=True))
    with pytest.raises(UnsupportedConfigurationError, match="set --num-layers-per-virtual-pipeline-stage"):
        check_graphs(applied("--etp-size", "2", **stages, overlap_p2p_comm=False))
    with pytest.raises(UnsupportedConfigurationError, match="--cuda-graph-impl local and pipeline stages"):
        check_graphs(applied("--etp-size", "2", **stages | {"cuda_graph_impl": "local"}))


ANY_NUMBER = {"num_experts": 4, "moe_token_dispatcher_type": "alltoall"}
PADDED = {**ANY_NUMBER, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
HYBRID = {"hybrid_layer_pattern": "*E*E"}


@pytest.mark.parametrize(
    ("settings", "culprit"),
    [
        ({"cuda_graph_modules": ["moe_router"], **ANY_NUMBER}, "any number of tokens"),
        ({"cuda_graph_modules": ["attn", "moe_preprocess"], **ANY_NUMBER, **HYBRID}, "any number of tokens"),
        ({"cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"], **PADDED}, ""),
        ({"cuda_graph_modules": ["moe"], **PADDED}, "outside of a hybrid model"),
        ({"cuda_graph_modules": ["attn"], **ANY_NUMBER}, "any number of tokens"),
        ({"cuda_graph_modules": [], **ANY_NUMBER}, "any number of tokens"),
        ({"cuda_graph_modules": [], **ANY_NUMBER, **HYBRID}, "any number of tokens"),
        ({"cuda_graph_impl": "full_iteration", **ANY_NUMBER}, "any number of tokens"),
        ({"cuda_graph_modules": ["attn"], **ANY_NUMBER, **HYBRID}, ""),
        ({"cuda_graph_modules": ["attn"], **PADDED}, ""),
        ({"cuda_graph_modules": ["moe"], **PADDED, **HYBRID}, ""),
        ({"cuda_graph_impl": "full_iteration", **PADDED}, ""),
        ({"cuda_graph_impl": "full_iteration", **ANY_NUMBER, "moe_token_dispatcher_type": "flex"}, ""),
    ],
)
def test_experts_are_captured_where_megatron_can(settings: dict[str, object], culprit: str) -> None:
    from megatron.core.transformer.enums import CudaGraphModule

    named = [CudaGraphModule[str(name)] for name in settings.get("cuda_graph_modules", ())]  # type: ignore[attr-defined]
    args = applied("--etp-size", "2", **{"cuda_graph_impl": "local", **settings, "cuda_graph_modules": named})
    if not culprit:
        check_graphs(args)
        return
    with pytest.raises(UnsupportedConfigurationError, match=culprit):
        check_graphs(args)


def test_folders_of_checkpoints_are_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing, file, full = tmp_path / "missing", tmp_path / "file", tmp_path / "full"
    file.write_text("")
    full.mkdir()
    (full / "latest_checkpointed_iteration.txt").write_text("4")

    def checked(**settings: Any) -> None:
        check(applied("--etp-size", "2", **settings))

    checked(save=str(missing / "deep"), load=str(full))
    checked(save=str(missing), load=str(missing))
    checked(load=str(missing), pretrained_checkpoint=str(full))
    with pytest.raises(UnsupportedConfigurationError, match="/missing has no checkpoint: there is no latest_check"):
        checked(load=str(missing), save=str(full))
    with pytest.raises(UnsupportedConfigurationError, match="/missing has no checkpoint: there is no latest_check"):
        checked(load=str(missing), save=str(missing), exit_on_missing_checkpoint=True)
    with pytest.raises(UnsupportedConfigurationError, match=r"/file/deep cannot be written: .*/file is no folder"):
        checked(save=str(file / "deep"))
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(UnsupportedConfigurationError, match=r"/missing cannot be written: .* must not be written"):
        checked(save=str(missing))


def test_a_checkpoint_is_looked_for_where_megatron_looks(tmp_path: Path) -> None:
    """Only --ckpt-step needs no tracker, and only --non-persistent-ckpt-type global looks into other folders."""
    load, fast = tmp_path / "load", tmp_path / "fast"
    for folder in (load / "non_persistent", fast):
        folder.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("4")

    def checked(**settings: Any) -> None:
        check(applied("--etp-size", "2", load=str(load), **settings))

    (load / "iter_0000004").mkdir()
    checked(ckpt_step=4)
    checked(non_persistent_ckpt_type="global")
    with pytest.raises(UnsupportedConfigurationError, match="/load has no checkpoint"):
        checked()
    (load / "non_persistent" / "latest_checkpointed_iteration.txt").unlink()
    checked(non_persistent_ckpt_type="global", non_persistent_global_ckpt_dir=str(fast))
    with pytest.raises(UnsupportedConfigurationError, match="/load has no checkpoint"):
        checked(non_persistent_ckpt_type="global")


def test_a_vocabulary_without_entries() -> None:
    with pytest.raises(UnsupportedConfigurationError, match="does not work with --vocab-size 0; give the number"):
        check(applied("--etp-size", "2", vocab_size=0))


def test_variables_of_transformer_engine_with_which_shards_train_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM", "1")
    check(applied("--etp-size", "2"))
    with pytest.raises(UnsupportedConfigurationError, match="USE_FUSED_GROUPED_GEMM in the environment and"):
        check(applied("--expert-etp-size", "2", num_experts=8))
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "high_precision")
    with pytest.raises(UnsupportedConfigurationError, match="with NVTE_BACKWARD_OVERRIDE=high_precision in the envir"):
        check(applied("--etp-size", "2"))


MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
NVFP4 = {"fp4": "e2m1", "fp4_recipe": "nvfp4"}


@pytest.mark.parametrize(
    ("variable", "value", "settings", "refused"),
    [
        ("NVTE_BACKWARD_OVERRIDE", "dequantized", MXFP8, True),
        ("NVTE_BACKWARD_OVERRIDE", "dequantized", NVFP4, True),
        ("NVTE_BACKWARD_OVERRIDE", "dequantized", {"fp8": "e4m3", "fp8_recipe": "blockwise"}, False),
        ("NVTE_BACKWARD_OVERRIDE", "dequantized", {"fp8_recipe": "mxfp8", "fp4_recipe": "nvfp4"}, False),
        ("NVTE_NVFP4_4OVER6", "weights", NVFP4, True),
        ("NVTE_NVFP4_4OVER6", "all", NVFP4, True),
        ("NVTE_NVFP4_4OVER6", "activations", NVFP4, False),
        ("NVTE_NVFP4_4OVER6", "all", MXFP8, False),
    ],
)
def test_variables_of_transformer_engine_that_a_recipe_would_refuse_at_its_first_visit(
    variable: str, value: str, settings: dict[str, object], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(applied("--etp-size", "2", **settings))
    monkeypatch.setenv(variable, value)
    if not refused:
        check(applied("--etp-size", "2", **settings))
        return
    with pytest.raises(UnsupportedConfigurationError, match=f"{variable}=.* in the environment with .*; unset it"):
        check(applied("--etp-size", "2", **settings))


@pytest.mark.filterwarnings("ignore")  # Megatron warns of what is not installed
def test_the_refused_flags_are_megatrons() -> None:
    """A flag that was renamed would never be refused."""
    from megatron.training.arguments import add_megatron_arguments

    known = vars(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([]))
    checked = {
        "delay_wgrad_compute",
        "defer_embedding_wgrad_compute",
        "moe_single_grouped_weight",
        "use_megatron_fsdp",
        "use_torch_fsdp2",
        "ckpt_format",
        "ckpt_convert_format",
        "mla_down_proj_fusion",
        "cpu_offloading_num_layers",
        "fine_grained_activation_offloading",
        "offload_modules",
        "overlap_dispatch_backward_with_experts_wgrad",
        "inprocess_restart",
        "non_persistent_ckpt_type",
        "distrib_optim_fully_reshardable_mem_efficient",
        "ddp_average_in_collective",
        "init_model_with_meta_device",
        "use_cpu_initialization",
        "transformer_impl",
        "fp8",
        "fp8_recipe",
        "fp8_param_gather",
        "fp4",
        "fp4_recipe",
        "fp4_param_gather",
        "fp8_output_proj",
        "reuse_grad_buf_for_mxfp8_param_ag",
        "cuda_graph_impl",
        "cuda_graph_modules",
        "spec",
        "moe_token_dispatcher_type",
        "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity",
        "overlap_param_gather",
        "overlap_param_gather_with_optimizer_step",
        "optimizer",
        "overlap_moe_expert_parallel_comm",
        "overlap_grad_reduce",
        "align_grad_reduce",
        "hybrid_layer_pattern",
        "hybrid_override_pattern",
        "mtp_hybrid_override_pattern",
        "te_precision_config_file",
        "save_wgrads_interval",
        "save_params_interval",
        "use_transformer_engine_op_fuser",
        "use_grouped_gemm_for_shared_expert",
        "experimental_attention_variant",
        "mtp_detach_heads",
        "mtp_num_layers",
        "save",
        "untie_embeddings_and_output_weights",
        "pipeline_model_parallel_layout",
        "qk_clip",
        "moe_use_upcycling",
        "num_distributed_optimizer_instances",
        "use_tp_pp_dp_mapping",
        "hybrid_context_parallel",
        "perform_rl_step",
        "data_parallel_random_init",
    }
    assert checked - known.keys() == set()
