"""``python -m megatron_patches SCRIPT.py``: what the script sees, and how mistakes end."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patches.command_line import add_own_arguments
from tests.integration.cases import LLAMA, SCHEDULE
from tests.integration.megatron_run import PRETRAIN_FROZEN, PRETRAIN_GPT
from tests.support.program import run_program

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 180.0

SCRIPT = """
import multiprocessing
import sys

import beside

def square(value):
    return value * value

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("RESULT", sys.argv[1:], beside.NAME, pool.map(square, [7]), __file__)
"""


ENDING = """
import atexit
import sys

import torch.distributed as dist

destroy = dist.destroy_process_group

def destroy_and_say_so(group=None):
    if group is None:
        print("DESTROYED")
    destroy(group)

dist.destroy_process_group = destroy_and_say_so
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
atexit.register(lambda: print("SCRIPT ENDS", dist.is_initialized()))
{end}
"""


def launch(*arguments: str, ranks: int = 1, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher in Pythons of its own: under torchrun, or by itself with one rank."""
    command = [sys.executable, "-W", "ignore"]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "megatron_patches", *arguments]
    else:
        command += ["-m", "megatron_patches", *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": "", **environment}
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def pretrain(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher on the example script, in a process that has Megatron already."""
    arguments = [str(PRETRAIN_GPT), *f"{LLAMA} {SCHEDULE}".split(), *flags]
    return run_program("-m", "megatron_patches", *arguments, variables=variables)


def errors(process: subprocess.CompletedProcess[str]) -> list[str]:
    """The launcher's own lines on stderr."""
    return [line for line in process.stderr.splitlines() if line.startswith("megatron_patches: error:")]


def last_reason(process: subprocess.CompletedProcess[str]) -> str:
    """The last thing that torchrun says, but for its frame."""
    *_, line, frame = process.stderr.splitlines()
    assert set(frame) == {"="}
    return line.partition("traceback : ")[2]


def test_the_script_runs_as_the_main_program(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text('NAME = "next to the script"\n')
    process = launch(str(script), "--one", "2")
    assert process.returncode == 0, process.stderr
    expected = f"RESULT ['--one', '2'] next to the script [49] {script}"
    assert expected in process.stdout.splitlines()


@pytest.mark.parametrize(
    ("end", "status", "expected"),
    [
        ("", 0, ["SCRIPT ENDS True", "DESTROYED"]),
        ("sys.exit()", 0, ["SCRIPT ENDS True", "DESTROYED"]),
        ("sys.exit(3)", 3, ["SCRIPT ENDS True"]),
        ("raise ValueError('mine')", 1, ["SCRIPT ENDS True"]),
    ],
)
def test_process_groups_end_with_a_script_that_ends_well(
    tmp_path: Path, end: str, status: int, expected: list[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDING.format(end=end))
    process = launch(str(script))
    assert process.returncode == status, process.stderr
    assert process.stdout.splitlines() == expected
    assert ("ValueError: mine" in process.stderr) == (status == 1)


@pytest.mark.parametrize("script", [PRETRAIN_GPT, PRETRAIN_FROZEN], ids=["that ends its groups", "that does not"])
def test_a_training_ends_without_a_word(script: Path) -> None:
    flags = f"{LLAMA} {SCHEDULE} --etp-size 2 --train-iters 2 --use-distributed-optimizer".split()
    freeze = ["--freeze", "^embedding"] if script == PRETRAIN_FROZEN else []
    process = launch(str(script), *flags, *freeze, ranks=2, PYTHONPATH=str(ROOT))
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr
    assert "terminate called" not in process.stderr


def test_help_of_a_megatron_script_lists_the_flags() -> None:
    process = pretrain("--help")
    assert process.returncode == 0, process.stderr
    text = " ".join(process.stdout.split())
    assert "extended tensor parallelism (ETP):" in text
    assert "NOT Megatron's expert tensor parallelism (--expert-tensor-parallel-size)" in text
    order = ["--etp-size N", "--load-hf", "--refit-engines", "--tensor-model-parallel-size"]
    places = [re.search(rf"{flag}\b(?!-)", text.partition("extended tensor parallelism (ETP):")[2]) for flag in order]
    assert [place.start() for place in places if place] == sorted(place.start() for place in places if place)
    assert len([place for place in places if place]) == 4
    assert process.stdout.splitlines()[0].startswith("usage: torchrun")
    assert "extended tensor parallelism (ETP):" in process.stdout.splitlines()[:6]


def test_help_of_the_launcher_lists_all_flags_of_this_package() -> None:
    process = launch("--help")
    assert (process.returncode, process.stderr) == (0, "")
    parser = add_own_arguments(argparse.ArgumentParser(add_help=False))
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {flag for flag in flags if not re.search(rf"{flag}\b(?!-)", process.stdout)} == set()
    assert process.stdout.startswith("usage: torchrun")
    assert max(map(len, process.stdout.splitlines())) <= 120


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), None),
        (("no-such-script.py",), "no-such-script.py is not a file; the script to run comes first"),
        (("--etp-size", "2", str(PRETRAIN_GPT)), "--etp-size is not a file; the script to run comes first"),
    ],
)
def test_a_missing_script(arguments: tuple[str, ...], message: str | None) -> None:
    process = run_program("-m", "megatron_patches", *arguments)
    assert process.returncode == 2
    if message is None:
        assert process.stdout.startswith("usage: torchrun")
    else:
        assert len(errors(process)) == 1
        assert message in errors(process)[0]
    assert "Traceback" not in process.stderr


