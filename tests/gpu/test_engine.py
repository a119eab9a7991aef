"""The engine on NCCL and on peer copies, with plain PyTorch modules."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import bodies_engine as bodies
from tests.gpu.devices import needs_gpus
from tests.gpu.launch import run_on_gpus
from tests.multiproc import bodies_profiles

WORLDS = [pytest.param(n, marks=needs_gpus(n)) for n in (2, 4)]
TRANSPORTS = {"c10d": "C10dTransport", "copy_engine": "CopyEngineTransport", "auto": "CopyEngineTransport"}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [False, True])
def test_training_equals_unsharded(world_size: int, transport: str, dtype: torch.dtype, recompute: bool) -> None:
    poison = transport != "auto"
    results = run_on_gpus(bodies.training_equals_unsharded, world_size, args=(transport, dtype, recompute, poison))
    for result in results:
        assert result["transports"] == {TRANSPORTS[transport]}
        # With two ranks there is one order of summation; with more, the order differs for replicated parameters.
        bound = 0.0 if world_size == 2 else (1e-6 if dtype == torch.float32 else 4e-3)
        assert result["worst"] <= bound


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
@pytest.mark.parametrize("poison", [False, True])
def test_training_with_look_ahead_across_passes_equals_unsharded(world_size: int, transport: str, poison: bool) -> None:
    for result in run_on_gpus(bodies.look_ahead_equals_unsharded, world_size, args=(transport, poison)):
        assert result["transports"] == {TRANSPORTS[transport]}
        assert result["worst"] <= (0.0 if world_size == 2 else 1e-6)
        assert result["ahead"] > 0
        assert result["abandoned"] > 0
        assert result["slots"] == 2, "four weights of one shape share slots, whatever their process group"


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_weight_changed_before_backward_is_refused(world_size: int) -> None:
    for message in run_on_gpus(bodies.changed_in_backward_is_refused, world_size):
        assert "1.weight" in message


@needs_gpus(2)
@pytest.mark.parametrize("transport", ["c10d", "copy_engine"])
def test_a_profile_names_what_happens_to_each_weight(transport: str) -> None:
    for result in run_on_gpus(bodies_profiles.ranges, 2, args=(transport,)):
        assert result.transports == {TRANSPORTS[transport]}
        bodies_profiles.check(result)
