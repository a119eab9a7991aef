"""The command line of ``examples.grpo``: the model that it trains, and the mistakes that it tells first."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from examples.grpo.__main__ import CONFIG, byte_level, megatron_flags, parse
from megatron_patches.refit.source.config_traits import read_config

QWEN3 = Path(__file__).resolve().parents[2] / "examples" / "grpo" / "qwen3-0.6b.json"


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
