"""Bodies: etp.Linear, LayerNormLinear and GroupedLinear against plain modules; experts; what sharding refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations

import etp
from etp import functional
from etp.te import te_available
from tests.multiproc.models import Tiny, batch, loss_of
from tests.multiproc.oracle import combined, poisoned, rows_of_shard
from tests.support.launch import device

ALIGNMENT = 16


class PlainLayerNormLinear(nn.Module):
    """What LayerNormLinear computes, from torch's own parts."""

    def __init__(self, source: nn.Module, full: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.source_normalization, self.eps = source.normalization, source.eps
        for name, value in full.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape[-1:]
        if self.source_normalization == "LayerNorm":
            x = F.layer_norm(x, shape, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        else:
            x = F.rms_norm(x, shape, self.layer_norm_weight, self.eps)
        return F.linear(x, self.weight, getattr(self, "bias", None))


class PlainGroupedLinear(nn.Module):
    """One F.linear for each expert."""

    def __init__(self, source: nn.Module, full: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.num_gemms = source.num_gemms
        for name, value in full.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        parts = x.split(m_splits)
        return torch.cat(
            [
                F.linear(part, getattr(self, f"weight{i}"), getattr(self, f"bias{i}", None))
                for i, part in enumerate(parts)
            ]
        )


def _inputs(step: int, rank: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(500 * step + rank)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(device=device(), dtype=dtype)


def _compare(
    module: nn.Module,
    plain: nn.Module,
    rank: int,
    world_size: int,
    run: Callable[[nn.Module, torch.Tensor, int], torch.Tensor],
    inputs: Callable[[int], torch.Tensor],
) -> None:
    """One forward and backward: outputs, input gradients, weight gradients."""
    x = inputs(rank).requires_grad_()
    out = run(module, x, rank)
    out.square().sum().backward()
    grads: list[dict[str, torch.Tensor]] = []
    for peer in range(world_size):
        plain.zero_grad()
        other = inputs(peer).requires_grad_()
        expected = run(plain, other, peer)
        expected.square().sum().backward()
        grads.append({name: param.grad for name, param in plain.named_parameters()})
        if peer == rank:
            assert torch.equal(out, expected)
            assert torch.equal(x.grad, other.grad)
    for name, param in module.named_parameters():
        total = combined([rank_grads[name] for rank_grads in grads], mean=True).to(param.dtype)
        if isinstance(param, etp.ETPShardedParam):
            assert torch.equal(param.grad, rows_of_shard(total, rank, world_size, ALIGNMENT)), name
        else:
            torch.testing.assert_close(param.grad, total)
            assert world_size > 2 or torch.equal(param.grad, total), name


def linear_layers(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Linear and LayerNormLinear; 1, 2 and 3 dimensions; with and without bias."""
    torch.manual_seed(100 + rank)  # ranks draw different weights: construction takes the first rank's
    where: dict[str, Any] = {"etp_group": dist.group.WORLD, "params_dtype": dtype, "device": device()}
    for bias in (True, False):
        layers: list[Any] = [
            etp.Linear(10, 37, bias, **where),
            etp.LayerNormLinear(10, 37, 1e-3, bias, **where),
            etp.LayerNormLinear(10, 37, bias=bias, normalization="RMSNorm", **where),
        ]
        for layer in layers:
            full = etp.full_state_dict(layer)
            if isinstance(layer, etp.Linear):
                plain: nn.Module = nn.Linear(10, 37, bias, dtype=dtype, device=device())
                plain.load_state_dict(full)
            else:
                plain = PlainLayerNormLinear(layer, full)
            for shape in ((10,), (4, 10), (2, 3, 10)):
                layer.zero_grad()

                def inputs(peer: int, shape: tuple[int, ...] = shape) -> torch.Tensor:
                    return _inputs(3, peer, 6, 10, dtype).flatten()[: torch.Size(shape).numel()].view(shape)

                with poisoned():
                    _compare(layer, plain, rank, world_size, lambda m, x, _: m(x), inputs)


def grouped_layers(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Splits that differ between ranks and steps, with empty experts and an empty rank."""
    torch.manual_seed(rank)
    splits = [[3, 0, 5], [0, 0, 8], [2, 3, 3], [0, 0, 0], [8, 0, 0]]
    for bias in (True, False):
        layer = etp.GroupedLinear(3, 6, 21, bias, etp_group=dist.group.WORLD, params_dtype=dtype, device=device())
        assert (
            len({id(param.weight_group) for param in layer.parameters() if isinstance(param, etp.ETPShardedParam)}) == 1
        )
        plain = PlainGroupedLinear(layer, etp.full_state_dict(layer))
        for step in range(len(splits)):
            layer.zero_grad()

            def split_of(peer: int, step: int = step) -> list[int]:
                return splits[(step + peer) % len(splits)]

            def inputs(peer: int, step: int = step) -> torch.Tensor:
                return _inputs(step, peer, sum(split_of(peer, step)), 6, dtype)

            with poisoned():
                _compare(layer, plain, rank, world_size, lambda m, x, peer: m(x, split_of(peer)), inputs)


def frozen_experts(rank: int, world_size: int) -> None:
    """Experts and dense weights are frozen and thawed between steps: gradients and hooks are those of plain modules."""
    torch.manual_seed(3)
    layer = etp.GroupedLinear(3, 6, 21, etp_group=dist.group.WORLD, device=device())
    plain = PlainGroupedLinear(layer, etp.full_state_dict(layer))
    hooked: list[str] = []
    for name, param in layer.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: hooked.append(name))
    splits = [3, 1, 4]
    with poisoned():
        for step, trained in enumerate([(1, 1, 1), (0, 1, 1), (1, 0, 0), (0, 0, 0), (1, 1, 1), (0, 0, 1)]):
            for side in (layer, plain):
                side.zero_grad()
                for index, flag in enumerate(trained):
                    getattr(side, f"weight{index}").requires_grad_(bool(flag))
            hooked.clear()
            x = _inputs(step, rank, 8, 6, torch.float32).requires_grad_()
            layer(x, splits).square().sum().backward()
            parts = []
            for peer in range(world_size):
                plain.zero_grad()
                plain(_inputs(step, peer, 8, 6, torch.float32), splits).square().sum().backward()
                parts.append({name: param.grad for name, param in plain.named_parameters()})
            for name, param in layer.named_parameters():
                assert (param.grad is None) == (parts[0][name] is None) == (not param.requires_grad), (step, name)
                if isinstance(param, etp.ETPShardedParam):
                    assert hooked.count(name) == int(param.requires_grad), (step, name)
                    if param.requires_grad:
                        total = combined([part[name] for part in parts], mean=True)
                        assert torch.equal(param.grad, rows_of_shard(total, rank, world_size, ALIGNMENT)), (step, name)


def inputs_of_frozen_weights(rank: int, world_size: int) -> None:
    """What is kept for backward is what plain modules keep: of a frozen weight no input, in any memory format."""
    torch.manual_seed(4)
    where: dict[str, Any] = {"etp_group": dist.group.WORLD, "device": device()}
    linear, grouped = etp.Linear(6, 21, **where), etp.GroupedLinear(3, 6, 21, **where)
    plain_linear = nn.Linear(6, 21, device=device())
    plain_linear.load_state_dict(etp.full_state_dict(linear))
    pairs: list[tuple[nn.Module, nn.Module, tuple[Any, ...]]] = [
        (linear, plain_linear, ()),
        (grouped, PlainGroupedLinear(grouped, etp.full_state_dict(grouped)), ([3, 1, 4],)),
    ]

    def run(side: nn.Module, x: torch.Tensor, extra: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Output, gradient of the input, and how many elements of the input's storage are kept."""
        kept = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel() if tensor.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else 0
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = side(x, *extra)
        out.square().sum().backward()
        assert x.grad is not None
        return out, x.grad, kept

    for trained in (False, True, False):
        for layer, plain, extra in pairs:
            for side in (layer, plain):
                for name, param in side.named_parameters():
                    param.requires_grad_(trained or name.startswith("bias"))
            for columns in (False, True):
                found = []
                for side in (layer, plain):
                    x = _inputs(7, rank, 8, 6, torch.float32)
                    x = (x.t().contiguous().t() if columns else x).requires_grad_()
                    with poisoned():
                        found.append(run(side, x, extra))
                (out, grad, kept), (expected, expected_grad, expected_kept) = found
                assert torch.equal(out, expected)
                assert torch.equal(grad, expected_grad)
                assert kept == expected_kept == (48 if trained else 0), (layer, columns)


def frozen_within_an_iteration(rank: int, world_size: int, after: tuple[int, ...]) -> None:
    """Experts are frozen and thawed between microbatches and before the reduction: each keeps what it got till then."""
    torch.manual_seed(3)
    config = etp.EtpConfig(reduce_once_per_iteration=True)
    layer = etp.GroupedLinear(3, 6, 21, etp_group=dist.group.WORLD, device=device(), config=config)
    plain = PlainGroupedLinear(layer, etp.full_state_dict(layer))
    trained_in = [(1, 1, 1), (0, 1, 0), (1, 0, 0)]

    def train(side: nn.Module, data_rank: int, trained_in: Sequence[Sequence[int]]) -> None:
        for step, trained in enumerate(trained_in):
            freeze(side, trained)
            side(_inputs(step, data_rank, 8, 6, torch.float32).requires_grad_(), [3, 1, 4]).square().sum().backward()

    def freeze(side: nn.Module, trained: Sequence[int]) -> None:
        for index, flag in enumerate(trained):
            side.get_parameter(f"weight{index}").requires_grad_(bool(flag))

    for iteration in (trained_in, trained_in[1:]):
        layer.zero_grad()
        train(layer, rank, iteration)
        freeze(layer, after)
        etp.wait_async_comms(layer)
        parts = []
        for peer in range(world_size):
            plain.zero_grad()
            train(plain, peer, iteration)
            parts.append({name: param.grad for name, param in plain.named_parameters()})
        for name, param in layer.named_parameters():
            if isinstance(param, etp.ETPShardedParam):
                grads = [part[name] for part in parts]
                assert (param.grad is None) == (grads[0] is None), name
                if param.grad is not None:
                    whole = combined(grads, mean=True)
                    torch.testing.assert_close(param.grad, rows_of_shard(whole, rank, world_size, ALIGNMENT))
    # What was abandoned while it was trained does not come back for a frozen weight.
    train(layer, rank, [(1, 1, 1)])
    layer.zero_grad()
    freeze(layer, (0, 0, 0))
    etp.wait_async_comms(layer)
    assert all(param.grad is None for param in layer.parameters() if isinstance(param, etp.ETPShardedParam))


def frozen_while_resident(rank: int, world_size: int) -> None:
    """A weight that stays gathered is handed out as trained as its parameter is by then, not as it was before."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 5)).to(device())
    etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(reuse_across_forwards=True, resident_bytes=1 << 20))
    for trained in (True, False, False, True):
        model[0].weight.requires_grad_(trained)
        model.zero_grad()
        (full,) = model[0].weight.materialize()
        assert full.requires_grad is trained
        full.requires_grad_(not trained)  # a consumer's own alias
        model(_inputs(1, rank, 4, 6, torch.float32)).sum().backward()
        assert (model[0].weight.grad is not None) is trained
        assert model[1].weight.grad is not None


def grouped_refusals(rank: int, world_size: int) -> list[str]:
    """Messages for splits that do not fit."""
    layer = etp.GroupedLinear(2, 6, 8, etp_group=dist.group.WORLD, device=device())
    messages = []
    for splits in ([3, 3], [4], [2, 1, 1]):
        try:
            layer(torch.randn(4, 6, device=device()), splits)
        except ValueError as error:
            messages.append(str(error))
    return messages


def weights_of_other_groups(rank: int, world_size: int) -> dict[str, str]:
    """Messages for layers that share some of their weights, which would compute with other ones in silence."""
    group = dist.group.WORLD
    first, second = (PlainExperts(2, 6, 8, bias=False, etp_group=group, device=device()) for _ in range(2))
    x = torch.randn(4, 6, device=device())
    whole = second(x, [2, 2])
    weight0, weight1 = first.get_parameter("weight0"), first.get_parameter("weight1")
    attempts: dict[str, Callable[[], Any]] = {
        "swapped": lambda: functional.grouped_linear(x, [weight1, weight0], [], [2, 2]),
        "one of two": lambda: functional.grouped_linear(x, [weight0], [], [4]),
        "linear": lambda: F.linear(x, weight1),
        "embedding": lambda: F.embedding(torch.tensor([0], device=device()), weight1),
    }
    tied = nn.ModuleList([first, second])
    own = second._parameters["weight0"]
    second._parameters["weight0"] = weight0
    messages = {}
    for name, attempt in {
        **attempts,
        "tied": lambda: second(x, [2, 2]),
        "sharded": lambda: etp.shard_module(tied, group),
    }.items():
        try:
            attempt()
        except ValueError as error:
            messages[name] = str(error)
    # Nothing has changed, and layers that share all of their weights are right.
    second._parameters["weight0"] = own
    assert torch.equal(second(x, [2, 2]), whole)
    second._parameters.update(first._parameters)
    etp.shard_module(tied, group)
    assert torch.equal(second(x, [2, 2]), first(x, [2, 2]))
    assert not torch.equal(second(x, [2, 2]), whole)
    return messages


def parts_of_a_sharded_model(rank: int, world_size: int) -> dict[str, str]:
    """Messages for sharding a part of a sharded model anew, or in a backward pass; nothing changes."""
    group = dist.group.WORLD
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6))).to(device())
    etp.shard_module(model, group)
    x = torch.randn(3, 6, device=device())
    model[1].append(nn.Linear(6, 4).to(device()))
    messages = {}

    def attempt(name: str, part: nn.Module) -> None:
        try:
            etp.shard_module(part, group)
        except etp.EtpStateError as error:
            messages[name] = str(error)

    attempt("part", model[1])
    assert type(model[1][1].weight) is nn.Parameter
    hidden = model[0](x)
    hidden.register_hook(lambda _: attempt("backward", model))
    model[1][0](hidden).sum().backward()
    assert type(model[1][1].weight) is nn.Parameter
    etp.shard_module(model, group)
    expected = x
    for layer in (model[0], *model[1].children()):
        expected = F.linear(expected, layer.weight.full_tensor(), layer.bias)
    assert torch.equal(model(x), expected)
    return messages


class PlainExperts(etp.GroupedLinear):
    """Never replaced by Transformer Engine's layer, whose GEMMs round otherwise and whose state has one entry more."""


class Mixture(nn.Module):
    """Dense layer, two experts on an axis of their own, dense layer."""

    def __init__(self, expert_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.experts = PlainExperts(2, 8, 8, etp_group=expert_group, device=device())
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.experts(x, [x.shape[0] - 2, 2])))


def experts_have_their_own_axis(rank: int, world_size: int) -> dict[str, Any]:
    """Dense weights over 4 ranks, experts over pairs: each averages over its own group only."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    torch.manual_seed(11)
    model = Mixture(mine).to(device())
    plain = Mixture.__new__(Mixture)
    nn.Module.__init__(plain)
    full = etp.full_state_dict(model.experts)
    plain.first, plain.last = copy.deepcopy(model.first), copy.deepcopy(model.last)
    plain.experts = PlainGroupedLinear(model.experts, full)
    runtime = etp.shard_module(model, dist.group.WORLD, expert_group=mine)
    grads = []
    for peer in range(world_size):
        plain.zero_grad()
        plain(_inputs(1, peer, 5, 6, torch.float32)).square().mean().backward()
        grads.append({name: param.grad for name, param in plain.named_parameters()})
    with poisoned():
        model(_inputs(1, rank, 5, 6, torch.float32)).square().mean().backward()
    for name, param in model.named_parameters():
        expert = name.startswith("experts")
        peers = grads[rank // 2 * 2 : rank // 2 * 2 + 2] if expert else grads
        total = combined([peer[name] for peer in peers], mean=True)
        if isinstance(param, etp.ETPShardedParam):
            size = 2 if expert else 4
            assert torch.equal(param.grad, rows_of_shard(total, rank % size, size, ALIGNMENT)), name
        else:
            torch.testing.assert_close(param.grad, total)
    return {group.name: group.size for group in runtime.groups}


def pairs_have_other_experts(rank: int, world_size: int) -> tuple[bool, str]:
    """Each pair has experts of its own, biases included; a pair whose ranks differ is told so."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    torch.manual_seed(11)
    model = Mixture(mine).to(device())
    with torch.no_grad():
        for index in range(2):
            model.experts.get_parameter(f"bias{index}").add_(rank // 2)
    biases = [torch.empty(8, device=device()) for _ in range(world_size)]
    dist.all_gather(biases, model.experts.get_parameter("bias0").detach())
    etp.shard_module(model, dist.group.WORLD, expert_group=mine)
    model(_inputs(1, rank, 5, 6, torch.float32)).square().mean().backward()
    with torch.no_grad():
        model.experts.get_parameter("bias1")[0] += rank
    message = ""
    try:
        etp.shard_module(model, dist.group.WORLD, expert_group=mine)
    except etp.PeerMismatchError as error:
        message = str(error)
    return torch.equal(biases[0], biases[2]), message


def differing_peers(rank: int, world_size: int) -> dict[str, tuple[str, list[str]]]:  # noqa: C901 - a list of cases
    """For each way to differ: the error on this rank, and the types of the parameters afterwards."""

    def value(model: Tiny) -> None:
        if rank == world_size - 1:
            model.blocks[1].up.weight.data[28, 3] += 1e-3

    def norm(model: Tiny) -> None:
        if rank == 0:
            model.norm.bias.data[0] = -0.5

    def size(model: Tiny) -> None:
        if rank == 1:
            model.blocks[0].up = nn.Linear(12, 31).to(device())

    def dtype(model: Tiny) -> None:
        if rank == 1:
            model.head.to(torch.bfloat16)

    def missing(model: Tiny) -> None:
        if rank == 1:
            model.blocks[2].down.bias = None

    answers = {}
    for change in (value, norm, size, dtype, missing):
        torch.manual_seed(7)
        model = Tiny().to(device())
        change(model)
        before = dict(model.named_parameters())
        try:
            etp.shard_module(model, dist.group.WORLD)
        except etp.PeerMismatchError as error:
            after = dict(model.named_parameters())
            assert all(after[name] is param for name, param in before.items())
            assert not model._forward_pre_hooks
            answers[change.__name__] = (str(error), sorted({type(p).__name__ for p in model.parameters()}))
    return answers


def no_group(rank: int, world_size: int) -> list[str]:
    """What each entry point says of a group that is something else."""
    others: list[Any] = [init_device_mesh(device().type, (world_size,)), etp.EtpConfig(), [0, 1], None]
    entries: list[Callable[[Any], Any]] = [
        lambda other: etp.shard_module(nn.Linear(4, 4), other),
        lambda other: etp.shard_module(nn.Linear(4, 4), dist.group.WORLD, other or "none"),
        lambda other: etp.Linear(4, 4, etp_group=other),
    ]
    messages = []
    for entry in entries:
        for other in others:
            with pytest.raises(TypeError) as told:
                entry(other)
            messages.append(str(told.value))
    return messages


def no_member(rank: int, world_size: int) -> list[str]:
    """A group of other ranks is refused by every entry point."""
    others = dist.new_group([1])
    messages = []
    entries: list[Callable[[], Any]] = [
        lambda: etp.shard_module(nn.Linear(4, 4), others),
        lambda: etp.shard_module(nn.Linear(4, 4), dist.group.WORLD, expert_group=others),
        lambda: etp.Linear(4, 4, etp_group=others),
        lambda: etp.ETPShardedParam.from_full(torch.ones(4, 4), others),
        lambda: etp.ETPShardedParam(torch.ones(16, 4), etp.ShardLayout((4, 4), 1), others),
    ]
    if rank == 0:
        for entry in entries:
            try:
                entry()
            except ValueError as error:
                messages.append(str(error))
    return messages


def refusals(rank: int, world_size: int) -> dict[str, str]:  # noqa: C901, PLR0915 - a list of cases
    """What shard_module refuses before it changes anything, on all ranks alike."""
    group = dist.group.WORLD

    def odd_without_padding() -> None:
        etp.shard_module(nn.Sequential(nn.Linear(4, 5)), group, config=etp.EtpConfig(pad_for_alignment=0))

    def max_norm() -> None:
        etp.shard_module(nn.ModuleDict({"table": nn.Embedding(8, 4, max_norm=1.0)}), group)

    def sparse() -> None:
        etp.shard_module(nn.ModuleDict({"table": nn.Embedding(8, 4, sparse=True)}), group)

    def complex_weight() -> None:
        etp.shard_module(nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64)), group)

    def complex_layer() -> None:
        etp.Linear(4, 4, etp_group=group, params_dtype=torch.complex64)

    def quantized() -> None:
        origin = {"__module__": "transformer_engine.pytorch.quantized_tensor"}
        kept = type("Float8Tensor", (type("QuantizedTensor", (torch.Tensor,), origin),), {})
        model = nn.Sequential(nn.Linear(4, 4))
        model[0].weight = nn.Parameter(model[0].weight.data.as_subclass(kept))
        etp.shard_module(model, group)

    def parametrized() -> None:
        etp.shard_module(nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))), group)

    def lazy() -> None:
        etp.shard_module(nn.Sequential(nn.LazyLinear(4)), group)

    alone = [dist.new_group([peer]) for peer in range(world_size)][rank]

    def over_other_ranks() -> None:
        etp.shard_module(nn.Sequential(etp.Linear(4, 4, etp_group=group), nn.Linear(4, 4)), alone)

    def experts_over_other_ranks() -> None:
        etp.shard_module(nn.Sequential(etp.GroupedLinear(1, 4, 4, etp_group=alone)), group)

    def one_memory() -> None:
        pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        pair[1].weight = nn.Parameter(pair[0].weight)
        etp.shard_module(pair, group)

    def has_gradient() -> None:
        layer = nn.Linear(4, 4)
        layer(torch.ones(1, 4)).sum().backward()
        etp.shard_module(nn.Sequential(layer), group)

    def has_hook() -> None:
        layer = nn.Linear(4, 4)
        layer.weight.register_hook(lambda grad: grad)
        etp.shard_module(nn.Sequential(layer), group)

    def has_accumulate_hook() -> None:
        layer = nn.Linear(4, 4)
        layer.weight.register_post_accumulate_grad_hook(print)
        etp.shard_module(nn.Sequential(layer), group)

    def copy_engine_on_cpu() -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        etp.shard_module(model, group, config=etp.EtpConfig(transport="copy_engine"))
        model(torch.ones(1, 4))

    def normalization() -> None:
        etp.LayerNormLinear(4, 4, normalization="BatchNorm", etp_group=group)

    def no_gemms() -> None:
        etp.GroupedLinear(0, 4, 4, etp_group=group)

    messages = {}
    for attempt in (
        odd_without_padding,
        max_norm,
        sparse,
        complex_weight,
        complex_layer,
        quantized,
        parametrized,
        lazy,
        over_other_ranks,
        experts_over_other_ranks,
        one_memory,
        has_gradient,
        has_hook,
        has_accumulate_hook,
        *([copy_engine_on_cpu] if device().type == "cpu" else []),
        normalization,
        no_gemms,
    ):
        torch.manual_seed(0)
        try:
            with device():  # modules are created there
                attempt()
        except ValueError as error:
            messages[attempt.__name__] = str(error)
    return messages


