"""``pytest --quick``, which `make test` runs: without tests marked ``slow``, and with fewer random examples."""

from __future__ import annotations

import os

import pytest

VARIABLE = "ETP_TESTS_QUICK"
# Where a test is slow unless it says that it is not: each starts Megatron, vLLM or pip.
SLOW_FOLDERS = frozenset({"integration", "packaging"})
_FEWER = 8


def configure(config: pytest.Config) -> None:
    """Carry out ``--quick``; to be called before tests are imported."""
    quick = bool(config.getoption("--quick"))
    os.environ[VARIABLE] = str(int(quick))
    if quick:
        chosen = config.option.markexpr
        config.option.markexpr = f"({chosen}) and not slow" if chosen else "not slow"


def mark(item: pytest.Item) -> None:
    """Mark a test ``slow`` if it is one by its folder."""
    if item.path.parent.name in SLOW_FOLDERS and item.get_closest_marker("quick") is None:
        item.add_marker(pytest.mark.slow)


def examples(number: int) -> int:
    """How many random examples to draw: ``number``, or an eighth of it with ``--quick``."""
    return max(1, number // _FEWER) if os.environ.get(VARIABLE) == "1" else number
