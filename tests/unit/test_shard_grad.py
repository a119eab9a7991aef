"""ShardGrad: when a gradient becomes one, what stays plain, what a copy is, and whose it is. One process."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from etp.errors import EtpStateError
from etp.group import WeightGroup
from etp.param import ETPShardedParam
from etp.shard_grad import ShardGrad, plain
from tests.support.fake_group import fake_group


@pytest.fixture
def param() -> Iterator[ETPShardedParam]:
    with fake_group(rank=1, world_size=2) as group:
        made = ETPShardedParam.from_full(torch.randn(19, 3, requires_grad=True), group)
        made.fqn = "w"
        WeightGroup([made], group)
        yield made


def test_there_is_none_before_there_is_one(param: ETPShardedParam) -> None:
    assert param.grad is None


def test_whoever_made_it_a_gradient_is_read_as_a_shards(param: ETPShardedParam) -> None:
    given = torch.randn(param.layout.shard_shape)
    param.grad = given
    assert isinstance(param.grad, ShardGrad)
    assert param.grad.data_ptr() == given.data_ptr()
    (param * 3).sum().backward()  # autograd adds in place
    assert isinstance(param.grad, ShardGrad)
    param.grad = None
    (param * 3).sum().backward()
    assert isinstance(param.grad, ShardGrad)
    assert torch.equal(plain(param.grad), torch.full_like(given, 3.0))


def test_reading_assigning_and_deleting_it_takes_no_dispatch(
    param: ETPShardedParam, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's hook reads and assigns the gradient of each weight in each backward pass."""
    calls = Counter[object]()
    monkeypatch.setattr(ETPShardedParam, "__torch_function__", lambda func, *_: calls.update([func]))
    param.grad = torch.randn(param.layout.shard_shape)
    assert isinstance(param.grad, ShardGrad)
    del param.grad
    assert param.grad is None
    assert not calls


def test_it_is_one_object_and_remembers_whose_it_is(param: ETPShardedParam) -> None:
    param.grad = torch.randn(param.layout.shard_shape)
    first = id(param.grad)
    gc.collect()
    assert id(param.grad) == first
    other = ETPShardedParam.from_full(torch.randn(19, 3), dist.group.WORLD)
    other.grad = param.grad
    assert isinstance(other.grad, ShardGrad)
    assert other.grad.belongs_to(other)
    assert isinstance(param.grad, ShardGrad)
    assert param.grad.belongs_to(param)


def test_its_local_part_has_no_padding(param: ETPShardedParam) -> None:
    param.grad = torch.randn(param.layout.shard_shape)
    assert isinstance(param.grad, ShardGrad)
    part = param.grad.local_part()
    assert type(part) is torch.Tensor
    assert tuple(part.shape) == (3, 3)
    assert part.data_ptr() == param.grad.data_ptr()


def test_results_are_plain_and_aliases_are_not(param: ETPShardedParam) -> None:
    param.grad = grad = torch.randn(param.layout.shard_shape)
    for result in (param.grad * 2, param.grad.clone(), param.grad[:2], torch.zeros_like(param.grad), param.grad.sum()):
        assert type(result) is torch.Tensor
    for alias in (param.grad.detach(), param.grad.data, param.grad.detach().data):
        assert isinstance(alias, ShardGrad)
        assert alias.belongs_to(param)
    assert param.grad.mul_(2) is param.grad
    assert torch.equal(grad, plain(param.grad))
    assert param.grad._version == grad._version


def test_norms_along_a_dimension_and_norm_itself_are_the_shards(param: ETPShardedParam) -> None:
    grad = torch.randn(param.layout.shard_shape)
    param.grad = grad.clone()
    assert torch.equal(torch.linalg.vector_norm(param.grad, dim=1), torch.linalg.vector_norm(grad, dim=1))
    assert torch.equal(param.grad.norm(), grad.norm())
    assert torch.equal(torch.norm(param.grad, dim=-2), torch.norm(grad, dim=-2))


def test_what_needs_the_whole_weight_is_refused_beside_a_gradient(param: ETPShardedParam) -> None:
    param.grad = torch.randn(param.layout.shard_shape)
    for first, second in ((param.grad, param), (param, param.grad)):
        with pytest.raises(TypeError, match="a shard is not its weight"):
            torch.dist(first, second)
    assert type(torch.add(param.grad, param.detach(), alpha=0.1)) is torch.Tensor
    with torch.no_grad():
        assert torch.equal(param.grad.add(param, alpha=0.1), plain(param.grad).add(param.local_shard(), alpha=0.1))


def test_a_whole_norm_takes_no_out(param: ETPShardedParam) -> None:
    param.grad = torch.randn(param.layout.shard_shape)
    with pytest.raises(TypeError, match="takes no out="):
        torch.linalg.vector_norm(param.grad, out=torch.empty(()))


def test_without_a_runtime_a_whole_norm_is_an_error_and_zeroing_is_not(param: ETPShardedParam) -> None:
    param.grad = torch.randn(param.layout.shard_shape)
    with pytest.raises(EtpStateError, match="w has no runtime yet"):
        torch.nn.utils.get_total_norm([param.grad])
    param.grad.zero_()
    assert param.grad.count_nonzero() == 0


def test_copies_and_pickles_are_plain(param: ETPShardedParam, tmp_path: object) -> None:
    param.grad = grad = torch.randn(param.layout.shard_shape)
    copied, loaded = copy.deepcopy(param.grad), pickle.loads(pickle.dumps(param.grad))
    torch.save({"grad": param.grad}, f"{tmp_path}/grad.pt")
    for other in (copied, loaded, torch.load(f"{tmp_path}/grad.pt", weights_only=True)["grad"]):
        assert type(other) is torch.Tensor
        assert torch.equal(other, grad)
        assert other.data_ptr() != grad.data_ptr()


def test_a_gradient_that_outlives_its_parameter_says_so() -> None:
    with fake_group(rank=0, world_size=2) as group:
        param = ETPShardedParam.from_full(torch.randn(8, 3), group)
        param.grad = torch.randn(param.layout.shard_shape)
        grad = param.grad
        del param
        gc.collect()
        assert (grad * 2).shape == grad.shape
        with pytest.raises(EtpStateError, match="keep the module, or clone the gradient"):
            torch.linalg.vector_norm(grad)
