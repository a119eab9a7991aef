"""What keeps the project going names files, commands and versions that exist: workflows, templates."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml

from megatron_patches.refit.vllm import releases

ROOT = Path(__file__).resolve().parents[2]
SETUP = (ROOT / "setup.py").read_text()


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


def test_warnings_of_the_compiler_are_errors_in_our_files_alone() -> None:
    # uv installs without compiling; Python then warns when it first imports a file with an invalid escape sequence.
    warnings.warn_explicit("invalid escape", SyntaxWarning, "/venv/lib/python3.12/site-packages/megatron/a.py", 1)
    with pytest.raises(SyntaxWarning):
        warnings.warn_explicit("invalid escape", SyntaxWarning, str(ROOT / "tests" / "a.py"), 1)


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
