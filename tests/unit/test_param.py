"""ETPShardedParam as a tensor: how it is cut, what it is called, what it refuses. One process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from etp.errors import EtpStateError
from etp.group import WeightGroup
from etp.layout import ShardLayout
from etp.param import ETPShardedParam, cut_shard
from etp.shard_states import guard_states
from tests.support.fake_group import fake_group


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    with fake_group(rank=2, world_size=4) as group:
        yield group


@given(st.integers(1, 90), st.integers(1, 9), st.integers(1, 20))
def test_shards_put_together_are_the_weight_and_zeros(rows: int, shards: int, align: int) -> None:
    weight = torch.randn(rows, 3)
    layout = ShardLayout((rows, 3), shards, align)
    parts = [cut_shard(weight, layout, rank) for rank in range(shards)]
    assert all(tuple(part.shape) == layout.shard_shape for part in parts)
    whole = torch.cat(parts)
    assert torch.equal(whole[:rows], weight)
    assert whole[rows:].count_nonzero() == 0


def test_a_cut_is_a_copy_and_keeps_dtype() -> None:
    weight = torch.randn(8, 2).bfloat16()
    part = cut_shard(weight, ShardLayout((8, 2), 2, 1), 1)
    assert part.dtype is torch.bfloat16
    part.zero_()
    assert weight[4:].count_nonzero() > 0


def test_a_weight_that_does_not_fit_its_layout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the weight has shape \(8, 2\); its layout says \(9, 2\)"):
        cut_shard(torch.randn(8, 2), ShardLayout((9, 2), 2), 0)


def test_from_full_takes_this_ranks_rows(world: dist.ProcessGroup) -> None:
    weight = torch.randn(40, 3)
    param = ETPShardedParam.from_full(weight, world, pad_for_alignment=4)
    assert isinstance(param, torch.nn.Parameter)
    assert param.layout == ShardLayout((40, 3), 4, 4)
    assert torch.equal(param.local_shard()[:12], weight[24:36])
    assert param.requires_grad == weight.requires_grad
    assert param.is_leaf
    assert param.group is world


def test_a_frozen_weight_makes_a_frozen_shard(world: dist.ProcessGroup) -> None:
    frozen = torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)
    assert not ETPShardedParam.from_full(frozen, world).requires_grad
    assert ETPShardedParam.from_full(torch.nn.Parameter(torch.randn(4, 4)), world).requires_grad


def test_a_shard_of_the_wrong_shape_or_count_is_refused(world: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match=r"has shape \(16, 3\), not \(4, 3\)"):
        ETPShardedParam(torch.randn(4, 3), ShardLayout((40, 3), 4), world)
    with pytest.raises(ValueError, match="the layout has 2 shards and the shard group 4 ranks"):
        ETPShardedParam(torch.randn(32, 3), ShardLayout((40, 3), 2), world)


def test_the_local_shard_shares_storage_and_version(world: dist.ProcessGroup) -> None:
    param = ETPShardedParam.from_full(torch.randn(8, 3), world)
    local = param.local_shard()
    assert type(local) is torch.Tensor
    assert local.data_ptr() == param.data_ptr()
    before = param._version
    local.add_(1.0)
    assert param._version == local._version == before + 1


def test_assigning_data_is_a_change_and_reading_it_is_none(world: dist.ProcessGroup) -> None:
    """The same address is no proof of the same values: a swapped-in average is trained on, and swapped in again."""
    param = ETPShardedParam.from_full(torch.randn(10, 3), world, pad_for_alignment=4)
    average, other = torch.randn(4, 3), torch.randn(4, 3)
    group = WeightGroup([param], world)

    def version() -> tuple[object, ...]:
        group.read_shards(0)
        return group.version

    param.data = average
    before = version()
    param.data = other
    average.mul_(2.0)
    param.data = average
    after = version()
    assert after != before
    assert torch.equal(param.data, average)
    assert version() == after


def test_its_name_says_which_rows_of_what(world: dist.ProcessGroup) -> None:
    param = ETPShardedParam.from_full(torch.randn(40, 3), world, pad_for_alignment=4)
    param.fqn = "layers.0.weight"
    assert repr(param) == ("ETPShardedParam(layers.0.weight: rows 24:36 of (40, 3), shard 2 of 4, torch.float32, cpu)")


def test_an_orphan_says_what_it_lacks(world: dist.ProcessGroup) -> None:
    param = ETPShardedParam.from_full(torch.randn(8, 3), world)
    with pytest.raises(EtpStateError, match="belongs to no weight group; pass its module to"):
        _ = param.weight_group
    with pytest.raises(EtpStateError, match="has no runtime yet"):
        _ = param.driver
    assert not param.has_driver


def test_a_weight_is_in_one_group(world: dist.ProcessGroup) -> None:
    param = ETPShardedParam.from_full(torch.randn(8, 3), world)
    param.fqn = "w"
    group = WeightGroup([param], world)
    assert param.weight_group is group
    with pytest.raises(EtpStateError, match="w is in group w already"):
        WeightGroup([param], world)


def test_ordinary_operations_give_plain_tensors(world: dist.ProcessGroup) -> None:
    param = ETPShardedParam.from_full(torch.randn(8, 3), world)
    for result in (param * 2, param.detach(), torch.zeros_like(param), param.sum(), param.clone()):
        assert type(result) is torch.Tensor
    assert param.data.shape == param.shape


def test_its_number_of_elements_is_that_of_the_weight(world: dist.ProcessGroup) -> None:
    """As ``sum(p.numel() for p in model.parameters())`` counts a model's; the shard has padding rows here."""
    param = ETPShardedParam.from_full(torch.randn(41, 3), world, pad_for_alignment=4)
    assert (param.numel(), param.nelement(), torch.numel(param)) == (123, 123, 123)
    assert param.local_shard().numel() == param.data.numel() == param.shape.numel() == 36


