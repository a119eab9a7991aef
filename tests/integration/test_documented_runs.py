"""The tutorials' trainings are run as they stand, in processes that keep Megatron loaded; launchers as they are."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patches.refit.checkpoints.hf_flags import flags_of
from tests.integration.megatron_run import MegatronPool
from tests.integration.tiny_models import QWEN3
from tests.support.ports import free_port
from tests.support.prepared import vllm_on_cpu
from tests.support.program import run_program

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCED = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
ARGUMENTS = Path(__file__).with_name("grpo_arguments.py")
TOY = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --mock-data "
    "--vocab-size 250 --no-create-attention-mask-in-dataloader --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
    "--lr-decay-style constant --train-iters 2 --log-interval 1 --eval-iters 0 --eval-interval 100"
)

pytestmark = pytest.mark.integration


def commands(page: str) -> list[list[str]]:
    """What a page's blocks of commands run, one after the other in one shell, each with its arguments."""
    script = "".join(
        f'{name}() {{ printf "%s\\t" {name} "$@"; echo; }}\n' for name in ("python", "torchrun")
    ) + "".join(FENCED.findall((DOCS / page).read_text()))
    done = subprocess.run(["/bin/bash", "-euc", script], check=True, cwd=DOCS, capture_output=True, text=True)
    return [line.split("\t")[:-1] for line in done.stdout.splitlines()]


def training(command: list[str], folder: Path) -> tuple[int, tuple[str, ...]]:
    """Number of ranks, and arguments of the example script, with what is below runs/ in ``folder``."""
    program, flag, ranks, *launcher = command[:6]
    assert (program, flag, launcher) == (
        "torchrun",
        "--nproc-per-node",
        ["-m", "megatron_patches", "examples/pretrain_gpt.py"],
    )
    return int(ranks), tuple(re.sub("^runs/", f"{folder}/", argument) for argument in command[6:])


def test_tutorial_on_training(megatron: MegatronPool, tmp_path: Path) -> None:
    (python, script, *options), *trainings = commands("train.md")
    assert (python, len(trainings)) == ("python", 3)
    where = [re.sub("^runs/", f"{tmp_path}/", option) for option in options]
    subprocess.run([sys.executable, ROOT / script, *where], check=True, capture_output=True, timeout=120)
    stock, sharded, continued = (megatron.train(*training(command, tmp_path)) for command in trainings)
    assert len(stock[0].losses) == len(sharded[0].losses) == 40
    # Later, what sums in another order round differently has grown, on some types of processor to 1.2 % of the loss.
    assert sharded[0].losses[:10] == pytest.approx(stock[0].losses[:10], rel=1e-4)
    assert sharded[0].losses == pytest.approx(stock[0].losses, rel=3e-2)
    assert sharded[0].losses[-1] < 0.8 * sharded[0].losses[0]
    # Half of every linear and embedding; norms are whole.
    assert 0.5 < sharded[0].parameter_bytes / stock[0].parameter_bytes < 0.51
    assert len(continued[0].losses) == 10
    assert continued[0].losses[0] < 1.1 * sharded[0].losses[-1]


def test_tutorial_on_experts(megatron: MegatronPool, tmp_path: Path) -> None:
    (command,) = commands("experts.md")
    ranks, arguments = training(command, tmp_path)
    seen = megatron.train(ranks, arguments)
    assert (ranks, len(seen[0].losses)) == (4, 20)
    assert seen[0].losses[-1] < 0.8 * seen[0].losses[0]


