"""`make test` leaves out what is slow, and draws fewer examples; everything else runs all."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support import quick


class Item:
    """A test that pytest has collected."""

    def __init__(self, path: str, *markers: str) -> None:
        self.path, self.markers, self.nodeid = Path(path), list(markers), f"{path}::test_of_something"

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None

    def add_marker(self, marker: Any) -> None:
        self.markers.append(marker.name)


@pytest.mark.parametrize(
    ("path", "markers", "slow"),
    [
        ("tests/integration/test_export.py", (), True),
        ("tests/packaging/test_distribution.py", ("multiproc",), True),
        ("tests/integration/test_export.py", ("quick",), False),
        ("tests/unit/test_cpu.py", (), False),
        ("tests/unit/refit/test_boxes.py", (), False),
        ("tests/unit/test_cpu.py", ("slow",), True),
        ("tests/unit/test_optimizer_steps.py::test_another_thread_may_add_owners_during_steps", (), True),
    ],
)
def test_what_starts_megatron_vllm_or_pip_is_slow_unless_it_says_not(
    path: str, markers: tuple[str, ...], slow: bool
) -> None:
    item = Item(path, *markers)
    quick.mark(cast("pytest.Item", item))
    assert ("slow" in item.markers) == slow


@pytest.mark.parametrize(
    ("path", "markers", "expected"),
    [
        ("tests/integration/test_long_run.py", ("slow",), True),
        ("tests/integration/test_long_run.py", ("quick",), False),
        ("tests/integration/test_export.py", (), False),
        ("tests/unit/test_benchmark_refit.py", (), False),
    ],
)
def test_only_slow_tests_are_variants(path: str, markers: tuple[str, ...], expected: bool) -> None:
    item = Item(path, *markers)
    quick.mark(cast("pytest.Item", item))
    assert ("variant" in item.markers) == expected


@pytest.mark.parametrize(
    ("file", "pattern"),
    [(file, pattern) for file, patterns in [*quick.SLOW.items(), *quick.VARIANTS.items()] for pattern in patterns],
    ids=lambda value: re.sub(r"\W+", "_", value),
)
def test_patterns_are_of_tests_that_there_are(file: str, pattern: str) -> None:
    folder = Path(__file__).resolve().parents[2] / "tests"
    names = [name for path in folder.rglob(f"{file}.py") for name in re.findall(r"def (test_\w+)", path.read_text())]
    of_function = re.match(r"\w*(\([\w|]*\))?", pattern)
    assert of_function is not None
    assert any(re.match(of_function[0], name) for name in names)


@pytest.mark.parametrize(
    ("asked", "chosen", "expected", "examples"),
    [
        (False, "", "", 400),
        (False, "slow", "slow", 400),
        (True, "", "not slow", 25),
        (True, "gpu or multiproc", "(gpu or multiproc) and not slow", 25),
    ],
)
def test_slow_tests_and_examples_are_left_out_only_where_that_is_asked(
    asked: bool, chosen: str, expected: str, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(quick.VARIABLE, raising=False)
    config = argparse.Namespace(getoption={"--quick": asked}.get, option=argparse.Namespace(markexpr=chosen))
    quick.configure(cast("pytest.Config", config))
    assert config.option.markexpr == expected
    assert quick.examples(400) == examples
    assert quick.examples(1) == 1