def test_a_refused_setting_ends_with_one_line_from_one_rank() -> None:
    process = launch(str(PRETRAIN_GPT), *f"{LLAMA} {SCHEDULE} --etp-size 3".split(), ranks=2)
    assert process.returncode != 0
    expected = (
        "megatron_patches: error: --etp-size 3 does not divide the data-parallel size 2 "
        "(2 ranks over tensor 1 x pipeline 1 x context 1); use one of 1, 2, or change the number of ranks"
    )
    assert errors(process) == [expected]
    # torchrun reports the failed processes with a traceback of its own; there is none of ours.
    assert "megatron_patches/__main__.py" not in process.stderr
    assert last_reason(process) == expected.removeprefix("megatron_patches: error: ")
    assert "iteration" not in process.stdout


@pytest.mark.parametrize(
    ("failing", "statement", "reason"),
    [
        (0, "raise ValueError('rows 7 of 12')", "ValueError: rows 7 of 12"),
        (1, "raise ValueError('rows 7 of 12')", "ValueError: rows 7 of 12"),
        # Many assertions of Megatron have no message, such as that of --save without --save-interval.
        (1, "assert os.environ.get('INTERVAL')", "AssertionError: assert os.environ.get('INTERVAL')"),
    ],
)
def test_the_error_of_a_script_is_the_last_thing_that_torchrun_says(
    tmp_path: Path, failing: int, statement: str, reason: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, time\nif os.environ['RANK'] == '{failing}':\n    {statement}\ntime.sleep(60)\n")
    process = launch(str(script), ranks=2)
    assert process.returncode != 0
    assert last_reason(process) == reason


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--etp-size", "two"), "argument --etp-size: invalid int value: 'two'; --help lists what there is"),
        (("--etp-transport", "foo"), "argument --etp-transport: invalid choice: 'foo' (choose from "),
        (
            ("--yaml-cfg", "run.yaml"),
            "the file replaces the whole command line, --etp-size included; give ",
        ),
        (("--etp-sise", "2"), "unrecognized arguments: --etp-sise 2; did you mean --etp-size?"),
        (
            ("--etp-size", "2", "--vocab-size", "0"),
            "--etp-size does not work with --vocab-size 0; give",
        ),
        (
            ("--etp-size", "2", "--load", "/none"),
            "--load /none has no checkpoint: there is no latest_",
        ),
        (("--etp-size", "2", "--save", "/dev/null/x"), "--save /dev/null/x cannot be written: /dev/null is no folder"),
        (
            ("--etp-size", "2", "--etp-transport", "copy_engine"),
            "--etp-transport copy_engine copies between GPUs",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_mistakes_in_a_command_line_end_with_one_line(flags: tuple[str, ...], message: str) -> None:
    process = pretrain(*flags, WORLD_SIZE="2", RANK="0")
    assert process.returncode == 2, process.stderr
    last = process.stderr.splitlines()[-1]
    assert errors(process) == [last]
    assert message in last
    assert "Traceback" not in process.stderr
    assert "usage:" not in process.stderr


def test_settings_that_do_not_go_together() -> None:
    process = pretrain("--etp-size", "2", "--use-torch-fsdp2", WORLD_SIZE="2", RANK="0")
    assert process.returncode == 2
    assert len(errors(process)) == 1
    assert "--etp-size does not work with --use-torch-fsdp2; choose one" in errors(process)[0]
    assert "Traceback" not in process.stderr


def test_an_unknown_megatron_is_refused(tmp_path: Path) -> None:
    """A clone of another version next to the script is found first, as Python does."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text('MAJOR = 0\nMINOR = 21\nPATCH = 0\nPRE_RELEASE = "rc0"\n')
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('ran')\n")
    process = launch(str(script))
    assert process.returncode == 2
    assert len(errors(process)) == 1
    assert f"megatron-core 0.21.0rc0 at {core} is not supported; this release works with 0.19.2 only" in process.stderr
    assert "Traceback" not in process.stderr
