"""What a worker sends to other engines is what the trainer sent, or nothing."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_patches.refit.control.messages import Invitation, Model
from megatron_patches.refit.errors import DigestError, PartyFailedError
from megatron_patches.refit.layout.boxes import TensorSpec, View
from megatron_patches.refit.layout.digest import digest_array
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.parties.fan_out import Committed, Relay
from megatron_patches.refit.parties.terms import LinkOptions
from megatron_patches.refit.planning.tensors import fold_tensors

SPECS = (TensorSpec("v", (7,), "bfloat16"), TensorSpec("w", (4, 5), "bfloat16"))


def committed() -> tuple[Committed, dict[str, np.ndarray]]:
    """Rows 1 to 3 of ``w`` behind three elements of nothing, and ``v``, as they came from a trainer."""
    random = np.random.default_rng(3)
    whole = {spec.name: random.integers(0, 1 << 16, spec.shape, dtype=np.uint16) for spec in SPECS}
    memory = {"a": np.full(13, 0xABAB, np.uint16), "b": whole["v"].copy()}
    memory["a"][3:] = whole["w"][1:3].ravel()
    rows = SPECS[1].box.with_range(0, 1, 3)
    places = (
        Placement(rows, View("a", 3, rows.shape, (5, 1))),
        Placement(SPECS[0].box, View("b", 0, (7,), (1,))),
    )
    storages = tuple(Storage(name, "bfloat16", held.size, held.size) for name, held in memory.items())
    digests = [digest_array(whole["w"][1:3], rows, (4, 5)), digest_array(whole["v"], SPECS[0].box, (7,))]
    return Committed(7, Model({}, fold_tensors(SPECS)), Manifest(0, "here", storages, places), memory, digests), memory


def test_what_the_trainer_sent_passes() -> None:
    held, memory = committed()
    held.check()
    memory["a"][:3] = 0  # belongs to no box
    held.check()


@pytest.mark.parametrize(("storage", "at", "told"), [("a", 12, r"w\[1:3, 0:5\] in a no longer"), ("b", 0, "in b")])
def test_a_changed_bit_does_not(storage: str, at: int, told: str) -> None:
    held, memory = committed()
    memory[storage][at] ^= 1
    with pytest.raises(DigestError, match=told):
        held.check()


def test_a_relay_that_cannot_reach_the_rendezvous_fails() -> None:
    held, _ = committed()
    options = LinkOptions(transport=None, staging_bytes=1 << 16, sources=2)
    relay = Relay(Invitation("127.0.0.1", 9, "0" * 64, 0.1), 1, "worker 0", options, "cpu", 1.0)
    assert not relay.stop()  # nothing is under way yet, so nothing reads the memory
    with pytest.raises(PartyFailedError, match=r"cannot reach the rendezvous at 127\.0\.0\.1:9"):
        relay.run(7, lambda: held)
