"""Models of Hugging Face transformers train sharded as docs/transformers.md says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration import hugging_face
from tests.support.launch import run_distributed
from tests.support.prepared import transformers_models
from tests.support.program import run_program

pytestmark = [pytest.mark.integration, pytest.mark.multiproc]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers.md"


def _documented() -> dict[str, tuple[str, ...]]:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)[1:]
    return {
        name: tuple(re.findall("`([^`]+)`", modules))
        for names, modules in rows
        for name in names.removesuffix(", in bf16").split(", ")
    }


def test_what_is_documented_is_what_is_tested() -> None:
    assert _documented() == {name: made.replicated for name, made in hugging_face.MODELS.items()}


@pytest.mark.cpu_only("a GPU's kernels for attention and scans add up in an order of their own")
def test_they_train_as_unsharded_and_need_the_modules_that_are_documented() -> None:
    for answers in run_distributed(hugging_face.train, 2, timeout_s=300.0, fresh=True, prepared=transformers_models):
        assert answers.keys() == hugging_face.MODELS.keys()
        for name, (refused, share) in answers.items():
            assert ("pass the module in replicated_modules" in refused) == bool(_documented()[name]), (name, refused)
            assert share > (0.1 if name in {"Falcon", "GPT-2"} else 0.2), (name, share)


@pytest.mark.cpu_only("a GPU's kernels for grouped products add up in an order of their own")
@pytest.mark.parametrize("ranks", [2, 4])
def test_stacked_experts_are_sharded_however_they_are_computed(ranks: int) -> None:
    for shares in run_distributed(
        hugging_face.train_mixtures, ranks, timeout_s=300.0, fresh=True, prepared=transformers_models
    ):
        assert len(shares) == 3 * len(hugging_face.MIXTURES)
        assert min(shares.values()) > 0.95, shares


@pytest.mark.cpu_only("a GPU's kernels for grouped products add up in an order of their own")
def test_texts_of_different_lengths_are_generated_as_unsharded() -> None:
    first, second = run_distributed(hugging_face.generate, 2, timeout_s=120.0, fresh=True, prepared=transformers_models)
    assert first.keys() == second.keys() == {"Llama", "T5", "Mixtral"}
    assert first != second


@pytest.mark.cpu_only("what a rank writes and reads is on the CPU")
def test_save_pretrained_writes_whole_weights_or_nothing(tmp_path: Path) -> None:
    for answers in run_distributed(
        hugging_face.save, 2, args=(str(tmp_path),), timeout_s=120.0, fresh=True, prepared=transformers_models
    ):
        assert answers.keys() == {"Llama", "Gemma 3", *hugging_face.MIXTURES}
        assert all("save_pretrained(folder, state_dict=...)" in answer for answer in answers.values()), answers
        assert not any("\n" in answer for answer in answers.values())


def examples() -> list[str]:
    """The programs on the page; the lines that save a model are a part of one."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if "HuggingFaceStorageWriter" not in block]


def test_the_example_runs_as_it_stands(tmp_path: Path) -> None:
    example, _, _ = examples()
    (tmp_path / "speech.py").write_text(example)
    done = run_program("speech.py", ranks=2, prepared=transformers_models, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Parameter ETPShardedParam\n" * 2


SHARDING = "etp.shard_module(model, etp_group=dist.group.WORLD)\n"


def run_both(folder: Path, sharded: str, stock: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The list of pairs that the first rank prints, of two programs on two ranks."""
    found = []
    for name, program in (("sharded", sharded), ("stock", stock)):
        (place := folder / name).mkdir()
        (place / "train.py").write_text(program)
        done = run_program("train.py", ranks=2, prepared=transformers_models, folder=place)
        assert done.returncode == 0, done.stderr
        first, _ = (line for line in done.stdout.splitlines() if line.startswith("[("))
        found.append(torch.tensor(ast.literal_eval(first)))
    return found[0], found[1]


def test_a_trainer_that_is_changed_as_documented_trains_as_with_data_parallelism(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    _, example, _ = examples()
    example += 'print([(one["loss"], one["grad_norm"]) for one in trainer.state.log_history if "loss" in one])\n'
    assert SHARDING in example
    stock = example.replace(SHARDING, "").replace("trainer = ShardedTrainer(", "trainer = Trainer(")
    found, expected = run_both(tmp_path, example, stock)
    assert found.shape == (6, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    saved, plain = (load_file(tmp_path / name / "out" / "model.safetensors") for name in ("sharded", "stock"))
    assert saved.keys() == plain.keys()
    for key, value in saved.items():
        torch.testing.assert_close(value, plain[key], rtol=0, atol=1e-5)


def test_a_loop_with_accelerate_as_documented_trains_as_with_data_parallelism(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    _, _, example = examples()
    ends = "    optimizer.zero_grad()\n"
    noted = "    noted = [*globals().get('noted', []), (loss.item(), norm.item())]\n"
    assert ends in example
    example = example.replace(ends, ends + noted) + "print(noted)\n"
    stock = example.replace(SHARDING, "").replace("prepare_model(model, evaluation_mode=True)", "prepare(model)")
    found, expected = run_both(tmp_path, example, stock)
    assert found.shape == (4, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
