"""Digests see every byte and its place, on any chunking; the manifests of peers are compared before values."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from etp import digest
from etp.digest import check_peers_agree, tensor_digest
from etp.errors import PeerMismatchError
from tests.support.fake_group import fake_group


@given(st.lists(st.integers(0, 255), min_size=1, max_size=40), st.data())
def test_any_changed_byte_changes_the_digest(values: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(values) - 1))
    other = list(values)
    other[place] = data.draw(st.integers(0, 255).filter(lambda value: value != values[place]))
    digests = {tensor_digest(torch.tensor(each, dtype=torch.uint8)) for each in (values, other)}
    assert len(digests) == 2


@given(st.lists(st.integers(0, 255), min_size=2, max_size=30), st.data())
def test_order_counts(values: list[int], data: st.DataObject) -> None:
    a, b = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, len(values) - 1))
    swapped = list(values)
    swapped[a], swapped[b] = swapped[b], swapped[a]
    same = swapped == values
    digests = {tensor_digest(torch.tensor(each, dtype=torch.uint8)) for each in (values, swapped)}
    assert (len(digests) == 1) == same


def test_trailing_zeros_count() -> None:
    digests = {tensor_digest(torch.zeros(size, dtype=torch.uint8)) for size in range(50)}
    assert len(digests) == 50


@pytest.mark.parametrize("chunk", [1, 7, 64, 99, 100, 101])
def test_chunks_do_not_change_the_digest(chunk: int) -> None:
    tensor = torch.randn(10, 10)
    whole = tensor_digest(tensor)
    with mock.patch.object(digest, "_CHUNK", chunk):
        assert tensor_digest(tensor) == whole


def test_a_change_behind_the_first_chunk_is_seen() -> None:
    tensor = torch.zeros(4 * digest._CHUNK + 5, dtype=torch.uint8)
    other = tensor.clone()
    other[-1] = 1
    assert tensor_digest(tensor) != tensor_digest(other)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
)
def test_strides_do_not_count_but_values_do(dtype: torch.dtype) -> None:
    tensor = (torch.randn(6, 4) * 5).to(dtype)
    tensor[0, 1] = 0  # even booleans are not all alike
    assert tensor_digest(tensor) == tensor_digest(tensor.t().contiguous().t())
    assert tensor_digest(tensor) != tensor_digest(tensor.t())
    assert 0 <= tensor_digest(tensor) < 1 << 64


def test_signed_zero_and_nan_payloads_are_bytes_too() -> None:
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    assert tensor_digest(nan) == tensor_digest(nan.clone())


def test_scalars_and_empty_tensors_have_digests() -> None:
    assert tensor_digest(torch.tensor(3.5)) == tensor_digest(torch.tensor([3.5]))
    assert tensor_digest(torch.empty(0)) == 0


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_agrees_with_itself_also_about_nothing(alone: dist.ProcessGroup) -> None:
    check_peers_agree({"w": torch.randn(3, 2), "b": torch.randn(2).bfloat16()}, alone, "test")
    check_peers_agree({}, alone, "test")


def manifests_error(*manifests: list[str]) -> str:
    with fake_group(rank=0, world_size=len(manifests)) as group, pytest.raises(PeerMismatchError) as error:
        digest._raise_for_manifests(list(manifests), group, "shard_module")
    return str(error.value)


def test_the_first_rank_that_differs_is_named_with_both_sides() -> None:
    message = manifests_error(["a [2]", "b [3]"], ["a [2]", "b [3]"], ["a [4]", "b [3]"])
    assert message == "shard_module: rank 2 has a [4] where rank 0 has a [2]; build the same model on all ranks"


def test_a_missing_and_a_surplus_weight_are_named() -> None:
    assert "rank 1 has nothing where rank 0 has b [3]" in manifests_error(["a [2]", "b [3]"], ["a [2]"])
    assert "rank 1 has b [3] where rank 0 has nothing" in manifests_error(["a [2]"], ["a [2]", "b [3]"])


def test_the_same_weights_in_another_order_are_named_as_that() -> None:
    assert "list the same weights in different orders" in manifests_error(["a [2]", "b [3]"], ["b [3]", "a [2]"])


def test_long_lists_are_cut() -> None:
    names = [f"w{index}" for index in range(9)]
    assert "w0, w1, w2, w3, w4 and 4 more" in manifests_error(names, ["x"])
