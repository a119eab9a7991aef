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
SLOW = (
    r"multiproc/test_adapters.py::test_an_engine_receives_what_peft_would_save",
    r"test_at_once.py::test_failures_are_named_at_once",
    r"test_checkpoint.py::test_a_checkpoint_of_no_step",
    r"test_checkpoint.py::test_any_number_of_ranks_loads_it_and_so_does_the_unsharded_model\[(4-1|1-4)\]",
    r"test_checkpoint.py::test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened\[(?!adamw\])",
    r"test_clipping.py::test_(every_way_to_clip_equals_the_unsharded_one|padding_is_no_smallest_element)\[4-",
    r"test_clipping.py::test_loss_scaling_equals_the_unsharded_one\[(?!adamw fused)",
    r"test_contract_engine.py::test_(a_ray_actor|a_version_is_labelled_once_it_serves)",
    r"test_deepseek_v3.py::test_every_parameter_equals_that_of_a_live_model\[(?!alone)",
    r"test_documentation.py::test_(example_of_a_plan|flags_named_when|messages_of_troubleshooting|the_way_of_one_box)",
    r"test_engine.py::test_a_peer_that_dies_ends_the_others_with_the_weights_name\[backward",
    r"test_engine.py::test_a_rank_holds_the_bytes_of_the_closed_form\[4-",
    r"test_engine.py::test_look_ahead_across_passes_that_is_wrong_at_times_changes_no_number\[.*3\]",
    r"test_experts.py::.*\[128\]",
    r"test_file_transport.py::test_a_write_that_the_system_refuses",
    r"test_formats_apart.py::test_the_kernels_equal_pytorch",
    r"test_fp8.py::test_(a_backward_pass_may_multiply_dequantized|rows_and_columns_are_read_in_any_order)",
    r"test_fp8.py::test_(modules_equal_whole_ones|layers_in_and_out_of_fp8|modules_with_rows_and_columns_apart)",
    r"test_fp8_block.py::test_kernels_quantize_parts_of_any_size",
    r"test_grouping.py::test_a_group_stays_in_one_worker",
    r"test_hierarchical.py::test_two_steps_equal_one\[(?!2-2-dtype0)",
    r"test_lease.py::test_(a_trainer_that_hangs|closing_waits_for_no_server)",
    r"test_lease.py::test_a_trainer_that_dies_leaves_no_server_paused\[(abort|wait)",
    r"test_loose.py::test_layers_of_one_name_are_told_apart\[True",
    r"test_optimizer_steps.py::test_(an_owner_may_be_collected|another_thread_may_add_owners)",
    r"test_parties.py::test_threads_may_read_a_message_of_a_new_kind_at_once",
    r"test_parties.py::test_versions_arrive_bit_for_bit\[4-",
    r"test_parties.py::test_versions_arrive_relative_to_the_last_one\[(?!0.02)",
    r"test_plan_command.py::test_(parts_add_up|layers_of_a_model_that_does_not_fit)",
    r"multiproc/test_publish.py::test_an_engine_serves_the_bits_of_each_version\[(?!shards)",
    r"multiproc/test_publish.py::test_each_rank_describes_its_parts_of_the_whole_state\[.*-4\]",
    r"multiproc/test_publish.py::test_the_publisher_is_imported_without_megatron",
    r"test_random_models.py::test_random_models_arrive_whole\[(Llama|Qwen2|Qwen3)\]",
    r"test_rendezvous.py::test_a_party_that_takes_no_messages",
    r"test_replicated_modules.py::test_a_checkpoint_is_loaded_whatever_stays_replicated\[(2-2|3-2)",
    r"test_state.py::test_full_states_go_between_world_sizes",
    r"test_swap.py::test_one_kernel_exchanges",
    r"test_te_protocol.py::test_te_modules_equal_whole",
    r"test_training.py::test_every_optimizer_matches_bitwise\[(?!adamw_fused|muon|sgd)",
    r"test_training.py::test_more_ranks_match_in_rank_order\[4-",
    r"test_transports.py::test_versions_arrive_between_processes\[(nixl|shm)",
    r"test_transports.py::test_when_a_process_is_killed_all_others_raise_soon\[.*(nixl|shm)",
    r"test_trl_transfer.py::test_(the_main_process|copies_stay|tensors_that_change_are_refused\[second[1-3])",
    r"test_unannounced.py::test_a_model_that_is_gone_on_one_rank",
    r"test_uses.py::test_an_evaluation_of_more_batches",
)
"""Regular expressions of other tests that take seconds, beside which quicker ones cover most of the same."""
VARIANTS = (
    r"test_simulate.py::test_large_fleets_meet_their_targets",
    r"test_live_faults.py::test_a_process_that_dies_ends_the_push_with_its_reason\[(engine-p|server-s|worker-s)",
    r"test_engine_loss.py::test_a_training_outlives_its_engine_and_takes_it_back_or_ends_with_a_checkpoint",
    r"test_grpo.py::test_weight_of_kl_counts_in_the_loss",
    r"test_long_run.py::",
    r"test_refit_meshes.py::test_engine_agrees_with_trainers_of_all_meshes",
    r"test_benchmark_vllm.py::",
    r"test_benchmark_refit.py::",
    r"test_traffic_benchmark.py::",
    r"test_live_modules.py::test_what_changed_alone_makes_a_server_hold_and_answer_what_the_whole_does\[float32\]",
    r"test_live_modules.py::test_a_server_holds_and_answers_what_an_engine_of_the_saved_model_does\[etp\]",
    r"test_hugging_face.py::test_stacked_experts_are_sharded_however_they_are_computed\[4\]",
    r"test_live_server.py::test_every_replica_of_a_server_gets_the_weights",
    r"test_te_layers.py::test_grouped_experts_are_loaded_at_other_sizes",
    r"test_te_layers.py::test_sharded_training_follows_stock\[(tp2_|etp2_sel|fp8_blockwise_stages|fp8_blockwise_ends)",
    r"test_checkpoints.py::test_a_checkpoint_is_loaded_at_other_sizes\[.*(moe_ep2|moe_distributed|pp2_etp2|etp4)",
    r"test_check_command.py::test_after_a_push_trainer_and_engine_agree\[pp\]",
    r"test_export_command.py::test_every_way_to_spread_the_model_writes_the_same_bytes\[--(tensor|pipeline)",
    r"test_lost_peer.py::test_the_peer_of_a_lost_rank_names_what_it_waited_for\[(stopped in forward|killed in forward)",
    r"test_live_refit.py::.*\[(llama_tied|deepseek_v3|nemotron_h)-.*engine_tp2\]",
    r"test_subscriptions.py::test_an_engine_that_fails_costs_the_other_nothing_and_comes_back\[(19-sending-in|9-sending)",
    r"test_grpo.py::test_sampling_ahead_from_two_servers",
    r"test_grpo.py::test_reward_does_not_rise_without_pushes",
    r"test_grpo.py::test_a_signal_to_the_driver_ends_its_servers_and_trainers\[2\]",
    r"test_live_modules.py::test_a_server_holds_and_answers_what_an_engine_of_the_saved_model_does\[fsdp2\]",
    r"test_live_faults.py::test_a_process_that_hangs_for_a_while_leaves_old_or_new_weights\[(engine|server|worker-[cp])",
    r"test_live_http.py::.*\[(qwen2_with_biases-tp1|qwen3-tp2|qwen3_moe-tp1)\]",
    r"test_live_options.py::.*\[(chunked_prefill|drafts_of_n_grams)\]",
    r"test_live_fp8.py::.*(does\[experts|\[channel)\]",
    r"test_live_kv_scales.py::test_scales_serve_with_their_version\[in_place-delta\]",
    r"test_live_failures.py::test_a_killed_trainer_leaves_the_old_weights_and_no_wait\[(1-describing|1-sending)\]",
    r"test_live_failures.py::test_a_worker_that_fails_keeps_both_workers_on_the_old_weights\[1-(memory|convert|build)\]",
    r"test_live_server.py::test_a_trainer_killed_while_the_server_is_paused\[in_place-sending\]",
    r"test_live_server.py::test_a_trainer_that_hangs_while_the_server_is_paused\[(beside-c|in_place-s|in_place-r)",
    r"test_te_layers.py::test_sharded_training_follows_stock\[(nvfp4_experts|etp2_tied|fp8_blockwise_(overlapped|vpp))",
    r"test_fused_accumulation.py::.*\[tied\]",
    r"test_checkpoints.py::test_a_checkpoint_is_loaded_at_other_sizes\[.*(tp2_etp2_distr|parallel_files|muon|lion)",
    r"test_checkpoint_families.py::.*\[(llama-etp2|qwen2|qwen3-|qwen3_moe-tp2_expert|deepseek_v3-(tp2_ep2|etp2))",
    r"test_checkpoint_families.py::.*\[nemotron_h-(tp2_ep2|pp2_first3|etp2_pp2)",
    r"test_export_families.py::.*-2\]",
    r"test_live_refit.py::test_a_push_leaves_the_bits_of_a_fresh_engine\[qwen3-(tp|pp2_vpp2-engine_tp1|etp2_pp2-engine_tp2)",
    r"test_live_refit.py::test_a_push_leaves_the_bits_of_a_fresh_engine\[(llama_tied-etp2|qwen3_in_float32-.*tp2)",
    r"test_live_refit.py::test_a_push_leaves_the_bits_of_a_fresh_engine\[qwen3_moe-(ep2|tp2)",
    r"test_live_refit.py::test_a_push_leaves_the_bits_of_a_fresh_engine\[(deepseek_v3-pp2|nemotron_h-(etp2-|tp2-|etp3))",
    r"test_live_refit.py::test_a_push_in_place_leaves_the_same_bits\[(llama_tied-2|qwen3_moe-1)\]",
    r"test_live_refit.py::test_after_training_a_push_equals_a_fresh_engine_with_the_export\[(llama|deepseek)",
    r"test_subscriptions.py::test_an_engine_that_fails_costs_the_other_nothing_and_comes_back\[19-committing",
    r"test_refit_nics.py::test_weights_travel_over_the_nics_that_are_named\[cable2?\]",
    r"test_launcher.py::test_a_training_ends_without_a_word\[that ends its groups\]",
    r"test_load_hf.py::test_what_is_exported_from_a_loaded_model_is_what_was_loaded\[1_rank\]",
    r"test_load_hf_training.py::test_what_does_not_fit_ends_the_run_with_one_line\[--(vocab-size|moe)",
    r"test_sweep.py::test_bytes_are_those_of_megatron\[(qwen2|llama-etp2|qwen3_moe-tp2)",
    r"test_export_command.py::test_a_checkpoint_with_one_changed_byte",
    r"test_fp8.py::test_modules_with_rows_and_columns_apart_equal_whole_ones\[(NVFP4BlockScaling|MXFP8BlockScaling-4)",
    r"test_fp8.py::test_modules_in_nvfp4_equal_whole_ones_in_the_emulation\[.*(LayerNormLinear|of 16-Linear)\]",
    r"test_fp8.py::test_python_calls_of_a_format_do_not_grow\[MXFP8BlockScaling\]",
    r"test_publish.py::test_an_engine_serves_the_bits_of_each_version\[fsdp-4\]",
    r"test_stacked.py::test_they_train_as_unsharded_with_as_many_gathers_on_every_rank\[batch-4\]",
    r"test_live_refit.py::.*\[(qwen3-etp3-engine_tp1|qwen3-etp2_pp2|qwen3-pp2-engine_pp2|nemotron_h-etp2_pp2|nemotron_h-2)",
    r"test_live_refit.py::test_a_push_leaves.*\[qwen3_moe-(etp2_ep2_expert_etp2_dp2-engine_tp2|etp2_expert_etp2-engine_tp1)",
    r"test_live_refit.py::.*\[(deepseek_v3-etp2_expert_etp2|nemotron_h-etp2-engine_tp1)",
    r"test_live_failures.py::test_a_killed_trainer_leaves_the_old_weights_and_no_wait\[(0-describing|.*(planning|linking))",
    r"test_live_failures.py::test_a_worker_that_fails_keeps_both_workers_on_the_old_weights\[(0-convert|0-build|1-apply)\]",
    r"test_live_failures.py::test_a_trainer_killed_while_it_pushes_in_place_leaves_the_old_weights\[1-sending\]",
    r"test_live_server.py::test_a_trainer_(killed|that_hangs)_while_the_server_is_paused\[beside-",
    r"test_live_server.py::.*(\[sleep\?level=0|cache_of_older_weights\[keep|gone_on\[abort)\]",
    r"test_live_faults.py::test_pushes_leave_nothing_behind_whether_they_fail_or_not\[in_place\]",
    r"test_live_fp8.py::.*\[tensor\]",
    r"test_reload.py::test_processing_is_left_out_only_where_it_does_nothing\[(copied|remembered|doubled_e).*-beside\]",
    r"test_imports.py::.*\[(wheel-root|editable-elsewhere)",
    r"test_launcher.py::test_mistakes_in_a_command_line_end_with_one_line\[(foo|2|0|/dev/null/x)-\]",
    r"test_launcher.py::test_process_groups_end_with_a_script_that_ends_well\[(sys.exit\(\)|raise)",
    r"test_export_command.py::test_a_mistake_is_one_line_before_anything_is_loaded\[change(1|5|7|9)-",
    r"test_checkpoint_families.py::.*\[(qwen3_moe-etp2_expert_etp2|(deepseek_v3|nemotron_h)-pp2_vpp2)",
    r"test_export.py::test_logits_of_the_export_equal_megatrons\[1_rank\]",
    r"test_export_families.py::test_logits_of_the_export_equal_megatrons\[.*-1\]",
    r"test_grpo.py::test_what_cannot_go_well_.*\[how[0-2]-",
    r"test_te_layers.py::test_sharded_training_follows_stock\[dp2_etp2_fused",
    r"test_sweep.py::test_bytes_are_those_of_megatron\[llama-pp2",
    r"test_refit_nics.py::test_nics_share_what_ucx_stripes\[.*shares(1|2)\]",
    r"test_fp8.py::.*\[(NVFP4\(square=False\)|NVFP4 in blocks of 16-GroupedLinear)\]",
    r"test_publish.py::test_an_engine_serves_the_bits_of_each_version\[ddp-2\]",
    r"test_stacked.py::test_they_train_as_unsharded_with_as_many_gathers_on_every_rank\[transposed-4\]",
    r"test_launcher.py::test_mistakes_in_a_command_line_end_with_one_line\[/none",
    r"test_load_hf.py::test_what_is_exported_from_a_loaded_model_is_what_was_loaded\[2_ranks\]",
    r"test_te_layers.py::test_sharded_training_follows_stock\[moe_etp2_expert_etp2_recomputed",
    r"test_trajectories.py::test_sharded_training_follows_stock\[.*-(pp2_dp2_etp2_interleaved|dp2_etp2|etp4_padding)-",
)
"""Regular expressions of the variants among slow tests."""
_SLOW, _VARIANT = (re.compile("|".join(patterns)) for patterns in (SLOW, VARIANTS))


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
    if of_folder or _SLOW.search(item.nodeid):
        item.add_marker(pytest.mark.slow)
    if item.get_closest_marker("slow") is not None and _VARIANT.search(item.nodeid):
        item.add_marker(pytest.mark.variant)


def examples(number: int) -> int:
    """How many random examples to draw: ``number``, or a sixteenth of it with ``--quick``."""
    return max(1, number // _FEWER) if os.environ.get(VARIABLE) == "1" else number
