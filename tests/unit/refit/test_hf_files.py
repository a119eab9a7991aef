"""Hugging Face checkpoints as they are found on disk: one file, several, and what downloads leave behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_patches.refit.checkpoints.hf_files import open_checkpoint
from megatron_patches.refit.errors import LoadError, RefitError
from tests.support.random_checkpoint import write_checkpoint

CONFIG: dict[str, object] = {"architectures": ["LlamaForCausalLM"]}
TENSORS = {
    "a.weight": torch.randn(3, 5),
    "b.weight": torch.randn(7).bfloat16(),
    "c.weight": torch.randn(2, 3, 4).half(),
}
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize("files", [1, 2])
def test_headers_say_where_each_tensor_lies(tmp_path: Path, files: int) -> None:
    write_checkpoint(tmp_path / "model", CONFIG, TENSORS, files)
    found = open_checkpoint(tmp_path / "model")
    assert found.config == CONFIG
    assert found.tensors.keys() == TENSORS.keys()
    for name, values in TENSORS.items():
        stored = found.tensors[name]
        assert (stored.spec.shape, f"torch.{stored.spec.dtype}") == (tuple(values.shape), str(values.dtype))
        content = np.fromfile(found.directory / stored.file, np.uint8, stored.spec.nbytes, offset=stored.offset)
        assert content.tobytes() == values.flatten().view(torch.uint8).numpy().tobytes()


def test_a_single_file_may_have_any_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", CONFIG, TENSORS)
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "weights.safetensors")
    assert {item.file for item in open_checkpoint(tmp_path / "model").tensors.values()} == {"weights.safetensors"}


def _cut(folder: Path) -> None:
    os.truncate(folder / FIRST, (folder / FIRST).stat().st_size - 1)


def _change_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return damage


def _claim(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[Path], None]:
    """Change what the first file's header says."""

    def damage(folder: Path) -> None:
        data = (folder / FIRST).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        (folder / FIRST).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / FIRST).unlink(), f"cannot read .*{FIRST}: No such file"),
        (_cut, f"{FIRST} is cut off: .* download it again"),
        (lambda folder: (folder / FIRST).write_bytes(b"short"), f"{FIRST} is no complete safetensors file"),
        (lambda folder: (folder / FIRST).write_bytes(b"\xff" * 99), f"{FIRST} is no complete safetensors file"),
        (lambda folder: (folder / FIRST).write_bytes(b"\x02" + bytes(7) + b"{]"), "its header is no JSON object"),
        (lambda folder: (folder / FIRST).write_bytes(b"\x02" + bytes(7) + b"[]"), "its header is no JSON object"),
        (
            lambda folder: (folder / FIRST).write_bytes(b"\x07" + bytes(7) + b'{"\xff":1}'),
            f"{FIRST} is no safetensors file: .*'utf-8' codec can't decode",
        ),
        (lambda folder: (folder / INDEX).write_text("[" * 100_000), f"{INDEX} is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json is not JSON"),
        (lambda folder: (folder / INDEX).unlink(), "has 2 safetensors files and no model.safetensors.index.json"),
        (lambda folder: (folder / INDEX).write_text("{"), f"{INDEX} is not JSON"),
        (lambda folder: (folder / INDEX).write_text("{}"), f"{INDEX} has no weight_map"),
        (
            _change_index(lambda where: where.update({"d.weight": FIRST})),
            "says that d.weight is in .* does not have it",
        ),
        (_change_index(lambda where: where.update({"d.weight": "../x"})), "which is not a file beside it"),
        (lambda folder: save_file({"a.weight": torch.randn(2)}, folder / FIRST.replace("1-", "2-", 1)), "is in both"),
        (_claim(lambda header: header["a.weight"].update(shape=[3, 6])), "a.weight in .* has 60 bytes; .* needs 72"),
        (_claim(lambda header: header["a.weight"].update(dtype="F4")), "a.weight in .* is of type F4; known are"),
        (_claim(lambda header: header["a.weight"].pop("shape")), "does not say dtype, shape and data_offsets of a.w"),
        (
            _claim(lambda header: header["a.weight"].update(dtype=["F32"])),
            "does not say dtype, .* of a.weight: Expected",
        ),
        (_claim(lambda header: header["a.weight"].update(shape=5)), "does not say dtype, .* of a.weight: Expected"),
        (
            _claim(lambda header: header["a.weight"].update(shape=[-3, -5])),
            "does not say .* of a.weight: Expected `int`",
        ),
        (_claim(lambda header: header["a.weight"].update(data_offsets=[0])), "does not say .* of a.weight: Expected"),
        (
            _claim(lambda header: header["a.weight"].update(data_offsets=[-60, 0])),
            "does not say .* of a.weight: Expected",
        ),
        (_claim(lambda header: header.update({"a.weight": None})), "does not say .* of a.weight: Expected `object`"),
        (lambda folder: (folder / "config.json").unlink(), "cannot read .*config.json"),
        (
            lambda folder: save_file(TENSORS, folder / "model.safetensors"),
            "has model.safetensors beside model.safetensors.index.json, which does not name it; remove the one",
        ),
    ],
)
def test_what_is_missing_or_damaged_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, CONFIG, TENSORS, files=2)
    damage(folder)
    with pytest.raises(RefitError, match=message):
        open_checkpoint(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match="has no safetensors file; save the model with save_pretrained"):
        open_checkpoint(tmp_path)
    with pytest.raises(LoadError, match="is not a directory; name the folder of a Hugging Face checkpoint"):
        open_checkpoint(tmp_path / "nowhere")
