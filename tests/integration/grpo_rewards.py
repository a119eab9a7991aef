"""Rewards of ``make grpo``'s task that wait or fail, for ``--grpo-reward``."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

from examples.grpo.reward import exact_number

RESTARTED_LOG = "GRPO_TEST_RESTARTED_LOG"
SCORED_BEFORE_FAILURE = 8
_calls = itertools.count()


def waits_for_server(text: str, answer: str) -> float:
    """The reward, once a server that is being restarted answers: training is faster than vLLM starts.

    Environment variable :data:`RESTARTED_LOG` names its log, which exists from the restart on.
    """
    log, deadline = Path(os.environ[RESTARTED_LOG]), time.monotonic() + 400.0
    while log.exists() and "Application startup complete" not in log.read_text(encoding="utf-8", errors="replace"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no server has started: {log}")
        time.sleep(0.2)
    return exact_number(text, answer)


def fails_in_second_step(text: str, answer: str) -> float:
    """The reward of the first :data:`SCORED_BEFORE_FAILURE` answers."""
    if next(_calls) >= SCORED_BEFORE_FAILURE:
        raise RuntimeError(f"answer {SCORED_BEFORE_FAILURE} is one too many")
    return exact_number(text, answer)
