"""How much of the tests runs: ``--quick``, all but variants, or all.

``pytest --quick``, which `make test` runs, leaves out slow tests, and draws fewer random examples. Slow are tests
marked ``slow``, tests in folders where each starts Megatron, vLLM or pip, and those of :data:`SLOW`. Continuous
integration then runs the slow ones except for *variants*, which take long and differ little from another test that it
runs. `make test-all` runs all, and so does a weekly job.
"""

from __future__ import annotations

import os
import re

import pytest

VARIABLE = "ETP_TESTS_QUICK"
# Where a test is slow unless it says that it is not: each starts Megatron, vLLM or pip.
SLOW_FOLDERS = frozenset({"integration", "packaging"})
_FEWER = 16
_ALL = ""
SLOW = {
    "multiproc/test_adapters": ("test_an_engine_receives_what_peft_would_save",),
    "test_at_once": ("test_failures_are_named_at_once",),
    "test_checkpoint": (
        "test_a_checkpoint_of_no_step",
        r"test_any_number_of_ranks_loads_it_and_so_does_the_unsharded_model\[(4-1|1-4)\]",
        r"test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened\[(?!adamw\])",
    ),
    "test_clipping": (
        r"test_(every_way_to_clip_equals_the_unsharded_one|padding_is_no_smallest_element)\[4-",
        r"test_loss_scaling_equals_the_unsharded_one\[(?!adamw fused)",
    ),
    "test_contract_engine": ("test_(a_ray_actor|a_version_is_labelled_once_it_serves)",),
    "test_deepseek_v3": (r"test_every_parameter_equals_that_of_a_live_model\[(?!alone)",),
    "test_device_kernels": ("test_boxes_of_up_to_six",),
    "test_documentation": ("test_(example_of_a_plan|flags_named_when|messages_of_troubleshooting|the_way_of_one_box)",),
    "test_engine": (
        r"test_a_peer_that_dies_ends_the_others_with_the_weights_name\[backward",
        r"test_a_process_need_not_wait_for_a_collective_whose_time_is_over\[(?!gather)",
        r"test_a_rank_holds_the_bytes_of_the_closed_form\[4-",
        r"test_look_ahead_across_passes_that_is_wrong_at_times_changes_no_number\[.*3\]",
    ),
    "test_experts": (r".*\[128\]",),
    "test_file_transport": ("test_a_write_that_the_system_refuses",),
    "test_formats_apart": ("test_the_kernels_equal_pytorch",),
    "test_fp8": (
        "test_(a_backward_pass_may_multiply_dequantized|rows_and_columns_are_read_in_any_order)",
        "test_(modules_equal_whole_ones|layers_in_and_out_of_fp8|modules_with_rows_and_columns_apart)",
    ),
    "test_fp8_block": ("test_kernels_quantize_parts_of_any_size",),
    "test_grouping": ("test_a_group_stays_in_one_worker",),
    "test_hierarchical": (r"test_two_steps_equal_one\[(?!2-2-dtype0)",),
    "test_lease": (
        "test_(a_cache_that_is_still_used|a_server_with_a_cache_of_older|a_trainer_that_hangs|closing_waits_for_no_server)",
        r"test_a_trainer_that_dies_leaves_no_server_paused\[(abort|wait)",
    ),
    "test_loose": (r"test_layers_of_one_name_are_told_apart\[True",),
    "test_optimizer_steps": ("test_(an_owner_may_be_collected|another_thread_may_add_owners)",),
    "test_parties": (
        "test_threads_may_read_a_message_of_a_new_kind_at_once",
        r"test_versions_arrive_bit_for_bit\[4-",
        r"test_versions_arrive_relative_to_the_last_one\[(?!0.02)",
    ),
    "test_plan_command": ("test_(parts_add_up|layers_of_a_model_that_does_not_fit)",),
    "multiproc/test_publish": (
        r"test_an_engine_serves.*\[(?!shards)",
        r"test_each_rank_describes_its_parts_of_the_whole_state\[.*-4\]",
        "test_the_publisher_is_imported_without_megatron",
    ),
    "test_random_models": (r".*\[(Llama|Qwen2|Qwen3)\]",),
    "test_rendezvous": ("test_(a_party_that_takes_no_messages|a_wrong_token)",),
    "test_replicated_modules": (r"test_a_checkpoint_is_loaded_whatever_stays_replicated\[(2-2|3-2)",),
    "test_state": ("test_full_states_go_between_world_sizes",),
    "test_swap": ("test_one_kernel_exchanges",),
    "test_te_protocol": ("test_te_modules_equal_whole",),
    "test_training": (
        r"test_every_optimizer_matches_bitwise\[(?!adamw_fused|muon|sgd)",
        r"test_more_ranks_match_in_rank_order\[4-",
    ),
    "test_transports": (
        r"test_versions_arrive_between_processes\[(nixl|shm)",
        r"test_when_a_process_is_killed_all_others_raise_soon\[.*(nixl|shm)",
    ),
    "test_trl_transfer": (r"test_(the_main_process|copies_stay|tensors_that_change_are_refused\[second[1-3])",),
    "test_unannounced": ("test_a_model_that_is_gone_on_one_rank",),
    "test_uses": ("test_an_evaluation_of_more_batches",),
}
"""By file, how the names of other tests that take seconds begin; quicker ones cover most of the same."""
VARIANTS = {
    "test_adapters": (r"test_an_engine_receives.*\[plain",),
    "test_benchmark_delta": (_ALL,),
    "test_benchmark_look_up": (_ALL,),
    "test_benchmark_refit": (_ALL,),
    "test_benchmark_steps": ("test_(sharding_changes|whole_experts)",),
    "test_benchmark_vllm": (_ALL,),
    "test_check_command": (r".*\[pp\]",),
    "test_checkpoint_families": (
        "test_a_push_of_a_checkpoint_with_experts",
        r".*\[(llama|qwen2|qwen3-|qwen3_moe-(tp2_expert|etp2_expert_etp2))",
        r".*\[deepseek_v3-(tp2_ep2|etp2|pp2_vpp2)",
        r".*\[nemotron_h-(tp2_ep2|pp2_first3|etp2_pp2|pp2_vpp2)",
    ),
    "test_checkpoints": (
        "test_(layers_of_the_gated|a_vocabulary_padded|optimizer_state)",
        r"test_a_checkpoint_is_loaded.*\[.*(moe_ep2|moe_distributed|pp2_etp2|etp4|tp2_etp2_distr|parallel_files)",
        r"test_a_checkpoint_is_loaded.*\[.*(muon|lion|from_etp2_sgd)",
    ),
    "unit/test_cpu": (r"test_cuda_stays_away.*\[1",),
    "test_documentation": ("test_example_of_an_import_trains",),
    "test_engine_loss": (_ALL,),
    "test_export": (r"test_logits.*\[1_rank",),
    "test_export_command": (
        "test_(a_checkpoint_with_one_changed|a_truncated|linear_layers_can_be|weights_can_be)",
        r"test_a_mistake.*\[change[1579]-",
        r"test_every_way.*\[--(tensor|pipeline)",
    ),
    "test_export_families": (r".*-2\]", r"test_logits.*-1\]"),
    "test_fan_out": ("test_engines_that_(missed|meet)",),
    "test_fp8": (
        r"test_modules_with_rows.*\[(NVFP4BlockScaling|MXFP8BlockScaling-4)",
        r"test_modules_in_nvfp4.*(LayerNormLinear|of 16-Linear)\]",
        r".*\[(MXFP8BlockScaling\]|NVFP4\(square=False\)|NVFP4 in blocks of 16-GroupedLinear)",
    ),
    "test_fused_accumulation": (r".*\[tied\]",),
    "test_grpo": (
        "test_(a_training_without|reward_does_not_rise|sampling_ahead|weight_of_kl|what_cannot_go_well)",
        r"test_a_signal.*\[2\]",
    ),
    "test_hugging_face": ("test_(texts_of|they_train)", r"test_stacked_experts.*\[4"),
    "test_import_command": ("test_an_import_from_a_relative", r"test_a_run_starts.*\[llama-"),
    "test_imports": ("test_what_runs_inside_vllm", r".*\[(wheel-root|editable-elsewhere)"),
    "test_launcher": (
        "test_(a_training_ends_without|help_of_a_megatron|settings_that|the_script_runs)",
        r"test_a_missing_script\[arguments[12]",
        r"test_mistakes.*\[(foo|2|0|two|run|/dev/null/x|/none)",
        r"test_process_groups.*\[(sys|raise)",
        r"test_the_error_of_a_script.*\[1",
    ),
    "test_live_adapters": ("test_a_server_answers_with_each",),
    "test_live_failures": (
        r"test_a_killed_trainer.*\[(0-describing|1-describing|1-sending|.*(planning|linking))",
        r"test_a_trainer_killed.*\[1-sending",
        r"test_a_worker_that_fails.*\[(0-(apply|build|convert)|1)",
        r".*\[Unreach",
    ),
    "test_live_faults": (
        "test_(a_process_that_hangs|pushes_leave_nothing)",
        r"test_a_process_that_dies.*\[(engine-p|server-s|worker-s)",
    ),
    "test_live_fp8": (r".*does\[experts", r".*\[(channel|tensor)\]"),
    "test_live_http": (r".*\[(qwen2_with_biases-tp1|qwen3-tp2|qwen3_moe-tp1)",),
    "test_live_kv_scales": (r".*\[in_place-delta\]",),
    "test_live_modules": (
        "test_examples_of_the_documentation",
        r"test_a_server_holds.*\[(etp|fsdp2)\]",
        r"test_what_changed_alone.*\[float32",
    ),
    "test_live_options": (_ALL,),
    "test_live_refit": (
        r"test_a_push_leaves.*\[llama_tied-(etp2|pp2|.*engine_tp2)",
        r"test_a_push_leaves.*\[qwen3-(tp|etp2_pp2|etp2-engine_tp2|etp3|pp2-engine_pp2|pp2_vpp2-engine_tp1)",
        r"test_a_push_leaves.*\[qwen3_in_float32-.*tp2",
        r"test_a_push_leaves.*\[qwen3_moe-(ep2|etp2_ep2|etp2_expert_etp2-engine_tp1|tp2)",
        r"test_a_push_leaves.*\[deepseek_v3-(pp2|tp2_etp2_ep2|.*engine_tp2)",
        r"test_a_push_leaves.*\[nemotron_h-(etp2-|etp2_pp2|etp3|tp2-|.*engine_tp2)",
        r"test_a_push_in_place.*\[(llama_tied-2|nemotron_h-2|qwen3_moe-1)",
        r"test_after_training.*\[(deepseek|llama|nemotron_h)",
    ),
    "test_live_server": (
        "test_(every_replica|a_trainer_killed_while|requests_are_answered_while_the_parties)",
        r"test_a_trainer_that_hangs.*\[(beside-|in_place-[rs])",
        r".*(\[sleep\?level=0|cache_of_older_weights\[keep|gone_on\[(abort|wait))",
    ),
    "test_load_hf": (r"test_what_is_exported.*\[(1_rank|2_ranks)",),
    "test_load_hf_training": ("test_a_run_from_the_export", r"test_what_does_not_fit.*\[--(vocab-size|moe)"),
    "test_long_run": (_ALL,),
    "test_lost_peer": (r".*\[(stopped|killed) in forward",),
    "test_own_engine": (_ALL,),
    "test_parties": ("test_threads_may_read",),
    "test_plan_cost": ("test_part_of_one_rank",),
    "test_publish": (r"test_an_engine_serves.*\[(ddp-2|fsdp|shards-4)",),
    "test_random_models": (r".*\[(Llama|Qwen2)",),
    "test_refit_meshes": ("test_engine_agrees_with_trainers",),
    "test_refit_nics": (
        r"test_nics_share.*shares[123]\]",
        r"test_ucx_listens.*\[127",
        r"test_weights_travel.*\[cable2?\]",
    ),
    "test_refit_two_hosts": (_ALL,),
    "test_reload": (r"test_processing.*\[(copied|remembered|doubled_e).*-beside",),
    "test_simulate": ("test_large_fleets",),
    "test_stacked": (r"test_they_train.*\[(batch|transposed)-4",),
    "test_subscriptions": (
        "test_an_engine_(gets_what_changed|that_joins_between|that_missed)",
        "test_scales_of_the_first",
        r"test_an_engine_that_fails.*\[(19|9-sending)",
    ),
    "test_sweep": ("test_the_command_runs_the_best", r"test_bytes.*\[(qwen2|llama-(etp2|pp2)|qwen3_moe-tp2)"),
    "test_te_layers": (
        "test_grouped_experts_are_loaded",
        r".*\[(tp2_|etp2_sel|etp2_tied|dp2_etp2_fused|moe_etp2_expert_etp2_recomputed|mxfp8_over|nvfp4_experts)",
        r".*\[fp8_blockwise_(accumulated|ends|experts_ep2|overlapped|stages|tp2|vpp)",
    ),
    "test_traffic_benchmark": (_ALL,),
    "test_trajectories": (
        r".*\[.*-(pp2_dp2_etp2_interleaved|dp2_etp2|etp4_padding)-",
        r".*\[.*-(moe_ep2_expert|frozen_(last|first))",
        r".*\[.*-etp2_(accumul|four_micro|per_token|muon|tied_exact|unpadded|dropout|no_prefetch)",
    ),
}
"""By file, how the names of the variants among slow tests begin (regular expressions, as those of :data:`SLOW`)."""


