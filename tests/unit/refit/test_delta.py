"""Changed elements in place of all: nothing is lost, sizes are the least, and what is damaged is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.memory.delta import PayloadKind, Snapshot, decode_delta, delta_bytes, encode_delta
from megatron_patches.refit.memory.ports import Bytes
from megatron_patches.refit.trainer.adapters import AdapterPublisher
from megatron_patches.refit.trainer.session import RefitOptions
from tests.support.quick import examples


def versions(seed: int, count: int, width: int, changed: int) -> tuple[Bytes, Bytes]:
    """Random elements, and the same with ``changed`` of them changed by a single bit each."""
    rng = np.random.default_rng(seed)
    old = np.frombuffer(rng.bytes(count * width), dtype=f"u{width}")
    new = old.copy()
    new[rng.permutation(count)[:changed]] ^= new.dtype.type(1 << int(rng.integers(8 * width)))
    return old.view(np.uint8), new.view(np.uint8)


def sent(old: Bytes, new: Bytes, width: int) -> tuple[Bytes, int]:
    """The payload and the number of changed elements."""
    payload = new.copy()
    changed = encode_delta(payload, old, width)
    assert changed is not None
    return payload[: delta_bytes(changed, new.size // width, width)], changed


@settings(max_examples=examples(400), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.one_of(st.integers(1, 300), st.integers(65_500, 65_600), st.integers(130_000, 140_000)),
    width=st.sampled_from([1, 2, 4, 8]),
    fraction=st.sampled_from([0.0, 1e-5, 0.01, 0.03, 0.04, 0.3, 0.7, 1.0]),
)
@example(seed=1, count=1, width=2, fraction=1.0)
@example(seed=1, count=131_072, width=2, fraction=0.3)
def test_the_base_and_what_changed_are_the_new_version(seed: int, count: int, width: int, fraction: float) -> None:
    changed = int(np.ceil(fraction * count))
    old, new = versions(seed, count, width, changed)
    payload = new.copy()
    found = encode_delta(payload, old, width)
    indexed = -(-changed * width // 4) * 4 + 4 * changed
    mapped = -(-changed * width // 4) * 4 + -(-count // 8)
    size = min(indexed, mapped)
    assert delta_bytes(changed, count, width) == size
    if found is None:
        assert size >= new.size
        assert np.array_equal(payload, new)  # as it was, to be sent whole
        return
    assert found == changed
    assert size < new.size
    completed = old.copy()
    decode_delta(payload[:size], found, completed, width)
    assert np.array_equal(completed, new)


def test_bits_travel_not_values() -> None:
    """Zeros of both signs are equal as numbers, and not-a-numbers with the same bits are not."""
    old = np.array([0.0, np.nan, 1.0, 2.0] * 8, dtype=np.float32)
    new = old.copy()
    new[0] = -0.0
    payload, changed = sent(old.view(np.uint8), new.view(np.uint8), 4)
    assert changed == 1
    completed = old.copy()
    decode_delta(payload, changed, completed.view(np.uint8), 4)
    assert np.signbit(completed[0])


@pytest.mark.parametrize(("fraction", "share"), [(0.01, 0.03), (0.02, 0.06), (0.03, 0.09), (0.3, 0.3625), (0.94, None)])
def test_what_a_bfloat16_weight_takes(fraction: float, share: float | None) -> None:
    count = 200_000
    old, new = versions(3, count, 2, int(fraction * count))
    if share is None:
        assert encode_delta(new, old, 2) is None
    else:
        assert len(sent(old, new, 2)[0]) == pytest.approx(share * new.size, rel=1e-3)


def damage(kind: str, payload: Bytes, changed: int) -> tuple[Bytes, int]:
    places = payload[-4 * changed :].view(np.uint32)
    if kind == "one too few":
        return payload, changed - 1
    if kind == "one too many":
        return payload, changed + 1
    if kind == "negative":
        return payload, -1
    if kind == "cut short":
        return payload[:-1], changed
    if kind == "twice":
        places[1] = places[0]
    if kind == "backwards":
        places[...] = places[::-1].copy()
    if kind == "beyond the end":
        places[-1] = 4000
    return payload, changed


@pytest.mark.parametrize(
    "kind", ["one too few", "one too many", "negative", "cut short", "twice", "backwards", "beyond the end"]
)
def test_damaged_indices_are_refused(kind: str) -> None:
    old, new = versions(5, 4000, 2, 40)
    payload, changed = damage(kind, *sent(old, new, 2))
    with pytest.raises(TransferError, match=r"rising order|bytes came for"):
        decode_delta(payload, changed, old.copy(), 2)


@pytest.mark.parametrize("place", [0, 1234, 3996, 3997, 3999])
def test_damaged_bitmaps_are_refused(place: int) -> None:
    """One bit flipped: of an element, or of those beyond the last one."""
    old, new = versions(7, 3997, 2, 1000)
    payload, changed = sent(old, new, 2)
    payload[2 * changed + place // 8] ^= 0x80 >> place % 8
    with pytest.raises(TransferError, match=r"marks (999|1001) of 3997 elements as changed; 1000 came"):
        decode_delta(payload, changed, old.copy(), 2)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data(), count=st.integers(1, 200), width=st.sampled_from([1, 2, 4, 8]), changed=st.integers(-1, 201))
def test_random_bytes_are_decoded_or_refused(data: Any, count: int, width: int, changed: int) -> None:
    size = data.draw(st.sampled_from([delta_bytes(max(0, changed), count, width), 7]))
    payload = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), dtype=np.uint8)
    old = np.full(count * width, 0xA5, dtype=np.uint8)
    completed = old.copy()
    try:
        decode_delta(payload, changed, completed, width)
    except TransferError:
        return
    differs = (completed.view(f"u{width}") != old.view(f"u{width}")).sum()
    assert differs <= changed <= count


def test_a_snapshot_is_a_copy_in_memory_that_is_used_again() -> None:
    live = {"w": torch.arange(10, dtype=torch.bfloat16), "b": torch.arange(3)}
    kept = Snapshot()
    assert kept.base is None
    kept.take(4, live)
    live["w"][0] = 77
    base = kept.base
    assert base is not None
    assert base.version == 4
    assert [base.memory[name].tolist() for name in live] == [list(range(10)), [0, 1, 2]]
    before = base.memory["w"]
    kept.take(5, live)
    assert kept.base is not None
    assert kept.base.version == 5
    assert kept.base.memory["w"] is before
    assert kept.base.memory["w"][0] == 77
    kept.drop()
    assert kept.base is None


def test_a_snapshot_of_tensors_is_made_of_tensors() -> None:
    """As of weights on a GPU. What changes its form, or is gone, is not kept."""
    live = {"w": torch.arange(10, dtype=torch.bfloat16), "b": torch.arange(3.0), "gone": torch.zeros(1)}
    kept = Snapshot()
    kept.take(1, live)
    live["w"][0] = 77
    assert kept.base is not None
    before = kept.base.memory["w"]
    assert isinstance(before, torch.Tensor)
    assert before.tolist() == list(range(10))
    kept.take(2, {"w": live["w"], "b": torch.arange(3, dtype=torch.int32)})
    assert kept.base is not None
    assert kept.base.memory.keys() == {"w", "b"}
    assert kept.base.memory["w"] is before
    assert before.tolist()[0] == 77
    assert isinstance(kept.base.memory["b"], torch.Tensor)
    assert kept.base.memory["b"].dtype is torch.int32


def test_a_snapshot_follows_weights_to_another_device() -> None:
    """It would otherwise stay where the weights were, and no change could be found there."""
    kept = Snapshot()
    kept.take(1, {"w": torch.zeros(4, device="meta")})
    kept.take(2, {"w": torch.arange(4.0)})
    assert kept.base is not None
    copy = kept.base.memory["w"]
    assert isinstance(copy, torch.Tensor)
    assert copy.device.type == "cpu"
    assert copy.tolist() == [0, 1, 2, 3]


def test_without_memory_for_a_snapshot_the_next_version_is_sent_whole(caplog: pytest.LogCaptureFixture) -> None:
    class Large(torch.Tensor):
        def clone(self, **_: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    for more, reason in (
        (torch.zeros(2).as_subclass(Large), "CUDA out of memory"),
        (torch.zeros(1).expand(1 << 55), ".*can't allocate memory"),
    ):
        kept = Snapshot()
        kept.take(4, {"w": torch.zeros(2)})
        kept.take(5, {"w": torch.zeros(2), "more": more})
        assert kept.base is None
        assert re.search(f"the version after 5 travels whole, for lack of a copy: {reason}", caplog.text)


def test_deltas_of_adapters_are_refused() -> None:
    with pytest.raises(ValueError, match="payload is delta; versions of an adapter are sent whole"):
        AdapterPublisher(torch.nn.Linear(2, 2), "math", options=RefitOptions(payload=PayloadKind.DELTA))
