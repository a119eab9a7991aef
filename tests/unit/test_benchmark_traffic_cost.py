"""Which copies and sums the benchmark of traffic leaves out, and how it reads clocks. It runs on GPUs alone."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.traffic_cost import VARIANTS, Selection, parse_sample, table
from etp.collectives import copy_engine
from etp.collectives.driver import Copies, CudaDriver

GATHERS, REDUCTIONS = 1, 2  # streams


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a gather and a reduction do, noted: copies from peers, copies to peers, and a sum."""
    noted: list[str] = []
    driver: Any = object()

    def gather(_: Any) -> str:
        CudaDriver.copy(driver, Copies([]), GATHERS)
        return "gathered"

    def reduce(_: Any) -> str:
        CudaDriver.copy(driver, Copies([]), REDUCTIONS)
        vars(copy_engine)["accumulate_parts"]()
        return "reduced"

    of = {GATHERS: "gather", REDUCTIONS: "send"}
    monkeypatch.setattr(CudaDriver, "copy", lambda *arguments: noted.append(of[arguments[2]]))
    monkeypatch.setattr(copy_engine.CopyEngineTransport, "all_gather", gather)
    monkeypatch.setattr(copy_engine.CopyEngineTransport, "reduce_scatter", reduce)
    monkeypatch.setattr(copy_engine, "accumulate_parts", lambda: noted.append("sum"))
    return noted


def move() -> tuple[object, object]:
    calls: Any = copy_engine.CopyEngineTransport
    return calls.all_gather(None), calls.reduce_scatter(None)


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        ((), ["gather", "send", "sum"]),
        (("sum",), ["gather", "send"]),
        (("sum", "send"), ["gather"]),
    ],
)
def test_a_selection_leaves_out_what_it_names(done: list[str], left_out: tuple[str, ...], expected: list[str]) -> None:
    selection = Selection()
    with selection.installed():
        selection.left_out = frozenset(left_out)
        assert move() == ("gathered", "reduced")
    assert done == expected
    assert frozenset(left_out) in [parts for _, parts in VARIANTS.values()]
    done.clear()
    move()
    assert done == ["gather", "send", "sum"]


def test_samples_of_the_clock_say_why_it_is_no_higher() -> None:
    assert parse_sample("1590, 711.49, 0x0000000000000004") == (1590.0, 711.49, True)
    assert parse_sample("1980, 320.10, 0x0000000000000000\n") == (1980.0, 320.1, False)
    assert parse_sample("345, 77.00, 0x0000000000000001") == (345.0, 77.0, False)


def test_the_table_has_ratios_to_no_communication() -> None:
    found: dict[str, dict[str, Any]] = {
        "no communication": {"milliseconds": [100.0, 102.0, 101.0]},
        "everything": {"milliseconds": [105.0, 106.0]},
    }
    found["no communication"] |= {"clock_mhz": 1610.4, "power_w": 699.6, "power_capped": 1.0}
    found["everything"] |= {"clock_mhz": 1560.0, "power_w": 700.4, "power_capped": 0.96}
    assert table(found).splitlines()[2:] == [
        "| no communication | 101.0 | 1.000 | 1610 | 700 | 100% |",
        "| everything | 105.5 | 1.045 | 1560 | 700 | 96% |",
    ]