def configure(config: pytest.Config) -> None:
    """Carry out ``--quick``; to be called before tests are imported."""
    quick = bool(config.getoption("--quick"))
    os.environ[VARIABLE] = str(int(quick))
    if quick:
        chosen = config.option.markexpr
        config.option.markexpr = f"({chosen}) and not slow" if chosen else "not slow"


def mark(item: pytest.Item) -> None:
    """Mark a test ``slow`` and ``variant`` if it is: by its folder, by :data:`SLOW`, or by :data:`VARIANTS`."""
    of_folder = item.path.parent.name in SLOW_FOLDERS and item.get_closest_marker("quick") is None
    if of_folder or _listed(item, SLOW):
        item.add_marker(pytest.mark.slow)
    if item.get_closest_marker("slow") is not None and _listed(item, VARIANTS):
        item.add_marker(pytest.mark.variant)


def examples(number: int) -> int:
    """How many random examples to draw: ``number``, or a sixteenth of it with ``--quick``."""
    return max(1, number // _FEWER) if os.environ.get(VARIABLE) == "1" else number


def _listed(item: pytest.Item, tests: dict[str, tuple[str, ...]]) -> bool:
    """Whether the name of the test begins as one that ``tests`` has of its file."""
    file, _, name = item.nodeid.partition(".py::")
    return any(
        re.match(pattern, name)
        for key, patterns in tests.items()
        if f"/{file}".endswith(f"/{key}")
        for pattern in patterns
    )
