"""What a command of several processes says before torchrun ends them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_patches.refit import command
from megatron_patches.refit.__main__ import build_parser
from megatron_patches.refit.progress import Progress
from megatron_patches.refit.tools import check_command
from tests.support.imports import ROOT

PROGRAM = """
import os, sys, time
from megatron_patches.refit.command import fail

rank = int(os.environ["RANK"])
time.sleep(0 if rank else 2)  # long after the other has failed
sys.exit(fail(ValueError(f"as rank {rank} has heard"), speaks=rank == 0, leads=rank == 0))
"""


@pytest.mark.slow
def test_the_reason_is_told_before_torchrun_ends_who_tells_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.count("error: as rank 0 has heard\n") == 1
    assert "as rank 1" not in ended.stderr


def test_samples_that_a_virtual_pipeline_cannot_score_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--pipeline-model-parallel-size", "3", "--num-virtual-stages-per-pipeline-rank", "2"]
    options = build_parser().parse_args(["check", "--load", "none", "--engines", "http://127.0.0.1:9", *sizes])
    assert check_command.main(options) == 1
    assert capsys.readouterr().err == (
        "error: --samples is 16; a virtual pipeline needs a multiple of the 3 stages (--pipeline-model-parallel-size)\n"
    )


@pytest.mark.parametrize(("most_kl", "status"), [(0.5, 0), (0.05, 1)])
def test_a_comparison_is_shown_once_no_bar_is_drawn_over_it(
    most_kl: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def bars(_shows: bool) -> Iterator[Progress]:
        try:
            yield Progress()
        finally:
            sys.stdout.write("bars\n")

    monkeypatch.setattr(command, "shown_progress", bars)
    before, after = check_command.Agreement(3, 0.7, 0.2, 0.3), check_command.Agreement(3, 0.1, 0.2, 0.3)
    monkeypatch.setattr(check_command, "_check", lambda *_: {"http://a": (before, after)})
    assert check_command.main(argparse.Namespace(most_kl=most_kl)) == status
    shown, said = capsys.readouterr()
    lines = shown.splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("│ http://a │")]
    assert [lines[number].split("│")[4].strip() for number in rows] == ["7.00e-01", "1.00e-01"]
    assert lines.index("bars") < rows[0]
    if status:
        assert said.startswith("error: KL(http://a || trainer) is 0.1 after the push, more than --most-kl 0.05; ")
    else:
        assert lines[-1] == "trainer and 1 engine(s) agree"
