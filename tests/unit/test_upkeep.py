"""What keeps the project going names files, commands and versions that exist: containers, workflows, templates."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_patches.refit.vllm import releases

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
SETUP = (ROOT / "setup.py").read_text()


def _instructions(file: Path) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile, with continued lines joined."""
    lines = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def test_there_is_a_container_for_each_side() -> None:
    assert [file.name for file in DOCKERFILES] == ["server.Dockerfile", "trainer.Dockerfile"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_dockerfiles_copy_what_there_is_and_the_context_has(file: Path) -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [path for word, rest in _instructions(file) if word == "COPY" for path in rest.split()[:-1]]
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "etp", "megatron_patches"} <= {*copied}
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(path == name or path.startswith(f"{name}/") for name in kept), path


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_dockerfiles_install_extras_that_there_are(file: Path) -> None:
    for extras in re.findall(r"'\.\[([a-z,]+)\]'", file.read_text()):
        for extra in extras.split(","):
            assert f'"{extra}": [' in SETUP


def test_the_servers_container_starts_a_server_that_can_be_pushed_to() -> None:
    instructions = dict(_instructions(ROOT / "docker" / "server.Dockerfile"))
    assert instructions["ARG"].removeprefix("BASE=vllm/vllm-openai:v") in releases.ADAPTERS
    assert instructions["ENV"] == "VLLM_SERVER_DEV_MODE=1"
    command = json.loads(instructions["ENTRYPOINT"])
    assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {"backend": "etp"}
    module, _, name = command[command.index("--middleware") + 1].rpartition(".")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert name in {
        node.name for node in ast.parse(Path(spec.origin).read_text()).body if isinstance(node, ast.ClassDef)
    }
    # README starts its server by the same module.
    assert f"python -m {command[2]}" in (ROOT / "README.md").read_text()


def test_workflows_run_targets_and_scripts_that_there_are() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    ran = []
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            ran += [step["run"] for step in job["steps"] if "run" in step]
    text = "\n".join([*ran, (ROOT / ".ci" / "run").read_text()])
    assert {*re.findall(r"make ([a-z-]+)", "\n".join(ran))} <= targets
    assert {*re.findall(r"bash (\S+)", "\n".join(ran))} == {".ci/run"}
    assert "tests.support.newest" in text


def test_issue_templates_ask_for_what_is_needed() -> None:
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = {file.stem: yaml.safe_load(file.read_text()) for file in folder.glob("*.yml")}
    assert set(forms) == {"bug", "feature", "config"}
    required = {part["id"] for part in forms["bug"]["body"] if part.get("validations", {}).get("required")}
    assert required == {"command", "happened", "expected", "versions"}
    for page in re.findall(r"[\w/]+\.md", forms["bug"]["body"][0]["attributes"]["value"]):
        assert (ROOT / page).exists(), page
    targets = re.findall(r"`make ([a-z ]+)`", (ROOT / ".github" / "pull_request_template.md").read_text())
    assert targets == ["lint types test"]


def test_page_on_releases_has_the_versions_that_are_pinned() -> None:
    page = (ROOT / "docs" / "releases.md").read_text()
    rows = {cells[1].strip(): cells[2] for line in page.splitlines() if len(cells := line.split("|")) == 6}
    (megatron,) = re.findall(r'"megatron-core==([\d.]+)"', SETUP)
    assert rows["megatron-core"].strip() == f"exactly {megatron}"
    assert '"transformer-engine[core_cu13,pytorch]>=2.19,<2.21"' in SETUP
    assert rows["Transformer Engine"].strip() == "2.19 to 2.20"
    assert rows["vLLM"].strip() == ", ".join(releases.ADAPTERS)
    assert '"torch>=2.11"' in SETUP
    assert rows["PyTorch"].strip() == "2.11 or newer"
    assert '"nixl>=1.5,<2"' in SETUP


def test_lists_of_the_page_on_releases_are_made_every_week() -> None:
    page = (ROOT / "docs" / "releases.md").read_text()
    workflow = (ROOT / ".github" / "workflows" / "newest.yml").read_text()
    commands = re.findall(r"(?:pip install --no-deps|python -m tests\.support\.newest) [^\n`]*", page)
    assert len(commands) == 3
    assert [command for command in commands if command not in workflow] == []


@pytest.mark.slow
def test_nothing_differs_in_the_megatron_that_is_supported() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.newest", "megatron-core"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=240)
    (megatron,) = re.findall(r'"megatron-core==([\d.]+)"', SETUP)
    assert done.stdout.splitlines()[-1:] == [f"megatron-core {megatron}: 0 of what is used differs"], done.stderr
    assert done.returncode == 0
