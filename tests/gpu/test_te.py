"""Transformer Engine's Linear, LayerNormLinear and GroupedLinear with sharded weights."""

from __future__ import annotations

import itertools

import pytest

from tests.gpu import bodies_te as bodies
from tests.gpu.devices import needs_gpus, needs_te
from tests.gpu.launch import run_on_gpus

pytestmark = needs_te()
KINDS = ["Linear", "LayerNormLinear", "GroupedLinear"]
WORLDS = [pytest.param(n, marks=needs_gpus(n)) for n in (2, 4)]


# Recomputation is the same with and without bias and on either transport, so it is tried with one of each.
WAYS = [
    *itertools.product(["c10d", "copy_engine"], [False, True], [False, True], [False]),
    *itertools.product(["copy_engine"], [False], [False, True], [True]),
]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("transport", "bias", "fuse", "recompute"), WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_equals_whole(
    world_size: int, transport: str, kind: str, bias: bool, fuse: bool, recompute: bool
) -> None:
    arguments = (kind, transport, bias, fuse, recompute)
    worst = run_on_gpus(bodies.te_module_equals_whole, world_size, args=arguments)
    # Two ranks: one order of summation, bitwise equal. More: replicated gradients are summed in NCCL's order.
    assert max(worst) <= (0.0 if world_size == 2 else 2e-4)


@pytest.mark.parametrize("world_size", WORLDS)
def test_layers_are_tes_own(world_size: int) -> None:
    for found in run_on_gpus(bodies.constructed_is_te, world_size):
        assert [name.rpartition(".")[2] for name in found] == KINDS
        assert all(name.startswith("transformer_engine.pytorch.module") for name in found)


@needs_gpus(4)
@pytest.mark.parametrize("transport", ["c10d", "copy_engine"])
@pytest.mark.parametrize(("kind", "mode"), [("Linear", "column"), ("Linear", "row"), ("LayerNormLinear", "column")])
@pytest.mark.parametrize(("sequence", "fuse"), [(False, False), (True, True)])
def test_sharded_equals_whole_under_tensor_parallelism(
    kind: str, mode: str, transport: str, sequence: bool, fuse: bool
) -> None:
    arguments = (kind, transport, mode, sequence, fuse)
    # Weights have two shards, whose gradients add up in one order; replicated ones are summed by Transformer Engine.
    assert max(run_on_gpus(bodies.te_parallel_module_equals_whole, 4, args=arguments)) == 0.0


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_weight_passes_gradients_on(world_size: int, kind: str) -> None:
    expected = ["layer_norm_bias", "layer_norm_weight"] if kind == "LayerNormLinear" else []
    for found in run_on_gpus(bodies.frozen_weight, world_size, args=(kind,)):
        assert sorted(found) == expected


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("transport", ["c10d", "copy_engine"])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_run_once_behind_the_last_use(world_size: int, transport: str, kind: str) -> None:
    for counts in run_on_gpus(bodies.hooks_of_two_uses, world_size, args=(kind, transport)):
        assert set(counts.values()) == {3}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_on_saved_tensors_are_refused(world_size: int, kind: str) -> None:
    for message in run_on_gpus(bodies.hooks_are_refused, world_size, args=(kind,)):
        assert "use_reentrant=True" in message