def misuse_of_a_shard(rank: int, world_size: int) -> dict[str, str]:
    """Products with a shard, copies, pickles, hooks: what each is answered."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10)).to(device())
    expected = F.linear(torch.eye(6, device=device()), model[0].weight.detach().clone())
    etp.shard_module(model, dist.group.WORLD)
    weight, x = model[0].weight, torch.randn(3, 6, device=device())
    assert torch.equal(F.linear(torch.eye(6, device=device()), weight), expected)
    assert torch.equal(F.linear(input=torch.eye(6, device=device()), weight=weight), expected)
    attempts: dict[str, Callable[[], Any]] = {
        "matmul": lambda: torch.matmul(x, weight),
        "at": lambda: x @ weight,
        "mm_transposed": lambda: x.mm(weight.t()),
        "T": lambda: x @ weight.T,
        "mT": lambda: x @ weight.mT,
        "einsum": lambda: torch.einsum("bi,oi->bo", x, weight),
        "addmm": lambda: torch.addmm(x, x, weight),
        "linear_input": lambda: F.linear(weight, x),
        "embedding_bag": lambda: F.embedding_bag(torch.zeros(1, 1, dtype=torch.long), weight),
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.dumps(model),
        "register_hook": lambda: weight.register_hook(lambda grad: grad),
    }
    answers = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except TypeError as error:
            answers[name] = str(error)
    return answers


def keeps_what_the_user_noted(rank: int, world_size: int) -> None:
    """Attributes of parameters, requires_grad, ties and nesting survive sharding; sharding twice is no error."""
    torch.manual_seed(1)
    inner = Tiny(tied=True).to(device())
    inner.head.weight.no_weight_decay = True
    inner.blocks[0].up.weight.requires_grad_(False)
    etp.shard_module(inner.blocks[1], dist.group.WORLD)
    outer = nn.ModuleDict({"inner": inner})
    runtime = etp.shard_module(outer, dist.group.WORLD)
    assert inner.head.weight is inner.embedding.weight
    assert inner.head.weight.no_weight_decay
    assert not inner.blocks[0].up.weight.requires_grad
    assert inner.blocks[1].up.weight.fqn == "inner.blocks.1.up.weight"
    assert all(param.driver is runtime for param in outer.parameters() if isinstance(param, etp.ETPShardedParam))
    again = etp.shard_module(outer, dist.group.WORLD)
    assert all(param.driver is again for param in outer.parameters() if isinstance(param, etp.ETPShardedParam))
    assert not runtime.groups
    tokens, targets = batch(0, rank, device())
    loss_of(inner(tokens), targets).backward()
    grad = inner.norm.weight.grad.clone()
    total = grad.clone()
    dist.all_reduce(total)
    assert torch.equal(total, grad * world_size), "a replicated gradient was reduced by one runtime too many or few"


def module_without_replicated_parameters(rank: int, world_size: int) -> None:
    """Sharding what is sharded already, with nothing left to compare."""
    layer = nn.Sequential(etp.Linear(4, 32, bias=False, etp_group=dist.group.WORLD, device=device()))
    etp.shard_module(layer, dist.group.WORLD)
    layer(torch.randn(2, 4, device=device())).sum().backward()
    assert layer[0].weight.grad.abs().sum() > 0


def implements_te_protocol(rank: int, world_size: int, members: list[str]) -> tuple[list[str], bool]:
    """Which members of TE's DistributedWeight a shard lacks; whether TE itself agrees, where it is installed."""
    layer = etp.Linear(4, 8, etp_group=dist.group.WORLD, device=device())
    weight = layer.weight
    missing = [member for member in members if not hasattr(weight, member)]
    agrees = True
    if te_available():
        from transformer_engine.pytorch.distributed_weight import DistributedWeight

        agrees = isinstance(weight, DistributedWeight)
    return missing, agrees


