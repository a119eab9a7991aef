"""``python -m megatron_patches.refit export`` on a checkpoint that a real training wrote."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint

from etp.formats import quantize_blocks
from megatron_patches.refit.__main__ import main
from megatron_patches.refit.size_text import parse_size
from tests.support.program import run_program

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 251
TRAINING = (
    "--num-layers 2 --hidden-size 48 --ffn-hidden-size 80 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 16 --attention-dropout 0 --hidden-dropout 0 "
    "--mock-data --no-create-attention-mask-in-dataloader --micro-batch-size 1 --global-batch-size 4 --lr 5e-3 "
    "--lr-decay-style constant --train-iters 2 --log-interval 1 --eval-iters 0 --eval-interval 1000 "
    "--save-interval 2 --ckpt-format torch_dist"
)


def export(arguments: list[str], ranks: int = 0) -> subprocess.CompletedProcess[str]:
    return run_program("-m", "megatron_patches.refit", "export", *arguments, ranks=ranks)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a training on 2 ranks with sharded weights, saved."""
    folder = tmp_path_factory.mktemp("trained")
    script = [str(ROOT / "examples" / "pretrain_gpt.py"), *TRAINING.split(), "--save", str(folder), "--etp-size", "2"]
    done = run_program("-m", "megatron_patches", *script, ranks=2)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint as one process exports it."""
    output = tmp_path_factory.mktemp("exported") / "model"
    done = export(["--load", str(checkpoint), "--output", str(output), "--max-shard-size", "100KB"])
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith(f"LlamaForCausalLM at {output}: 21 tensors, 0.2 MB in ")
    return output


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: values for file in sorted(folder.glob("*.safetensors")) for name, values in load_file(file).items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as meant: one process reads
def test_the_weights_are_those_of_the_checkpoint(checkpoint: Path, exported: Path) -> None:
    """Read by torch's own reader: the embedding without its padding, and the fused projection taken apart."""
    saved = {
        "embedding.word_embeddings.weight": torch.empty(256, 48),
        "decoder.final_layernorm.weight": torch.empty(48),
        "decoder.layers.0.self_attention.linear_proj.weight": torch.empty(48, 48),
        "decoder.layers.0.self_attention.linear_qkv.weight": torch.empty(96, 48),
    }
    known = FileSystemReader(checkpoint / "iter_0000002").read_metadata().state_dict_metadata
    saved = {name: values for name, values in saved.items() if name in known}
    load_checkpoint(saved, checkpoint_id=checkpoint / "iter_0000002", no_dist=True)
    found = weights(exported)
    assert torch.equal(found["model.embed_tokens.weight"], saved["embedding.word_embeddings.weight"][:VOCABULARY])
    assert torch.equal(found["model.norm.weight"], saved["decoder.final_layernorm.weight"])
    if "decoder.layers.0.self_attention.linear_qkv.weight" in saved:  # older formats stack the layers
        groups = saved["decoder.layers.0.self_attention.linear_qkv.weight"].view(2, 4, 12, 48)
        layer = "model.layers.0.self_attn."
        assert torch.equal(found[layer + "q_proj.weight"], groups[:, :2].reshape(48, 48))
        assert torch.equal(found[layer + "k_proj.weight"], groups[:, 2].reshape(24, 48))
        assert torch.equal(found[layer + "v_proj.weight"], groups[:, 3].reshape(24, 48))


