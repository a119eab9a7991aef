"""What the README and docs/ say is run, or compared with what it speaks of."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from etp import EtpConfig
from etp import errors as etp_errors
from megatron_patches import fixes, hf_training, refit_training
from megatron_patches.arguments import add_arguments
from megatron_patches.refit import errors as refit_errors
from megatron_patches.refit.__main__ import build_parser
from megatron_patches.refit.trl import EtpWeightTransfer
from tests.support.prepared import torch_alone
from tests.support.program import run_program

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Badges are the code host's own pages, next to the repository's files.
LINK = re.compile(r"\]\((?!https?:|\.\./\.\./actions/)([^)#]*)#?([^)]*)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FLAG = re.compile(r"^\| `(--[a-z0-9-]+)", re.MULTILINE)


def _fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_readme_example_runs_as_it_stands(tmp_path: Path) -> None:
    (example,) = _fenced(ROOT / "README.md", "python")
    assert len(example.splitlines()) < 20
    (tmp_path / "plain.py").write_text(example)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "plain.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    # An embedding and a linear of 256 x 64 in fp32 over two ranks.
    assert done.stdout.count(f"'shards': {2 * 256 * 64 * 4 // 2}") == 2


@pytest.mark.slow
def test_readme_complete_run_trains_and_is_exported(tmp_path: Path) -> None:
    (training,) = [command for command in _fenced(ROOT / "README.md", "sh") if "--save runs/tiny" in command]
    words = training.replace("\\\n", " ").split()
    variables, (launcher, *arguments) = words[:2], words[2:]
    assert launcher == "torchrun"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        # A port of its own: other runs may use the launcher's default.
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
        check=False,
        cwd=tmp_path,
        env=os.environ | dict(word.split("=") for word in variables) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    export = ("-m", "megatron_patches.refit", "export", "--load", "runs/tiny", "--output", "exported")
    exported = run_program(*export, folder=tmp_path)
    assert exported.returncode == 0, exported.stderr
    output = done.stdout + exported.stdout
    # No warnings but one of ours, that there is no GPU.
    warned = done.stderr.splitlines()
    assert [
        line for line in warned if not line.startswith("WARNING:megatron_patches.cpu.arguments:no CUDA device:")
    ] == []
    assert len(warned) <= 1
    assert "WARNING" not in output
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", output)]
    assert len(losses) == 5
    assert losses[-1] < 0.9 * losses[0]
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"]) == (["LlamaForCausalLM"], 4)


@pytest.mark.slow
def test_example_of_an_import_trains(tmp_path: Path) -> None:
    page = ROOT / "docs" / "import.md"
    (writing,), (training, _) = _fenced(page, "python"), _fenced(page, "sh")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "PATH": path,
    }
    output = ""
    for command in ([sys.executable, "-c", writing], ["bash", "-c", training]):
        done = subprocess.run(
            command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        output += done.stdout
    assert "load-hf: Qwen3ForCausalLM, 25 tensors of " in output
    assert len(re.findall(r"lm loss: (\S+)", output)) == 3


def test_example_of_a_plan_runs_as_it_stands(tmp_path: Path) -> None:
    example, _ = _fenced(ROOT / "docs" / "refit.md", "python")
    sizes = {"intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 96}
    sizes["max_position_embeddings"] = 64
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = example + "\nprint(len(sources), len(wanted), len(plan.transfers) == verdict.transfers > 0)"
    (tmp_path / "plan.py").write_text(code)
    done = run_program("plan.py", prepared=torch_alone, folder=tmp_path)
    assert (done.stdout, done.stderr) == ("16 4 True\n", "")


def test_the_way_of_one_box_is_as_it_is_told(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "refit.md").read_text().partition("## The path of one box\n")[2]
    (code, printed), *_ = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "one_box.py").write_text(code)
    done = run_program(str(tmp_path / "one_box.py"), prepared=torch_alone)
    assert (done.stdout, done.stderr) == (printed, "")


def test_example_of_trl_says_what_the_transfer_takes() -> None:
    (example,) = _fenced(ROOT / "docs" / "rl.md", "python")
    calls = {
        call.func.id: [argument.arg for argument in call.keywords]
        for call in ast.walk(ast.parse(example))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    assert {"EtpWeightTransfer", "AsyncGRPOTrainer", "AsyncGRPOConfig"} <= calls.keys()
    inspect.signature(EtpWeightTransfer).bind("url", **dict.fromkeys(calls["EtpWeightTransfer"]))
    text = (ROOT / "docs" / "rl.md").read_text().partition("## TRL")[2]
    for name in ("first_version", "device"):
        assert f"`{name}" in text
        assert name in inspect.signature(EtpWeightTransfer).parameters


def test_flags_that_are_documented_are_the_flags() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    options = {option for action in parser._actions for option in action.option_strings if "etp" in option}
    documented = set(FLAG.findall((ROOT / "README.md").read_text()))
    assert documented <= options
    # A flag with a negation is documented by the one that is not the default.
    assert {option.replace("--no-", "--") for option in documented} == {o.replace("--no-", "--") for o in options}


def test_fixes_of_megatron_are_listed_with_their_upstream_numbers() -> None:
    page = (ROOT / "docs" / "megatron.md").read_text()
    known = {number for record in fixes.records() for number in re.findall(r"#\d+", record.upstream)}
    assert sorted(number for number in known if number not in page) == []


def test_refit_flags_that_are_documented_are_the_flags() -> None:
    parser = refit_training.add_arguments(argparse.ArgumentParser())
    options = {option for action in parser._actions for option in action.option_strings if "refit" in option}
    documented = FLAG.findall((ROOT / "docs" / "live_refit.md").read_text())
    assert {flag for flag in documented if "refit" in flag} == options


def test_flags_of_grpo_that_are_documented_are_the_flags() -> None:
    options = set(re.findall(r'"(--grpo-[a-z-]+)"', (ROOT / "examples" / "grpo" / "train.py").read_text()))
    table = (ROOT / "docs" / "rl.md").read_text().partition("| flag | meaning | default |")[2]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `--grpo-")]
    assert {flag for row in rows for flag in re.findall(r"--grpo-[a-z-]+", row)} == options


@pytest.mark.parametrize("command", ["export", "import", "flags", "push", "check", "plan", "verify", "simulate"])
def test_flags_of_refit_commands_are_documented(command: str) -> None:
    pages = {
        "export": ("export.md",),
        "import": ("export.md", "import.md"),
        "flags": ("import.md",),
        "push": ("export.md", "live_refit.md"),
        "check": ("export.md", "live_refit.md", "agreement.md"),
    }.get(command, ("refit.md",))
    text = "".join((ROOT / "docs" / page).read_text() for page in pages)
    commands: Any = build_parser()._subparsers._group_actions[0]
    options = {option for action in commands.choices[command]._actions for option in action.option_strings}
    assert {option for option in options if not re.search(rf"{option}\b(?!-)", text)} <= {"-h", "--help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_flags_modules_files_and_targets_that_there_are(page: Path) -> None:
    text = page.read_text()
    commands: Any = build_parser()._subparsers._group_actions[0]
    parsers = [add_arguments(argparse.ArgumentParser()), refit_training.add_arguments(argparse.ArgumentParser())]
    parsers += [hf_training.add_arguments(argparse.ArgumentParser()), *commands.choices.values()]
    options = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    flags = set(re.findall(r"(?<![\w-])--(?:no-)?(?:expert-etp|etp|refit|load-hf)(?:-[a-z0-9-]*[a-z0-9])?", text))
    assert sorted(flags - options - {"--refit"}) == []  # `--refit-` names all flags that begin so
    for module in set(re.findall(r"-m ((?:benchmarks|examples|megatron_patches|tests)[\w.]*\w)", text)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), module
    for file in set(
        re.findall(r"(?<![\w./-])(?:benchmarks|examples|tests|docs|megatron_patches|etp)/[\w/.-]+\.\w+", text)
    ):
        assert (ROOT / file).exists(), file
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets


def test_options_of_the_engine_are_documented() -> None:
    text = (ROOT / "README.md").read_text()
    assert [field.name for field in dataclasses.fields(EtpConfig) if f"`{field.name}" not in text] == []


@pytest.mark.parametrize("errors", [etp_errors, refit_errors], ids=lambda module: module.__name__)
def test_every_error_is_explained(errors: ModuleType) -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    known = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(known) > 4
    assert [name for name in known if f"`{name}`" not in text] == []


def _told(tree: ast.AST) -> Iterator[str]:
    """Every text that a program can print, without what is put into it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)


def test_messages_of_troubleshooting_are_in_the_sources() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = [line.removeprefix("| ").split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    messages = [found[1] for row in rows if (found := re.fullmatch(r"`([^`]+)`", row))]
    assert len(messages) > 30
    files = [file for name in ("etp", "megatron_patches") for file in (ROOT / name).rglob("*.py")]
    told = [text.replace("%s", "...") for file in files for text in _told(ast.parse(file.read_text()))]
    for message in messages:
        parts = [part.strip() for part in message.split("...")]
        words, longest = re.compile(".*".join(map(re.escape, parts)), re.DOTALL), max(parts, key=len)
        assert any(longest in text and words.search(text) for text in told), message


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), f"{page.relative_to(ROOT)} links to {path}"
        assert not anchor or anchor in _anchors(target), f"{page.relative_to(ROOT)} links to {path}#{anchor}"