def te_protocol_computes_gradients(rank: int, world_size: int) -> None:
    """Driven as TE's modules drive it: gather, GEMM, gather, GEMM into the buffer, finalize."""

    class Driven(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
            ctx.save_for_backward(x)
            ctx.weight = weight
            (full,) = weight.materialize_group_for_forward()
            assert full.requires_grad == weight.requires_grad
            return x @ full.t()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            (x,) = ctx.saved_tensors
            (full,) = ctx.weight.materialize_group_for_backward()
            grad_x = grad @ full
            buffer = ctx.weight.grad_buffer()
            assert buffer.shape == full.shape
            torch.mm(grad.t(), x, out=buffer)
            assert ctx.weight.finalize_group_grads(buffer) is None
            return grad_x, None

    torch.manual_seed(5)
    plain = nn.Linear(6, 10, bias=False).to(device())
    model = copy.deepcopy(plain)
    etp.shard_module(model, dist.group.WORLD)

    def run(module: nn.Module, x: torch.Tensor, _: int) -> torch.Tensor:
        return F.linear(x, module.weight) if module is plain else Driven.apply(x, module.weight)

    with poisoned():
        _compare(model, plain, rank, world_size, run, lambda peer: _inputs(0, peer, 5, 6, torch.float32))


def compiled_layers(rank: int, world_size: int) -> None:
    """Each layer, compiled and not: outputs and gradients are equal."""
    del world_size
    options: dict[str, Any] = {"etp_group": dist.group.WORLD, "device": device()}
    layers: dict[nn.Module, tuple[Any, ...]] = {
        etp.Linear(6, 10, **options): (),
        etp.LayerNormLinear(6, 10, **options): (),
        etp.GroupedLinear(2, 6, 10, **options): ([3, 1],),
    }
    for layer, arguments in layers.items():
        found = []
        for forward in (layer, torch.compile(layer, backend="eager")):
            layer.zero_grad()
            out = forward(_inputs(1, rank, 4, 6, torch.float32), *arguments)
            out.square().sum().backward()
            found.append([out, *(param.grad for param in layer.parameters())])
        assert all(map(torch.equal, *found)), type(layer).__name__
