"""A trainer written against vLLM's own contract sends its weights, in four phases, into servers and Ray actors."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_patches.refit.models.mesh import TrainerMesh
from tests.integration.live_refit import export_all_body
from tests.integration.tiny_models import QWEN3
from tests.support.launch import run_megatron
from tests.support.live_models import Case
from tests.support.prepared import engine_python, engine_release
from tests.support.ray_program import found_by
from tests.support.vllm_host import VllmHost
from tests.support.vllm_server import vllm_server

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(engine_release() == "0.26.0", reason="vLLM 0.26.0 has another contract; run `make test-vllm`"),
]


def exported(tmp_path: Path) -> dict[int, str]:
    """Folders with two checkpoints of one model, by the seed of their weights."""
    folders = {seed: str(tmp_path / f"model_{seed}") for seed in (1, 2)}
    run_megatron(export_all_body, 1, args=(Case(TrainerMesh(), (), QWEN3), folders), timeout_s=180)
    return folders


def fresh_parameters(folder: str, place: Path) -> Any:
    """What an engine of two workers has that has started from a checkpoint."""
    place.mkdir()
    with VllmHost(Path(folder), place, tensor_parallel_size=2) as host:
        return host.connect().parameters()


def told(program: Sequence[str], folders: Iterable[str], place: Path) -> tuple[Any, str]:
    """What a trainer prints at last that pushes checkpoints into a server of two workers, and the server's log."""
    place.mkdir()
    extension = "tests.support.vllm_votes.SabotagedWorker"
    arguments = ("--tensor-parallel-size", "2", "--worker-extension-cls", extension)
    with vllm_server(QWEN3, place, *arguments, spawned=True) as server:  # as it is for users
        done = subprocess.run(
            [engine_python(), *program, server.url, "2", *folders],
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        said = server.log()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:] + said[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), said


def test_what_is_voted_down_is_not_labelled_and_what_a_dead_trainer_leaves_open_is_ended(tmp_path: Path) -> None:
    folders = exported(tmp_path)
    fresh = fresh_parameters(folders[2], tmp_path / "fresh")
    found, said = told(("-m", "tests.integration.contract_training"), folders.values(), tmp_path / "server")
    labels, held = zip(*found["states"], strict=True)
    assert [label["weight_version"] for label in labels] == ["default", "default", "1", "1", "3"]
    random, survived, sent, voted_down, last = held
    assert survived == random
    assert sent not in (random, fresh)
    assert (voted_down, last) == (sent, fresh)
    assert "sabotaged apply" in said
    assert "version 2 was not taken" in found["reason"]
    assert said.count("a weight update was started and never finished") == 2  # once in each worker
    refusals = [
        "world_size is 0; it is the number of the engine's workers",
        "options.memory is in_place, for which the engine must pause",
        "options.sleeping is wake, and vLLM's contract has no call to wake",
        "source is None; pass a WeightSource",
        "source does not yield whole tensors of all of the model on the first rank",
        "cannot start the refit: ",
    ]
    assert [said[: len(start)] for said, start in zip(found["refusals"], refusals, strict=True)] == refusals
    assert "http://127.0.0.1:9" in found["refusals"][-1]


@pytest.mark.skipif(engine_release() in ("0.26.0", "0.32.0"), reason="its sources do not tell which rank holds what")
def test_each_rank_sends_what_it_holds_and_all_learn_what_fails_on_one(tmp_path: Path) -> None:
    """Three ranks, of which FSDP2 gives each another part."""
    folders = exported(tmp_path)
    fresh = {seed: fresh_parameters(folder, tmp_path / f"fresh_{seed}") for seed, folder in folders.items()}
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "tests.integration.contract_ranks")
    found, _ = told(ranks, folders.values(), tmp_path / "server")
    labels, held, reasons = zip(*found, strict=True)
    assert labels == ("1", "1", "1", "4")
    assert held == (fresh[1], fresh[1], fresh[1], fresh[2])
    assert fresh[1] != fresh[2]
    sent, lost, voted_down, last = reasons
    assert sent == last == ["", "", ""]
    assert all(re.search(r"trainer rank 1 on .*: ValueError: this rank has lost its weights", one) for one in lost)
    assert all("version 3 was not taken" in one for one in voted_down)


@pytest.mark.xdist_group("ray")  # the other test and this one share nothing, and are most of `make test-vllm`
def test_actors_behind_vllms_ray_client_hold_what_fresh_engines_do(tmp_path: Path) -> None:
    found = found_by("tests.integration.ray_contract", tmp_path, python=engine_python(), timeout_s=300.0)
    (first, second), refused, sent, both = found["states"]
    assert first[0] != second[0]
    assert refused == [first, second]
    assert sent == [[second[0], "1"], [first[0], "1"]]
    assert both == [[second[0], "2"], [second[0], "2"]]
    none, several, stranger, dead = found["reasons"]
    assert none.startswith("world_size is 1, and client has 0 actors")
    assert several.startswith("world_size is 1, and client has 2 actors")
    assert "1 of the workers of Ray actor" in stranger
    assert "did not join" in stranger
    assert "The actor died" in dead
