"""Tensors that were computed from a shard: which are marked, and what they refuse. One process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from etp.derived import ShardData, ShardDerived
from etp.errors import EtpStateError
from etp.group import WeightGroup
from etp.param import ETPShardedParam
from etp.shard_copy import ShardCopy
from tests.support.fake_group import fake_group

ROWS, COLUMNS = 8, 3


class Driver:
    """A runtime, as far as arithmetic on shards asks it."""

    in_forward = sums_gradients = False
    reductions = SimpleNamespace(require_complete=lambda _: None)


@pytest.fixture
def shard() -> Iterator[Any]:
    with fake_group(rank=1, world_size=4) as group:
        param: Any = ETPShardedParam.from_full(torch.randn(4 * ROWS, COLUMNS, requires_grad=True), group, 1)
        param.attach(Driver(), "w")
        WeightGroup([param], group)
        yield param


@pytest.mark.parametrize(
    ("function", "marked"),
    [
        (lambda w: w * 2, True),
        (lambda w: (w * 2).abs().double(), True),
        (lambda w: w.bfloat16(), True),
        (lambda w: w.view(COLUMNS, ROWS), True),
        (lambda w: torch.zeros(ROWS, COLUMNS) + w, True),
        (lambda w: w.flatten(), True),
        (lambda w: w.sum(0), False),
        (lambda w: (w * 2).sum(), False),
        (lambda w: w > 0, False),
        (torch.ones_like, False),
        (lambda w: w.new_zeros(99, 99), False),
        (lambda w: torch.zeros(ROWS, COLUMNS).add_(w.detach()), False),
        (lambda w: w.detach().sum(0), False),
    ],
)
def test_what_could_pass_for_a_weight_is_marked(shard: Any, function: Callable[[Any], Any], marked: bool) -> None:
    plain = shard.local_shard().clone().requires_grad_()
    result = function(shard)
    assert type(result) is (ShardDerived if marked else torch.Tensor)
    assert torch.equal(torch.as_tensor(result), function(plain))


def test_copies_keep_the_cut_whatever_is_done_to_them(shard: Any) -> None:
    own = shard.local_shard().clone()
    for made, expected in (
        (shard.detach() * 2, own * 2),
        ((shard * 2).detach() + 1, own * 2 + 1),
        (shard.data.double().clone(), own.double()),
        (0.5 * shard.detach().bfloat16().cpu() + 1, 0.5 * own.bfloat16() + 1),
        (shard.detach().clone().mul_(3).add_(shard.detach()), own * 3 + own),
    ):
        assert type(made) is ShardCopy
        assert made.etp_cut == (1, 4, 32)
        assert torch.equal(made, expected)
    assert type(shard.detach().flatten()) is torch.Tensor
    other = ShardCopy.of(own.clone(), (2, 4, 32))
    assert type(shard.detach() + other) is torch.Tensor
    with pytest.raises(EtpStateError, match=r"linear on a copy of shard 1 of 4: a shard is not its weight"):
        F.linear(torch.ones(2, COLUMNS), shard.detach())


def test_they_are_saved_and_copied_as_plain_tensors(shard: Any) -> None:
    """As where a program saves ``{name: param.cpu() for name, param in model.named_parameters()}``."""
    file = io.BytesIO()
    torch.save({"w": shard.double()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["w"]
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, shard.local_shard().double())
    shard.driver.in_forward = True
    with torch.no_grad():
        computed = shard * 2
    assert type(computed) is ShardDerived
    copied: Any = copy.deepcopy(computed)
    assert type(copied) is ShardCopy
    assert copied.data_ptr() != computed.data_ptr()
    assert torch.equal(copied, shard.local_shard() * 2)


def test_gradients_pass_through_marks(shard: Any) -> None:
    own = shard.local_shard().clone().requires_grad_()
    for weight in (shard, own):
        (torch.sin(weight.double() * 3).view(COLUMNS, ROWS) ** 2).sum().backward()
    assert own.grad is not None
    assert own.grad.count_nonzero() == own.numel()
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(shard.grad.as_subclass(torch.Tensor), own.grad)


@pytest.mark.parametrize("in_forward", [False, True])
def test_without_autograd_only_a_forward_pass_marks(shard: Any, in_forward: bool) -> None:
    shard.driver.in_forward = in_forward
    with torch.no_grad():
        expected: type[torch.Tensor] = ShardDerived if in_forward else ShardCopy
        assert type(shard.double()) is expected
        with pytest.raises(EtpStateError, match=r"^add on ETPShardedParam\(w: rows 8:16 of \(32, 3\)"):
            torch.add(torch.zeros(2, ROWS, COLUMNS), shard)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("linear", lambda w: F.linear(torch.ones(2, COLUMNS), w)),
        ("linear", lambda w: F.linear(w, torch.ones(2, COLUMNS))),
        ("embedding", lambda w: F.embedding(torch.tensor([1]), w)),
        ("t", lambda w: w.t()),
        ("matmul", lambda w: torch.ones(1, ROWS) @ w),
        ("__getitem__", lambda w: w[0]),
        ("expand", lambda w: w.expand(2, -1, -1)),
    ],
)
def test_a_marked_tensor_is_no_weight(shard: Any, name: str, function: Callable[[Any], Any]) -> None:
    with pytest.raises(EtpStateError, match=rf"{name}.* on .*ETPShardedParam\(w: .*replicated_modules"):
        function(shard * 2)


def test_rows_of_data_and_gradients_are_not_chosen_by_number(shard: Any) -> None:
    """As in ``table.weight.data[padding_idx].zero_()`` and ``table.weight.grad[:old_rows] = 0``."""
    (shard * 2).sum().backward()
    for own in (shard.data, shard.grad):
        before = own.clone()
        for refused in (
            lambda own=own: own[3].zero_(),
            lambda own=own: own[[1, 2]],
            lambda own=own: own[3, 0],
            lambda own=own: own[torch.tensor([1, 2])],
            lambda own=own: own[torch.arange(ROWS) > 2],
            lambda own=own: own.__setitem__(slice(0, 2), 0),
            lambda own=own: own.__setitem__((slice(0, 2), 1), 0),
            lambda own=own: own.__setitem__(3, 0),
            lambda own=own: own.select(0, 3),
            lambda own=own: own.index_fill_(-2, torch.tensor([1]), 0.0),
            lambda own=own: own.index_select(dim=0, index=torch.tensor([1])),
            lambda own=own: torch.select(input=own, dim=0, index=3),
        ):
            with pytest.raises(TypeError, match=r"ETPShardedParam\(w: .*rows 8 to 16, without 16, in param\.local"):
                refused()
        assert torch.equal(own, before)
        own[own > 1] = 1
        own[:] *= 2
        own[..., 0] = 3
        own[:, 1] = 4
        own.select(1, 2).fill_(5)
        assert own[:2].tolist() == [[3, 4, 5], [3, 4, 5]]
        assert torch.ones(ROWS, COLUMNS)[own > 4].numel() == ROWS


def test_rows_of_a_copy_are_not_chosen_by_number(shard: Any) -> None:
    """As in ``table.weight.detach()[padding_idx].zero_()``, and in ``module.state_dict()["table.weight"][5] = row``."""
    before = shard.local_shard().clone()
    for made in (shard.detach(), shard.detach().clone(), shard.data.double()):
        for refused in (
            lambda own=made: own[3].zero_(),
            lambda own=made: own.__setitem__(slice(0, 2), 0),
            lambda own=made: own.index_fill_(0, torch.tensor([1]), 0.0),
            lambda own=made: torch.select(input=own, dim=0, index=3),
        ):
            with pytest.raises(TypeError, match=r"rows of a copy of shard 1 of 4 of a weight of 32 .*local_shard"):
                refused()
    assert torch.equal(shard.local_shard(), before)
    own = shard.detach()
    own[own > 1] = 1
    own[:, 1] = 4
    own.select(1, 2).fill_(5)
    assert torch.equal(own[:2], shard.local_shard()[:2])
    whole = ShardCopy.of(torch.ones(ROWS, COLUMNS), (0, 1, ROWS))
    whole[3] = 2
    assert whole[3].tolist() == [2, 2, 2]


def test_data_is_an_ordinary_tensor_but_not_drawn_anew(shard: Any) -> None:
    group = shard.weight_group

    def version() -> tuple[object, ...]:
        group.read_shards(0)
        return tuple(group.version)

    before, data = version(), shard.data
    assert type(data) is ShardData
    assert data.data_ptr() == shard.data_ptr()
    # Megatron relies on it.
    assert data._base is None
    for refused in (data.normal_, lambda: torch.nn.init.uniform_(data), lambda: torch.nn.init.trunc_normal_(data)):
        with pytest.raises(TypeError, match=r"on ETPShardedParam\(.*Initialise before etp\.shard_module"):
            refused()
    for refused in (shard.detach().normal_, lambda: torch.nn.init.normal_(shard.detach()), data.clone().uniform_):
        with pytest.raises(TypeError, match=r"on a copy of shard 1 of 4: .*Initialise before etp\.shard_module"):
            refused()
    assert version() == before
    assert data.mul_(2.0) is data
    assert version() != before
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(type(made) is torch.Tensor for made in (data + 1, torch.cat([data]), loaded))
    assert torch.equal(loaded, data)
    copies: tuple[Any, ...] = (data.clone(), copy.deepcopy(data), loaded)
    assert all(made.etp_cut == (1, 4, 32) for made in copies)
    shard.data = data
    data.copy_(shard.detach() + 1)
    torch.empty_like(data).normal_()
    assert torch.equal(data - shard, torch.zeros_like(data))
