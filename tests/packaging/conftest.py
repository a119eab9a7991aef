"""Environments with the project installed from a wheel and in editable mode, and a stand-in for Transformer Engine.

Everything is built from a copy of the sources, so the tests write nothing into the repository, and without network:
the environments see the installed dependencies of the environment that runs the tests, but not what its own ``.pth``
files add.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command and return what it printed; AssertionError with its errors if it fails."""
    clean = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONSAFEPATH"}}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean | {"PYTHONDONTWRITEBYTECODE": "1"} | (env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the project installed.

    Attributes:
        kind: "wheel", "editable", or "engine" for a wheel in an environment without Megatron.
        python: its interpreter.
        sources: the copy of the repository that it was installed from.
    """

    kind: str
    python: Path
    sources: Path

    def evaluate(self, code: str, *, cwd: Path, path: tuple[Path, ...] = ()) -> Any:
        """Run ``code`` in a new interpreter; the value it assigns to ``result``.

        Args:
            code: statements.
            cwd: the folder to start in, which ``python -c`` puts first on the path.
            path: further folders, next on the path.
        """
        script = textwrap.dedent(code) + "\nimport json as _json; print(_json.dumps(result))"
        printed = run(
            self.python, "-W", "ignore", "-c", script, cwd=cwd, env={"PYTHONPATH": os.pathsep.join(map(str, path))}
        )
        return json.loads(printed.splitlines()[-1])


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the distribution is built from."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for name in ("etp", "megatron_patches"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="session")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel."""
    out = tmp_path_factory.mktemp("wheel")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, sources)
    run(sys.executable, "-m", "pip", *build, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def sdist(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built source distribution."""
    out = tmp_path_factory.mktemp("sdist")
    # By the build backend's own hook, as a front end calls it.
    hook = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", hook, out, cwd=sources)
    (built,) = out.glob("*.tar.gz")
    return built


@pytest.fixture(scope="session")
def wheel_environment(wheel: Path, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel installed."""
    return _environment("wheel", sources, tmp_path_factory.mktemp("env"), str(wheel))


@pytest.fixture(scope="session")
def editable_environment(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the project installed in editable mode."""
    return _environment("editable", sources, tmp_path_factory.mktemp("env"), "--editable", str(sources))


@pytest.fixture(scope="session")
def engine_environment(wheel: Path, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel installed, as an inference engine has it: megatron-core is not there."""
    seen = tmp_path_factory.mktemp("without-megatron")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("megatron"):
            (seen / entry.name).symlink_to(entry)
    return _environment("engine", sources, tmp_path_factory.mktemp("env"), str(wheel), dependencies=seen)


@pytest.fixture(params=["wheel", "editable"])
def environment(request: pytest.FixtureRequest) -> Environment:
    """Each of the two environments in turn."""
    found = request.getfixturevalue(f"{request.param}_environment")
    assert isinstance(found, Environment)
    return found


def _environment(kind: str, sources: Path, folder: Path, *what: str, dependencies: Path | None = None) -> Environment:
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    install = ("install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", *what)
    # pip builds with the target's interpreter, which needs setuptools; so the dependencies come first.
    (site / "dependencies.pth").write_text(f"{dependencies or sysconfig.get_path('purelib')}\n")
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=folder)
    return Environment(kind, python, sources)


@pytest.fixture(scope="session")
def real_te(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the path with a small package in the place of the real Transformer Engine."""
    site = tmp_path_factory.mktemp("te-site")
    package = site / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from . import common\n"
        "import transformer_engine.common as again\n"
        "__version__ = '2.20.2'\n"
        "same = again is common\n"
    )
    (package / "common.py").write_text("NAME = __name__\n")
    (package / "pytorch" / "__init__.py").write_text(
        "from ..common import NAME\n\n\nclass Recipe:\n    def __init__(self, margin):\n        self.margin = margin\n"
    )
    return site
