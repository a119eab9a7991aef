"""``refit import`` writes what ``--load`` reads: the weights of a Hugging Face checkpoint, for any parallel sizes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron_patches.refit.checkpoints.hf_match import check_config
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.mesh import TrainerMesh
from tests.integration.cases import LLAMA, SCHEDULE
from tests.integration.checkpoint_families import CONFIGS, parallel_flags
from tests.integration.megatron_run import MegatronPool
from tests.integration.test_checkpoint_families import run_commands
from tests.support.full_disk import files_of
from tests.support.program import run_program
from tests.support.random_checkpoint import random_tensors, read_tensors, write_checkpoint

pytestmark = [
    pytest.mark.integration,
    pytest.mark.multiproc,
    pytest.mark.cpu_only("the commands run on the CPU"),
]

ALL = CONFIGS | {
    "llama_3_2": CONFIGS["llama"]
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "llama_yarn": CONFIGS["llama"]
    | {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
        }
    },
    "deepseek_v3_yarn": CONFIGS["deepseek_v3"]
    | {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
        }
    },
}
IMPORTED = {
    "llama": (TrainerMesh(etp=2), TrainerMesh(pp=2)),
    "llama_3_2": (TrainerMesh(etp=2), TrainerMesh(tp=2)),
    "llama_yarn": (TrainerMesh(tp=2), TrainerMesh(etp=2)),
    "qwen3_moe": (TrainerMesh(etp=2, expert_etp=2), TrainerMesh(ep=2, dp=2)),
    "deepseek_v3_yarn": (TrainerMesh(tp=2, ep=2), TrainerMesh(etp=2, expert_etp=2)),
}
"""By family, how it is spread while it is imported, and while it is exported again."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random checkpoints of the families, in bfloat16 but for biases of routers."""
    folder = tmp_path_factory.mktemp("published")
    for name in IMPORTED:
        write_checkpoint(folder / name, ALL[name], random_tensors(ALL[name], torch.bfloat16), files=2)
    quantized = CONFIGS["llama"] | {"quantization_config": {"quant_method": "fp8"}}
    write_checkpoint(folder / "quantized", quantized, {})
    write_checkpoint(folder / "odd", CONFIGS["deepseek_v3"] | {"hidden_size": 33}, {})
    return folder


def import_command(root: Path, name: str) -> list[str]:
    mesh, _ = IMPORTED[name]
    return ["import", "--hf", f"{root}/{name}", "--save", f"{root}/{name}-saved", *parallel_flags(mesh)]


@pytest.fixture(scope="module")
def imported(root: Path) -> dict[str, str]:
    """What importing each family to a folder of ``root``, named after it with ``-saved``, has printed."""
    done = run_commands(2, [import_command(root, name) for name in IMPORTED], fresh=True)
    for ranks in done:
        assert [status for status, _ in ranks] == [0, 0], ranks
    return {name: ranks[0][1] for name, ranks in zip(IMPORTED, done, strict=True)}


