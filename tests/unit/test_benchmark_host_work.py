"""The benchmark of the engine's host work runs, and measures sharded layers."""

from __future__ import annotations

import re

import pytest

from benchmarks.host_work import main


def test_sharded_layers_take_longer_and_the_profile_names_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--layers", "4", "--repeats", "5", "--profile"])
    out = capsys.readouterr().out
    found = re.match(r"unsharded ([\d.]+), sharded ([\d.]+): ([\d.]+) us a weight\n", out)
    assert found is not None
    plain, sharded, added = map(float, found.groups())
    assert added == pytest.approx(sharded - plain, abs=0.11)
    assert "gathers.py" in out
    assert "reductions.py" in out