def test_a_module_state_dict_holds_plain_shards_that_pickle(world: dist.ProcessGroup, tmp_path: object) -> None:
    layer = torch.nn.Linear(3, 8)
    shard = ETPShardedParam.from_full(layer.weight, world)
    layer._parameters["weight"] = shard
    state = layer.state_dict()
    assert type(state["weight"]) is torch.Tensor
    torch.save(state, f"{tmp_path}/shards.pt")
    loaded = torch.load(f"{tmp_path}/shards.pt", weights_only=True)
    assert torch.equal(loaded["weight"], shard.local_shard())
    shard.local_shard().zero_()
    layer.load_state_dict(loaded)
    assert torch.equal(shard.local_shard(), loaded["weight"])
    assert layer._parameters["weight"] is shard


def test_shards_are_saved_and_loaded_after_their_process_group() -> None:
    """As a program does that ends with ``destroy_process_group`` before it saves."""
    layer = torch.nn.Linear(3, 40)
    with fake_group(rank=2, world_size=4) as group:
        shard = ETPShardedParam.from_full(layer.weight, group, pad_for_alignment=4)
        layer._parameters["weight"] = shard
        guard_states(layer)
    assert repr(shard).endswith("rows 24:36 of (40, 3), shard 2 of 4, torch.float32, cpu)")
    shard.fqn = "w"
    state = layer.state_dict()
    before = state["weight"].clone()
    shard.local_shard().zero_()
    layer.load_state_dict({**state, "weight": before})
    assert torch.equal(shard.local_shard(), before)
    state._metadata[""]["etp_cuts"] = {"weight": [1, 4, 40]}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"holds shard 1 of 4 .* and this rank needs shard 2 of 4"):
        layer.load_state_dict(state)


def test_accumulate_hooks_can_be_removed(world: dist.ProcessGroup) -> None:
    param = ETPShardedParam.from_full(torch.randn(8, 3), world)
    seen: list[str] = []
    first = param.register_post_accumulate_grad_hook(lambda _: seen.append("first"))
    param.register_post_accumulate_grad_hook(lambda _: seen.append("second"))
    param.register_reduce_hook(lambda: seen.append("reduced"))
    param.run_reduce_hooks()
    first.remove()
    param.run_reduce_hooks()
    assert seen == ["reduced", "first", "second", "reduced", "second"]
