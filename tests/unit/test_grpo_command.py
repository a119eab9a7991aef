"""The command line of ``examples.grpo``: the model that it trains, and the mistakes that it tells first."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.progress import Progress

from examples.grpo import __main__ as grpo_command
from examples.grpo.__main__ import CONFIG, byte_level, megatron_flags, parse, pretrain, push_checkpoint, train
from megatron_patches.refit.models.config_traits import read_config

QWEN3 = Path(__file__).resolve().parents[2] / "examples" / "grpo" / "qwen3-0.6b.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "rl.md"


def test_a_model_of_another_shape_reads_bytes() -> None:
    config = byte_level(
        {**read_config(QWEN3), "vocab_size": 151936, "max_position_embeddings": 40960, "bos_token_id": 7}
    )
    assert (config["vocab_size"], config["max_position_embeddings"], "bos_token_id" in config) == (256, 64, False)
    flags = " ".join(megatron_flags(config, "cuda"))
    for expected in (
        "--num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072",
        "--num-attention-heads 16 --kv-channels 128 --group-query-attention --num-query-groups 8 --qk-layernorm",
        "--rotary-base 1000000",
        "--vocab-size 256",
        "--bf16",
    ):
        assert expected in flags
    assert "--untie-embeddings-and-output-weights" not in flags
    assert "--bf16" not in megatron_flags(config, "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "pigeon.json"], "--model pigeon.json: cannot read pigeon.json"),
        (["--model", str(QWEN3)], "holds a run of another model; name another folder"),
        (["--kill-at", "3"], "--kill-at leaves no engine to sample from; add --engines 2"),
        (["--kill-at", "59", "--engines", "2"], "--kill-at is 59, and no step of 60 follows; choose an earlier one"),
        (["--engines", "0"], "--engines is 0; it must be at least 1"),
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--kl", "-1"], "--kl is -1; the weight of a penalty must be at least 0"),
        pytest.param(
            ["--device", "cuda", "--kl", "0"],
            "--device cuda: 1 process(es) and the servers need 3 GPUs; PyTorch sees 0",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_mistakes_are_told_first(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "config.json").write_text(json.dumps(byte_level(CONFIG)))
    # Another interpreter, so that vLLM need not be here.
    always = ["--output", str(tmp_path), "--engine-python", "python"]
    monkeypatch.setattr(sys, "argv", ["grpo", *always, *arguments])
    with pytest.raises(SystemExit) as stopped:
        parse()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_commands_of_the_page_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text()
    (on_gpus,) = re.findall(r"^python -m examples.grpo (.*)$", page, re.MULTILINE)
    rows = re.findall(r"^\| (`--.*?`) \|", page.partition("| `GRPO_ARGS=` |")[2].partition("\n\n")[0], re.MULTILINE)
    asked = [on_gpus, *(arguments for row in rows for arguments in re.findall(r"`(.*?)`", row))]
    assert len(asked) > 7
    monkeypatch.chdir(PAGE.parents[1])
    monkeypatch.setattr(grpo_command, "visible_gpus", lambda: ("0", "1"))
    for arguments in asked:
        words = shlex.split(arguments.replace(" N", " 5").replace("'...'", "'--grpo-clip 0.2'"))
        always = ["--output", str(tmp_path), "--engine-python", "python"]
        monkeypatch.setattr(sys, "argv", ["grpo", *always, *words])
        assert parse().engines >= 1, arguments


def test_folders_and_flags_of_a_user_keep_their_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def record(command: list[str], log: Path) -> Iterator[str]:
        assert log.parent == folder
        commands.append(command)
        yield from ()

    folder = tmp_path / "my runs"
    folder.mkdir()
    monkeypatch.setattr("examples.grpo.__main__.run", record)
    monkeypatch.setattr(sys, "argv", ["grpo", "--engine-python", "python", "--flags", "--grpo-reward 'my file:score'"])
    options = parse()
    with Progress(disable=True) as progress:
        assert list(pretrain(folder, options, progress)) == []
        assert list(train(folder, ["http://a", "http://b"], "", options, progress, stale=False)) == []
    push_checkpoint(folder, "http://a")
    pretraining, training, push = commands
    assert pretraining[pretraining.index("--data-path") + 1] == str(folder / "sheet")
    assert pretraining[pretraining.index("--save") + 1] == str(folder / "checkpoint")
    assert training[training.index("--grpo-prompts") + 1] == str(folder / "train.jsonl")
    assert training[training.index("--grpo-log") + 1] == str(folder / "grpo.jsonl")
    assert training[training.index("--refit-engines") + 1 :][:2] == ["http://a", "http://b"]
    assert training[training.index("--grpo-reward") + 1] == "my file:score"
    assert push[push.index("--load") + 1] == str(folder / "checkpoint")
