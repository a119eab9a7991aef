"""``examples/grpo/train.py``: settings that it refuses before anything starts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from examples.grpo.engines import GrpoError
from examples.grpo.train import add_arguments, check


def settings(**changed: Any) -> argparse.Namespace:
    """GRPO's defaults, with what Megatron's and the refit's flags would say beside them."""
    given = add_arguments(argparse.ArgumentParser()).parse_args(["--grpo-prompts", "prompts.jsonl"])
    others = {
        "refit_engines": ["http://127.0.0.1:8000"],
        "refit_wait": True,
        "dataloader_type": "external",
        "global_batch_size": 16,
        "calculate_per_token_loss": True,
        "context_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
    }
    return argparse.Namespace(**{**vars(given), **others, **changed})


def test_defaults_are_accepted() -> None:
    check(settings())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"refit_engines": []}, "no engine to ask: give --refit-engines"),
        ({"grpo_samples": 0}, "--grpo-samples is 0; it must be at least 1"),
        ({"grpo_tokens": -3}, "--grpo-tokens is -3; it must be at least 1"),
        ({"grpo_held_out_interval": 0}, "--grpo-held-out-interval is 0; it must be at least 1"),
        ({"grpo_clip": 0.0}, "--grpo-clip is 0; it must be above 0"),
        ({"grpo_clip": float("nan")}, "--grpo-clip is nan; it must be above 0"),
        ({"grpo_kl": float("nan")}, "--grpo-kl is nan; the weight of a penalty must be at least 0"),
        ({"grpo_log": Path("none/log")}, "--grpo-log none/log cannot be written; name a file in a folder that is the"),
        ({"grpo_log": Path()}, "--grpo-log . cannot be written"),
        ({"grpo_samples": 3}, "--grpo-samples 3 must divide --global-batch-size 16"),
        ({"dataloader_type": "single"}, "--dataloader-type is single; samples come from outside, so give external"),
        ({"calculate_per_token_loss": False}, "without --calculate-per-token-loss a token weighs less"),
        ({"rampup_batch_size": [8, 8, 64]}, "--rampup-batch-size is [8, 8, 64]; each step samples --global-batch-size"),
        ({"step_batch_size_schedule": "0:8"}, "--step-batch-size-schedule is 0:8; each step samples"),
        ({"context_parallel_size": 2}, "--context-parallel-size is 2; samples are not split, so give 1"),
        ({"virtual_pipeline_model_parallel_size": 2}, "a virtual pipeline would ask for samples once per chunk"),
        ({"grpo_kl": -0.5}, "--grpo-kl is -0.5; the weight of a penalty must be at least 0"),
        ({"grpo_kl": 0.5}, "--grpo-kl is 0.5; give --grpo-reference, the engine of the reference"),
        ({"refit_wait": False}, "without --refit-wait the engines may answer with the version before"),
    ],
)
def test_a_mistake_is_told_in_one_line(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(GrpoError) as told:
        check(settings(**changed))
    assert message in str(told.value)
    assert "\n" not in str(told.value)
