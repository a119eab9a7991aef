"""How much of the tests runs: ``--quick``, all but variants, or all.

``pytest --quick``, which `make test` runs, leaves out tests marked ``slow``, and draws fewer random examples.
Continuous integration then runs the slow ones except for *variants*, which take long and differ little from another
test that it runs. `make test-all` runs all, and so does a weekly job.
"""

from __future__ import annotations

import os
import re

import pytest

VARIABLE = "ETP_TESTS_QUICK"
# Where a test is slow unless it says that it is not: each starts Megatron, vLLM or pip.
SLOW_FOLDERS = frozenset({"integration", "packaging"})
_FEWER = 8
VARIANTS = (
    r"test_simulate.py::test_large_fleets_meet_their_targets\[(deepseek-v3|kimi-k2)\]",
    r"test_live_faults.py::test_a_process_that_dies_ends_the_push_with_its_reason\[(engine-preparing|server-sending)\]",
    r"test_live_faults.py::test_a_process_that_hangs_for_a_while_leaves_old_or_new_weights\[(worker|engine)-",
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
    r"test_trajectories.py::",
    r"test_lost_peer.py::test_the_peer_of_a_lost_rank_names_what_it_waited_for\[(stopped in forward|killed in forward)",
    r"test_live_refit.py::.*\[(llama_tied|deepseek_v3|nemotron_h)-.*engine_tp2\]",
    r"test_subscriptions.py::test_an_engine_that_fails_costs_the_other_nothing_and_comes_back\[(19-sending-in|9-sending)",
)
"""Regular expressions of the variants among slow tests."""
_VARIANT = re.compile("|".join(VARIANTS))


def configure(config: pytest.Config) -> None:
    """Carry out ``--quick``; to be called before tests are imported."""
    quick = bool(config.getoption("--quick"))
    os.environ[VARIABLE] = str(int(quick))
    if quick:
        chosen = config.option.markexpr
        config.option.markexpr = f"({chosen}) and not slow" if chosen else "not slow"


def mark(item: pytest.Item) -> None:
    """Mark a test ``slow`` if it is one by its folder, and ``variant`` if it is a slow one of :data:`VARIANTS`."""
    if item.path.parent.name in SLOW_FOLDERS and item.get_closest_marker("quick") is None:
        item.add_marker(pytest.mark.slow)
    if item.get_closest_marker("slow") is not None and _VARIANT.search(item.nodeid):
        item.add_marker(pytest.mark.variant)


def examples(number: int) -> int:
    """How many random examples to draw: ``number``, or an eighth of it with ``--quick``."""
    return max(1, number // _FEWER) if os.environ.get(VARIABLE) == "1" else number
