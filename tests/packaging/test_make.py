"""How make finds a Python 3.12, and what it does without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
FITS = "#!/bin/sh\nexit 0\n"
FAILS = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"


def _program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH with the few programs that recipes need, and no Python."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("sh", "cat", "make", "touch", "rm", "echo"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def _run(
    *command: str, cwd: Path = ROOT, path: list[Path], home: Path, pyenv: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.pathsep.join(map(str, path)), "HOME": str(home)}
    if pyenv is not None:
        environment["PYENV_ROOT"] = str(pyenv)
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_interpreter_on_path_is_taken(tools: Path, tmp_path: Path) -> None:
    python = _program(tmp_path / "bin" / "python3.12", FITS)
    done = _run("sh", ".ci/find-python", path=[python.parent, tools], home=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, str(python))


@pytest.mark.parametrize("where", ["PYENV_ROOT", "HOME"])
def test_a_shim_that_fails_is_passed_over_for_what_pyenv_has(tools: Path, tmp_path: Path, where: str) -> None:
    shims = _program(tmp_path / "shims" / "python3.12", FAILS).parent
    root = tmp_path / ("elsewhere" if where == "PYENV_ROOT" else ".pyenv")
    _program(root / "versions" / "3.12.0" / "bin" / "python3.12", FAILS)
    python = _program(root / "versions" / "3.12.4" / "bin" / "python3.12", FITS)
    pyenv = root if where == "PYENV_ROOT" else None
    done = _run("sh", ".ci/find-python", path=[shims, tools], home=tmp_path, pyenv=pyenv)
    assert (done.returncode, done.stdout.strip()) == (0, str(python))


def test_an_interpreter_of_another_version_is_refused_by_name(tools: Path, tmp_path: Path) -> None:
    python = _program(tmp_path / "bin" / "python3", FAILS)
    done = _run("sh", ".ci/find-python", str(python), path=[tools], home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"PYTHON={python} is not a Python 3.12 with the venv module.\n"


def test_this_interpreter_fits(tools: Path, tmp_path: Path) -> None:
    done = _run("sh", ".ci/find-python", sys.executable, path=[tools], home=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, sys.executable)


def test_make_explains_itself_without_any_python(tools: Path, tmp_path: Path) -> None:
    done = _run("make", "help", path=[tools], home=tmp_path)
    assert done.returncode == 0
    targets = [line.split()[1] for line in done.stdout.splitlines()]
    tests = ["test", "test-all", "test-vllm", "test-newest-torch"]
    assert targets == ["quickstart", "grpo", *tests, "bench-train", "docs", "lint", "types", "format", "venv", "clean"]


@pytest.mark.parametrize(
    ("targets", "made"),
    [
        (("lint", "types", "test"), [".venv trainer"]),
        (("test-vllm",), [".venv trainer", ".venv-vllm engine", ".venv-vllm-0.33 newest-engine"]),
    ],
)
def test_make_builds_environments_once_and_reuses_them(
    tools: Path, tmp_path: Path, targets: tuple[str, ...], made: list[str]
) -> None:
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "requirements").mkdir()
    for name in ("ci.lock", "vllm-0.32.lock", "vllm-0.33.txt", "newest-torch.txt"):
        (tmp_path / "requirements" / name).write_text("")
    (tmp_path / ".ci").mkdir()
    for name in ("find-python", "put_over_kernels.py"):
        (tmp_path / ".ci" / name).write_text("")
    (tmp_path / ".ci" / "make-venv").write_text(
        'mkdir -p "$1/bin"; ln -sf "$3" "$1/bin/python"; echo "made $*" >>made.log\n'
    )
    for name in ("mkdir", "ln"):
        (tools / name).symlink_to(str(shutil.which(name)))
    python = _program(tmp_path / "bin" / "python", FITS)
    make = ("make", "--no-print-directory", "-j4", f"PYTHON={python}", f"PY={python}", *targets)
    for _ in range(2):
        assert _run(*make, cwd=tmp_path, path=[tools], home=tmp_path).returncode == 0
    assert sorted((tmp_path / "made.log").read_text().splitlines()) == [f"made {one} {python}" for one in made]
    os.utime(tmp_path / "requirements" / "ci.lock", (2**31, 2**31))
    assert _run(*make, cwd=tmp_path, path=[tools], home=tmp_path).returncode == 0
    again = (tmp_path / "made.log").read_text().splitlines()[len(made) :]
    assert again == [f"made .venv trainer {python}"]