def test_what_is_exported_from_an_import_is_what_was_imported(root: Path, imported: dict[str, str]) -> None:
    back = [
        ["export", "--load", f"{root}/{name}-saved", "--output", f"{root}/{name}-back", *parallel_flags(mesh)]
        for name, (_, mesh) in IMPORTED.items()
    ]
    refused = {
        "--save .* is not empty; name a new directory, or remove what is in it": import_command(root, "llama"),
        "Megatron cannot build this LlamaForCausalLM: its weights are quantized": [
            *("import", "--hf", f"{root}/quantized", "--save", f"{root}/never")
        ],
        r"Megatron does not take this model: assert args\.hidden_size % args\.num_attention_heads == 0": [
            *("import", "--hf", f"{root}/odd", "--save", f"{root}/never")
        ],
        "2 processes cannot be divided by tensor 3": [
            *("import", "--hf", f"{root}/llama", "--save", f"{root}/never", "--tensor-model-parallel-size", "3")
        ],
        # At this size the model has a row for it, which is in no checkpoint.
        "its embedding has 37 rows, padding included, which cannot hold 38 tokens": [
            *("export", "--load", f"{root}/llama_3_2-saved", "--output", f"{root}/never", "--vocab-size", "38"),
            *("--tensor-model-parallel-size", "2"),
        ],
    }
    outcomes = run_commands(2, [*back, *refused.values()], fresh=True)
    done, failed = outcomes[: len(back)], outcomes[len(back) :]
    for ranks in done:
        assert [status for status, _ in ranks] == [0, 0], ranks
    for name, said in imported.items():
        tensors, original = read_tensors(root / f"{name}-back"), read_tensors(root / name)
        assert f"{len(tensors)} tensors of " in said
        assert "digests agree" in said
        assert tensors.keys() == original.keys()
        assert [key for key in tensors if not tensors[key].equal(original[key])] == []
        assert {key: value.dtype for key, value in tensors.items()} == {k: v.dtype for k, v in original.items()}
        config = json.loads((root / f"{name}-back" / "config.json").read_text())
        assert config.get("rope_scaling") == ALL[name].get("rope_scaling")
        scaling: dict[str, object] = {} if "yarn" in name else {"rope_scaling": None}
        check_config({**config, **scaling}, family_from_config(ALL[name]))
    for message, ranks in zip(refused, failed, strict=True):
        status, said = ranks[0]
        assert status == 1
        assert re.search(f"^error: .*{message}", said, re.MULTILINE), said
    assert not (root / "never").exists()


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize(
    ("name", "more"), [("llama", ""), ("llama_3_2", "--use-rope-scaling --rope-scaling-factor 32")]
)
def test_a_run_starts_from_an_import_as_from_the_checkpoint_itself(
    megatron: MegatronPool, root: Path, name: str, more: str
) -> None:
    model = LLAMA.replace("--num-layers 2", "--num-layers 4").replace("--ffn-hidden-size 128", "--ffn-hidden-size 96")
    model = model.replace("--untie-embeddings-and-output-weights ", "").replace("--vocab-size 250", "--vocab-size 37")
    sizes = f"--kv-channels 32 --group-query-attention --num-query-groups 2 --bf16 --etp-size 2 {more}"
    flags = f"{model} {SCHEDULE} {sizes} --ckpt-format torch_dist --train-iters 3"
    flags = flags.replace("divisible-by 2", "divisible-by 1")
    imported = megatron.train(2, f"{flags} --load {root}/{name}-saved".split())
    started = megatron.train(2, f"{flags} --load-hf {root}/{name}".split())
    assert len(started[-1].losses) == 3
    assert imported[-1].losses == started[-1].losses


@pytest.mark.slow
def test_an_import_from_a_relative_path_has_its_tokenizer_wherever_a_later_run_starts(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    write_checkpoint(tmp_path / "words", config, random_tensors(config, torch.bfloat16))
    words = {f"word{number}": number for number in range(int(str(config["vocab_size"])))}
    Tokenizer(WordLevel(words, unk_token="word0")).save(str(tmp_path / "words" / "tokenizer.json"))  # noqa: S106 - no secret
    named = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "words" / "tokenizer_config.json").write_text(json.dumps(named))
    for place, command in (
        (tmp_path, ["import", "--hf", "words", "--save", "saved"]),
        (Path.cwd(), ["export", "--load", str(tmp_path / "saved"), "--output", str(tmp_path / "back")]),
    ):
        done = run_program("-m", "megatron_patches.refit", *command, folder=place)
        assert done.returncode == 0, done.stderr
    assert read_tensors(tmp_path / "back").keys() == read_tensors(tmp_path / "words").keys()


@pytest.mark.slow
def test_a_write_that_the_system_refuses_is_told_in_one_line(root: Path, tmp_path: Path) -> None:
    """A limit on file sizes makes the write fail as a full disk would, in Megatron's process that writes."""
    words = ["import", "--hf", str(root / "llama"), "--save", str(tmp_path / "saved")]
    command = [sys.executable, "-m", "megatron_patches.refit", *words]
    with files_of(32768):  # which the process inherits
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0  # under this limit PyTorch's writer may even crash the process at its end
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: --save .*/saved: writing failed, and [\d.]+ MB are free there \(.*\)$", line)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("latest_checkpointed_iteration.txt"))
