"""``run_program``: the environment of its ranks, what they say, and how they end."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.prepared import torch_alone
from tests.support.program import run_program

SCRIPT = """
import os, sys, time
import beside
import torch.distributed as dist

dist.init_process_group("gloo")
print(dist.get_rank(), dist.get_world_size(), sys.argv, os.getcwd(), __name__, beside.VALUE)
print("said by", dist.get_rank(), file=sys.stderr)
dist.barrier()  # a rank that ended at once could reset the connections that the other still makes
"""
LATE = """
import os, time
import torch.distributed as dist

store = next(dist.rendezvous("env://"))[0]
if os.environ["RANK"] == "0":
    store.set("said", "by 0")
else:
    time.sleep(1)
    print(store.get("said").decode())
"""
ENDS = """
import os, sys, time
if os.environ["RANK"] == "1":
    raise SystemExit(7)
time.sleep(600)
"""


def test_a_script_runs_on_every_rank_as_the_main_program(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    done = run_program("script.py", "--one", ranks=2, prepared=torch_alone, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{rank} 2 ['script.py', '--one'] {tmp_path} __main__ 5" for rank in range(2)]
    assert done.stderr.splitlines() == ["said by 0", "said by 1"]


def test_a_rank_reaches_the_store_after_another_has_ended(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LATE)
    done = run_program("script.py", ranks=2, prepared=torch_alone, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "by 0\n", "")


def test_a_module_is_found_where_it_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ.get('RANK'), os.environ['OWN'])\n"
    )
    done = run_program("-m", "mine", "--one", prepared=torch_alone, folder=tmp_path, variables={"OWN": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "['--one'] None 1\n", "")


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENDS)
    assert run_program("script.py", ranks=2, prepared=torch_alone, folder=tmp_path, timeout_s=60.0).returncode == 7


def test_an_end_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(subprocess.TimeoutExpired, match=r"timed out after 0\.5 seconds"):
        run_program("script.py", prepared=torch_alone, folder=tmp_path, timeout_s=0.5)