def test_groups_of_ranks_are_those_of_the_page() -> None:
    from megatron.core.parallel_state import RankGenerator, _inject_gtp_remat_axis

    order, ranks = "tp-cp-ep-dp-pp", 16

    def first(after: str, tp: int, ep: int, shards: int) -> list[int]:
        sizes = {"tp": tp, "ep": ep, "pp": 1, "cp": 1, "dp": ranks // (tp * ep * shards), "gtp_remat": shards}
        groups = RankGenerator(**sizes, order=_inject_gtp_remat_axis(order, after=after)).get_gtp_ranks(shards)
        return next(group for group in groups if 0 in group)

    rows = dict(
        re.findall(r"^\| (?:experts: )?`(--[^`]+)` \| ([^|]+) \|$", (DOCS / "hosts.md").read_text(), re.MULTILINE)
    )
    found = {
        "--etp-size 8": first("tp", 1, 1, 8),
        "--tensor-model-parallel-size 2 --etp-size 4": first("tp", 2, 1, 4),
        "--etp-size 16": first("tp", 1, 1, 16),
        "--expert-model-parallel-size 4 --expert-etp-size 2": first("ep", 1, 4, 2),
        "--expert-model-parallel-size 8 --expert-etp-size 2": first("ep", 1, 8, 2),
    }
    assert found.keys() == rows.keys()
    for flags, group in found.items():
        shown = "all, on both hosts" if len(group) == ranks else " ".join(map(str, group))
        assert rows[flags].removesuffix(", on both hosts") == shown.removesuffix(", on both hosts")
        assert rows[flags].endswith("on both hosts") == (len({rank // 8 for rank in group}) > 1)


def test_launchers_of_several_hosts(tmp_path: Path) -> None:
    """The script for Slurm, with two launchers on this machine for two hosts; torchrun's command is the same."""
    srun = '#!/bin/bash\nshift\n"$@" > out.0 2>&1 &\n"$@" > out.1 2>&1 || exit 1\nwait $!\n'
    scontrol = '#!/bin/bash\n[ "$*" = "show hostnames n[0-1]" ] && echo localhost && sleep 0.1 && echo other\n'
    for name, text in (("srun", srun), ("scontrol", scontrol)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"}
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    own["PORT"] = str(free_port())
    script = [ROOT / "examples" / "slurm" / "train.sh", ROOT / "examples" / "pretrain_gpt.py"]
    done = subprocess.run(
        [*script, *TOY.split(), "--etp-size", "2"],
        check=False,
        cwd=tmp_path,
        env=os.environ | slurm | own | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    output = "".join(out.read_text() for out in tmp_path.glob("out.*"))
    assert done.returncode == 0, done.stderr + output
    assert len(re.findall(r"lm loss: \S+", output)) >= 2

    torchrun, *_ = FENCED.findall((DOCS / "hosts.md").read_text())
    flags = re.findall(r"--(?:nnodes|nproc-per-node|rdzv-[a-z]+)", torchrun)
    assert flags == re.findall(r"--(?:nnodes|nproc-per-node|rdzv-[a-z]+)", script[0].read_text())


def test_recipe_of_grpo_is_accepted_for_a_tiny_qwen3(megatron: MegatronPool, tmp_path: Path) -> None:
    (recipe,) = (block for block in FENCED.findall((DOCS / "rl.md").read_text()) if "examples/grpo/train.py" in block)
    words = recipe.replace("\\\n", " ").split()
    start = words.index("examples/grpo/train.py")
    assert words[:start] == ["PYTHONPATH=.", "torchrun", "--nproc-per-node", "1", "-m", "megatron_patches"]
    assert words[start + 1] == "MODEL_FLAGS"
    asked = words[start + 2 :]
    model = flags_of(QWEN3 | {"max_position_embeddings": 1024}, tmp_path)
    (trajectory,) = megatron.train(1, [*model, *asked, "--no-gradient-accumulation-fusion"], ARGUMENTS)
    told = json.loads(trajectory.log.splitlines()[-1])
    for number, flag in enumerate(asked):
        if flag.startswith("--"):
            value, known = (asked[number + 1 : number + 2] or ["--"])[0], told[flag[2:].replace("-", "_")]
            if value.startswith("--"):
                assert known is True, flag
            elif isinstance(known, float):
                assert known == float(value), flag
            else:
                assert str(known) in {value, f"['{value}']"}, flag
    assert (told["num_layers"], told["hidden_size"]) == (QWEN3["num_hidden_layers"], QWEN3["hidden_size"])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_server_of_grpo_is_a_command_that_vllm_takes(tmp_path: Path) -> None:
    (command,) = (block for block in FENCED.findall((DOCS / "rl.md").read_text()) if "vllm.entrypoints" in block)
    words = shlex.split(command.replace("\\\n", " "))
    start = words.index("vllm.entrypoints.openai.api_server")
    code = (
        "import sys; from vllm.entrypoints.openai.cli_args import make_arg_parser; "
        "from vllm.utils.argparse_utils import FlexibleArgumentParser; "
        "args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]); "
        "from pkgutil import resolve_name; "
        "[resolve_name(name) for name in [*args.middleware, args.worker_extension_cls]]; "
        "print(args.model, args.max_model_len, args.weight_transfer_config.backend, len(args.middleware))"
    )
    (tmp_path / "read.py").write_text(code)
    done = run_program(str(tmp_path / "read.py"), *words[start + 1 :], prepared=vllm_on_cpu)
    assert done.stdout.splitlines()[-1:] == ["Qwen/Qwen3-0.6B 2048 etp 2"], done.stderr[-2000:]