@pytest.mark.multiproc
@pytest.mark.parametrize("flag", ["--etp-size", "--tensor-model-parallel-size", "--pipeline-model-parallel-size"])
def test_every_way_to_spread_the_model_writes_the_same_bytes(
    checkpoint: Path, exported: Path, tmp_path: Path, flag: str
) -> None:
    output = tmp_path / "model"
    done = export(["--load", str(checkpoint), "--output", str(output), "--max-shard-size", "100KB", flag, "2"], ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    names = sorted(path.name for path in exported.iterdir())
    assert sorted(path.name for path in output.iterdir()) == names
    for name in names:
        assert (output / name).read_bytes() == (exported / name).read_bytes(), name


def test_weights_can_be_converted(checkpoint: Path, exported: Path, tmp_path: Path) -> None:
    done = export(["--load", str(checkpoint), "--output", str(tmp_path / "half"), "--dtype", "bfloat16"])
    assert done.returncode == 0, done.stderr[-4000:]
    for name, values in weights(tmp_path / "half").items():
        assert torch.equal(values, weights(exported)[name].to(torch.bfloat16)), name


def test_linear_layers_can_be_quantized(checkpoint: Path, exported: Path, tmp_path: Path) -> None:
    """From float32, on two ranks whose shards cut blocks."""
    output = tmp_path / "fp8"
    command = ["--load", str(checkpoint), "--output", str(output), "--weight-format", "fp8_block", "--etp-size", "2"]
    done = export(command, ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    found, trained = weights(output), weights(exported)
    quantized = [name for name in trained if f"{name}_scale_inv" in found]
    assert len(quantized) == 2 * 7
    assert found.keys() - trained.keys() == {f"{name}_scale_inv" for name in quantized}
    for name, values in trained.items():
        if name not in quantized:
            assert torch.equal(found[name], values), name
            continue
        data, scales = quantize_blocks(values)
        assert torch.equal(found[name].view(torch.uint8), data), name
        assert torch.equal(found[f"{name}_scale_inv"], scales), name
    content = json.loads((output / "config.json").read_text())
    assert content["torch_dtype"] == "float32"
    assert content["quantization_config"]["weight_block_size"] == [128, 128]
    assert content["quantization_config"]["modules_to_not_convert"] == ["model.embed_tokens", "lm_head"]


def test_a_truncated_checkpoint_is_one_line_and_no_output(checkpoint: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    data = max((damaged / "iter_0000002").glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(data, data.stat().st_size // 2)
    done = export(["--load", str(damaged), "--output", str(tmp_path / "model")])
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert lines[0].startswith(f"error: cannot read {damaged / 'iter_0000002'}: ")
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_a_checkpoint_with_one_changed_byte_is_one_line_and_no_output(checkpoint: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    iteration = damaged / "iter_0000002"
    index = pickle.loads((iteration / ".metadata").read_bytes())
    places = {key.fqn: place for key, place in index.storage_data.items()}
    place = next(place for name, place in sorted(places.items()) if name.endswith("linear_fc2.weight"))
    file = iteration / place.relative_path
    data = bytearray(file.read_bytes())
    data[place.offset + place.length // 2] ^= 1
    file.write_bytes(data)
    done = export(["--load", str(damaged), "--output", str(tmp_path / "model")])
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: cannot read {iteration}: {place.relative_path}: ")
    assert "has changed bytes in" in line
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--load", "{tmp}/nowhere"], "nowhere is not a directory; pass --load the directory that Megatron's --save"),
        (["--iteration", "7"], "iter_0000007 is not a directory"),
        (["--load", "{tmp}"], "is not a complete checkpoint in the torch_dist format"),
        (["--output", "/proc/out"], "cannot write to /proc"),
        (["--output", "/proc"], "/proc is a mount point, which cannot be replaced; choose a directory in it"),
        (["--output", "{tmp}"], "is not empty; choose another output directory, or pass --overwrite"),
        (["--dtype", "float32", "--weight-format", "fp8_block"], "dtype is float32 and weight_format is fp8_block"),
        (["--eos-token-id", "-4"], "eos_token_id is -4; tokens are numbered from 0"),
        (["--bos-token-id", "99999"], "bos_token_id is 99999; the model has "),
        (["--etp-size", "2"], "1 processes cannot be divided by tensor 1 x pipeline 1 x ETP 2 = 2"),
        (["--expert-etp-size", "2"], "expert tensor 1 x expert 1 x expert ETP 2 x pipeline 1 = 2; start a multiple"),
        (["--num-virtual-stages-per-pipeline-rank", "2"], "is 2, but there is one pipeline stage; set --pipeline"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_loaded(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], message: str
) -> None:
    (tmp_path / "something").write_text("")
    arguments = ["export", "--load", str(checkpoint), "--output", str(tmp_path / "out")]
    assert main([*arguments, *(word.format(tmp=tmp_path) for word in change)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("error:") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["something"]


@pytest.mark.parametrize("content", [b"", b"latest", b"\xff\xfe2", "\u00b2".encode()])
def test_a_damaged_tracker_is_named(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_bytes(content)
    assert main(["export", "--load", str(tmp_path), "--output", str(tmp_path / "out")]) == 1
    assert re.search(rf"^error: {tracker} holds '.*', not an iteration; pass --iteration$", capsys.readouterr().err)


def test_a_model_has_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("0", "-1", "many"):
        with pytest.raises(SystemExit):
            main(["export", "--load", "x", "--output", "y", "--vocab-size", wrong])
        assert f"'{wrong}' is not a positive number of tokens" in capsys.readouterr().err


def test_sizes_are_read_with_their_units() -> None:
    assert [parse_size(text) for text in ("5GB", "512MiB", "1000", "1.5 kb")] == [5 * 10**9, 2**29, 1000, 1500]
    with pytest.raises(Exception, match="'5 bananas' is not a size"):
        parse_size("5 bananas")
    with pytest.raises(argparse.ArgumentTypeError, match="is more than any memory has"):
        parse_size("9" * 400)
