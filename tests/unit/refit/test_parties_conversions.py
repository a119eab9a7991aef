"""All parties agree on what destinations convert, and on whether that may lose anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_patches.refit.control.messages import Held
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.layout.conversion import CONVERT, ElementOp, Rule
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.transports.base import TransportName
from tests.unit.refit.test_parties import coverable, scene


def rounding(manifest: Manifest) -> Manifest:
    """The same, where the engine keeps all in bfloat16."""
    steps = (ElementOp(CONVERT, "bfloat16"),)
    storages = tuple(replace(item, rule=Rule(f"{item.name} kept", steps)) for item in manifest.storages)
    return replace(manifest, storages=storages)


@pytest.mark.parametrize("allowed", [True, False])
def test_what_loses_value_fails_the_preparation_of_all_parties_unless_allowed(allowed: bool) -> None:
    case = coverable(3)
    shapes = {spec.name: spec.shape for spec in case.tensors}
    with scene(case, TransportName.SHM, 1 << 20) as parties:
        found = parties.each(
            lambda rank: parties.sources[rank].prepare(lambda: Held({}, shapes, case.sources[rank], allowed)),
            lambda rank: parties.destinations[rank].prepare(lambda _: rounding(case.destinations[rank])),
        )
        if not allowed:
            assert all(isinstance(answer, PartyFailedError) for answer in found)
            assert all("is float32 in the trainer" in str(answer) for answer in found)
            return
        for party, manifest in zip(parties.destinations, case.destinations, strict=True):
            assert len(party.plan.conversions) == len(manifest.storages) > 0
        parties.check(1, parties.move(1))
