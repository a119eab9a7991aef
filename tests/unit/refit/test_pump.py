"""The order in which a source packs and digests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import numpy as np
import pytest

from megatron_patches.refit.layout.boxes import TensorSpec, View, row_major_strides
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.memory.loads import Load, Reach, Terms
from megatron_patches.refit.memory.packets import Packing
from megatron_patches.refit.memory.sender import Sender
from megatron_patches.refit.planning.plan import make_plan
from megatron_patches.refit.transports.pump import send_version
from megatron_patches.refit.transports.sending import SendingEnd, Slot


class Noting(Sender):
    """Notes in which order its port gets work."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.given = list[str]()

    def pack_into(self, load: Load, version: int, payload: Any) -> Packing:
        self.given.append("pack")
        return super().pack_into(load, version, payload)

    def digest(self, loads: tuple[Load, ...], version: int) -> list[Packing]:
        self.given.append("digest")
        return super().digest(loads, version)


class Taking:
    """A sending end whose destination takes everything at once."""

    timeout_s = 20.0

    def free_slot(self, destinations: Collection[int], check: object) -> Slot | None:
        del check
        return Slot(0, 0, np.empty(1 << 12, dtype=np.uint8)) if destinations else None

    def send(self, *args: object) -> None:
        """It is taken."""

    def send_direct(self, *args: object) -> None:
        """It is taken."""

    def finish(self, check: object) -> None:
        """All has been taken."""


@pytest.mark.parametrize("quantizing", [False, True])
def test_scales_that_are_written_last_delay_no_weights_that_are_quantized_before(quantizing: bool) -> None:
    """On a GPU, what is digested after them would wait with them."""
    specs = [TensorSpec("scales", (4,), "float32"), TensorSpec("weight", (4, 64), "bfloat16")]
    places = [Placement(spec.box, View(spec.name, 0, spec.shape, row_major_strides(spec.shape))) for spec in specs]
    storages = tuple(Storage(spec.name, spec.dtype, spec.numel, spec.numel) for spec in specs)
    side = Manifest(0, "", storages, tuple(places))
    terms = {(0, 0): Terms(packet_bytes=512, reach=Reach.CONTIGUOUS, direct_bytes=64, load_bytes=128)}
    held = {"scales": np.zeros(4, dtype=np.uint32), "weight": np.zeros(256, dtype=np.uint16)}
    sender = Noting(make_plan(specs, [side], [side]), 0, held, terms, urgent=quantizing)
    send_version(sender, cast("SendingEnd", Taking()), 1, lambda: None)
    digests = ["digest"] * 4
    assert sender.given == ([*digests, "pack"] if quantizing else ["digest", "pack", *digests[1:]])
