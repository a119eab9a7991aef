"""The order of gathers in real Megatron trainings, as ``--etp-print-chains`` prints it and as the runtimes keep it."""

from __future__ import annotations

import re
from typing import Any

import pytest

import megatron_patches
from etp.param import ETPShardedParam
from tests.integration.cases import LLAMA, ONE_MICROBATCH, SCHEDULE
from tests.integration.megatron_run import MegatronPool, train

pytestmark = [pytest.mark.integration, pytest.mark.multiproc]

LAYER = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
SHORT = "--train-iters 3 --eval-iters 1"
VIRTUAL_STAGES = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
FOUR_LAYERS = LLAMA.replace("--num-layers 2", "--num-layers 4")
INTERLEAVED = f"{FOUR_LAYERS} {SCHEDULE} {SHORT} {VIRTUAL_STAGES} --etp-size 2".split()
HEADING = re.compile(r"pipeline stage (\d), model chunk (\d): chain of (\d+) weight groups, prefetch depth (\d)")
ENTRY = re.compile(r"  (\S.*): \[\d+, \d+\] over 2 ranks, slot \d+, \d+ bytes")


def layer(index: int) -> list[str]:
    """The weights of one layer in the order in which a forward pass needs them."""
    return [f"decoder.layers.{index}.{name}.weight" for name in LAYER]


def printed_chains(log: str) -> dict[tuple[int, int], list[str]]:
    """The weights of each printed chain, by pipeline stage and model chunk."""
    chains: dict[tuple[int, int], list[str]] = {}
    lines = log.splitlines()
    for number, line in enumerate(lines):
        heading = HEADING.search(line)
        if heading:
            stage, chunk, length, _ = (int(value) for value in heading.groups())
            assert (stage, chunk) not in chains, "printed twice"
            entries = [ENTRY.fullmatch(entry) for entry in lines[number + 1 : number + 1 + length]]
            chains[stage, chunk] = [entry.group(1) if entry else "" for entry in entries]
    return chains


def test_the_order_of_gathers_is_printed_once(megatron: MegatronPool) -> None:
    arguments = f"{LLAMA} {SCHEDULE} {ONE_MICROBATCH} {SHORT} --etp-size 2".split()
    first, second = megatron.train(2, [*arguments, "--etp-print-chains"])
    order = ["embedding.word_embeddings.weight", *layer(0), *layer(1), "output_layer.weight"]
    assert printed_chains(first.log) == {(0, 0): order}
    assert "prefetch depth 1" in first.log
    assert "chain of" not in second.log


def test_it_is_not_printed_unasked(megatron: MegatronPool) -> None:
    arguments = f"{LLAMA} {SCHEDULE} {ONE_MICROBATCH} {SHORT} --etp-size 2".split()
    assert all("chain of" not in trajectory.log for trajectory in megatron.train(2, arguments))


def chains_of_chunks(rank: int, world_size: int, arguments: list[str]) -> list[set[int]]:
    """Train, and tell for each model chunk of this rank which chain objects its weights' visits are noted in."""
    megatron_patches.apply()
    from megatron.training import training

    found: list[set[int]] = []
    setup = training.setup_model_and_optimizer

    def noting_setup(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        for chunk in result[0]:
            drivers: list[Any] = [shard.driver for shard in chunk.parameters() if isinstance(shard, ETPShardedParam)]
            found.append({id(driver.passes.forward_order) for driver in drivers})
        return result

    training.setup_model_and_optimizer = noting_setup
    try:
        train(rank, world_size, arguments)
    finally:
        training.setup_model_and_optimizer = setup
    return found


def test_virtual_pipeline_stages_print_a_chain_each(megatron: MegatronPool) -> None:
    """Stages that shared one would print the weights of both, and predict across the schedule's switches."""
    printed: dict[tuple[int, int], list[str]] = {}
    for trajectory in megatron.train(4, [*INTERLEAVED, "--etp-print-chains"]):
        chains = printed_chains(trajectory.log)
        assert not chains.keys() & printed.keys()
        printed |= chains
    assert printed == {
        (0, 0): [f"chunk 0: {name}" for name in ("embedding.word_embeddings.weight", *layer(0))],
        (0, 1): [f"chunk 1: {name}" for name in layer(0)],
        (1, 0): [f"chunk 0: {name}" for name in layer(0)],
        (1, 1): [f"chunk 1: {name}" for name in (*layer(0), "output_layer.weight")],
    }


def test_virtual_pipeline_stages_share_no_chain(megatron: MegatronPool) -> None:
    for found in megatron.run(chains_of_chunks, 4, 120.0, (INTERLEAVED,)):
        first, second = found
        assert len(first) == len(second) == 1
        assert first != second
