"""The Dockerfiles name what there is: files, extras, constraints, and the server command of the README."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_patches.refit.vllm import releases
from tests.packaging.conftest import ROOT, run

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def instructions(dockerfile: Path) -> Iterator[tuple[str, str]]:
    """Each instruction of a Dockerfile and its arguments, continued lines joined."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, arguments = line.partition(" ")
        yield name, arguments.strip()


def copied(dockerfile: Path) -> list[str]:
    """What a Dockerfile copies from the repository, in its order."""
    return [word for name, arguments in instructions(dockerfile) if name == "COPY" for word in arguments.split()[:-1]]


@pytest.mark.quick
@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_what_is_copied_is_there_and_not_ignored(dockerfile: Path) -> None:
    admitted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "etp", "megatron_patches"} <= {*copied(dockerfile)}
    assert [name for name in copied(dockerfile) if not (ROOT / name).exists()] == []
    assert [name for name in copied(dockerfile) if name.split("/")[0] not in admitted] == []


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_the_distribution_is_built_from_what_is_copied(dockerfile: Path, tmp_path: Path) -> None:
    for name in copied(dockerfile):
        target = tmp_path / "context" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    build = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tmp_path, tmp_path / "context")
    run(sys.executable, "-m", "pip", *build, cwd=tmp_path)
    assert len(list(tmp_path.glob("megatron_etp-*.whl"))) == 1


@pytest.mark.quick
def test_the_trainer_installs_extras_that_exist_within_constraints_that_are_copied() -> None:
    dockerfile = ROOT / "docker" / "trainer.Dockerfile"
    (call,) = (
        node.value
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )
    (extras,) = (argument.value for argument in call.keywords if argument.arg == "extras_require")
    known = set(ast.literal_eval(extras))
    runs = " ".join(arguments for name, arguments in instructions(dockerfile) if name == "RUN")
    (named,) = re.findall(r"'\.\[([^]]*)\]'", runs)
    assert set(named.split(",")) <= known
    assert set(re.findall(r"--constraint (\S+)", runs)) <= set(copied(dockerfile))


@pytest.mark.quick
def test_the_server_is_started_as_the_readme_starts_it() -> None:
    found = dict(instructions(ROOT / "docker" / "server.Dockerfile"))
    (command,) = re.findall(r"^(VLLM_SERVER_DEV_MODE=.*\\\n.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    variable, python, *words = shlex.split(command.replace("\\\n", " "))
    model = words.index("--model")
    assert words[model + 1] == "MODEL"  # the user adds it
    assert json.loads(found["ENTRYPOINT"]) == [f"{python}3", *words[:model], *words[model + 2 :]]
    assert found["ENV"] == variable


@pytest.mark.quick
def test_the_servers_guard_exists() -> None:
    command = json.loads(dict(instructions(ROOT / "docker" / "server.Dockerfile"))["ENTRYPOINT"])
    module, _, name = command[command.index("--middleware") + 1].rpartition(".")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert name in {
        node.name for node in ast.parse(Path(spec.origin).read_text()).body if isinstance(node, ast.ClassDef)
    }


@pytest.mark.quick
def test_the_servers_release_is_one_that_is_tested() -> None:
    found = dict(instructions(ROOT / "docker" / "server.Dockerfile"))
    release = found["ARG"].partition(":v")[2]
    assert release in releases.ADAPTERS
    minor = release.rpartition(".")[0]
    assert f"=={release}" in (ROOT / "requirements" / f"vllm-{minor}.lock").read_text()
