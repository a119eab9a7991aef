"""Bodies: grouped layers of any number of experts, alone and with experts spread over ranks, against unsharded ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import etp
from tests.multiproc.bodies_modules import PlainExperts, PlainGroupedLinear, _compare
from tests.multiproc.oracle import combined, poisoned, rows_of_shard
from tests.support.launch import device

WIDTH = 4
ODD = 5
"""Rows of a weight: each cut of them has padding."""
ALIGNMENT = 16


def _splits(experts: int, step: int, rank: int, most: int = 3) -> list[int]:
    """Tokens of each expert: uneven, none for many; none at all for one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drawn: list[int] = torch.randint(-most, most + 1, (experts,), generator=generator).clamp(min=0).tolist()
    drawn[step % experts] += 1
    return [0] * experts if (step, rank) == (1, 0) else drawn


def _tokens(step: int, rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(7000 + 100 * step + rank)).to(device())


def any_number(rank: int, world_size: int, experts: int) -> list[int]:
    """Outputs, and all gradients, bit by bit; with steps between, so that the weights change as well.

    Returns:
        tokens of this rank in each step.
    """
    torch.manual_seed(rank)
    layer = PlainExperts(experts, WIDTH, ODD, etp_group=dist.group.WORLD, device=device())
    shards = [param for param in layer.parameters() if isinstance(param, etp.ETPShardedParam)]
    assert len(shards) == experts
    assert len({id(shard.weight_group) for shard in shards}) == 1
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    counts = []
    for step in range(3):
        plain = PlainGroupedLinear(layer, etp.full_state_dict(layer))
        splits = [_splits(experts, step, peer) for peer in range(world_size)]
        inputs = [_tokens(step, peer, sum(splits[peer])) for peer in range(world_size)]
        optimizer.zero_grad()

        def run(module: nn.Module, x: torch.Tensor, peer: int, splits: list[list[int]] = splits) -> torch.Tensor:
            result: torch.Tensor = module(x, splits[peer])
            return result

        with poisoned() as counted:
            _compare(layer, plain, rank, world_size, run, inputs.__getitem__)
        assert counted["leases"] >= 1
        optimizer.step()
        counts.append(sum(splits[rank]))
    return counts


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of a group, as many as ``sent`` says of each; back in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.how = received, sent, group
        found = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _Exchange.apply(grad, *ctx.how), None, None, None


class Spread(nn.Module):
    """A dense layer over all ranks, and experts of which each rank of ``expert_parallel`` has its own.

    Args:
        experts: how many this rank has.
        expert_parallel: the ranks that have different experts.
        expert_group: the ranks that share these.
    """

    def __init__(self, experts: int, expert_parallel: dist.ProcessGroup, expert_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = PlainExperts(experts, WIDTH, ODD, etp_group=expert_group, device=device())
        self.own, self.expert_parallel = experts, expert_parallel

    def forward(self, x: torch.Tensor, splits: Sequence[Sequence[int]], place: int) -> torch.Tensor:
        """``[tokens, WIDTH]``, in the order of the experts of all, to ``[tokens, ODD]``.

        Args:
            x: this rank's tokens.
            splits: how many each rank of ``expert_parallel`` has for each expert of all.
            place: this rank's place there.
        """
        ranks = len(splits)
        sent = [sum(splits[place][peer * self.own : (peer + 1) * self.own]) for peer in range(ranks)]
        mine = [list(of_peer[place * self.own : (place + 1) * self.own]) for of_peer in splits]
        received = [sum(counts) for counts in mine]
        rows = _Exchange.apply(torch.tanh(self.dense(x)), sent, received, self.expert_parallel)
        # From the order of ranks to that of experts, and back.
        pieces = list(rows.split([count for counts in mine for count in counts]))
        sorted_pieces = [pieces[peer * self.own + index] for index in range(self.own) for peer in range(ranks)]
        totals = [sum(counts[index] for counts in mine) for index in range(self.own)]
        out = self.experts(torch.cat(sorted_pieces), totals)
        parts = list(out.split([mine[peer][index] for index in range(self.own) for peer in range(ranks)]))
        returned = torch.cat([parts[index * ranks + peer] for peer in range(ranks) for index in range(self.own)])
        result: torch.Tensor = _Exchange.apply(returned, received, sent, self.expert_parallel)
        return result


def spread_over_ranks(rank: int, world_size: int, experts: int) -> list[int]:
    """EP 2 x ETP 2: outputs, and gradients of weights and biases, bit by bit, in steps with changing weights.

    Returns:
        tokens of this rank in each step.
    """
    assert world_size == 4
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    replica, place = divmod(rank, 2)
    own = experts // 2
    torch.manual_seed(5)
    model = Spread(own, pairs[replica], pairs[2 + place]).to(device())
    with torch.no_grad():
        for param in model.experts.parameters():
            param.add_(0.1 * place)  # the other half has other weights
    etp.shard_module(model, dist.group.WORLD, pairs[2 + place])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for step in range(3):
        halves: list[Any] = [None, None]
        dist.all_gather_object(halves, etp.full_state_dict(model.experts), group=pairs[replica])
        dense = nn.Linear(WIDTH, WIDTH).to(device())
        dense.load_state_dict(etp.full_state_dict(model.dense))
        wholes = _Wholes(dense, halves, own)
        splits = [_splits(experts, step, peer, most=2) for peer in range(world_size)]
        inputs = [_tokens(step, peer, sum(splits[peer])) for peer in range(world_size)]
        expected = wholes.differentiated(inputs, splits)
        optimizer.zero_grad()
        with poisoned():
            out = model(inputs[rank], splits[2 * replica : 2 * replica + 2], place)
            out.square().sum().backward()
        assert torch.equal(out, expected[rank])
        _compare_gradients(model, wholes, rank)
        optimizer.step()
        counts.append(len(out))
    return counts


class _Wholes:
    """All experts and the dense layer, unsharded, once for each place of a shard group."""

    def __init__(self, dense: nn.Linear, halves: Sequence[dict[str, torch.Tensor]], own: int) -> None:
        self.own = own
        self.dense = [copy.deepcopy(dense) for _ in range(4)]
        self.experts = [
            [{name: value.clone().requires_grad_() for name, value in half.items()} for half in halves]
            for _ in range(2)
        ]

    def differentiated(self, inputs: Sequence[torch.Tensor], splits: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Each rank's outputs, once all gradients are there."""
        outputs: list[torch.Tensor] = []
        for replica in range(2):
            ranks = (2 * replica, 2 * replica + 1)
            hidden = [torch.tanh(self.dense[rank](inputs[rank])).split(list(splits[rank])) for rank in ranks]
            found: list[list[torch.Tensor]] = [[], []]
            for index in range(2 * self.own):
                weights = self.experts[replica][index // self.own]
                rows = torch.cat([of_rank[index] for of_rank in hidden])
                out = nn.functional.linear(rows, *(weights[f"{kind}{index % self.own}"] for kind in ("weight", "bias")))
                for place, part in enumerate(out.split([splits[rank][index] for rank in ranks])):
                    found[place].append(part)
            outputs += [torch.cat(parts) for parts in found]
        torch.stack([output.square().sum() for output in outputs]).sum().backward()
        return outputs


def _compare_gradients(model: Spread, wholes: _Wholes, rank: int) -> None:
    replica, place = divmod(rank, 2)
    for name, param in model.experts.named_parameters():
        grads: list[Any] = [wholes.experts[each][place][name].grad for each in range(2)]
        total = combined(grads, mean=True)
        mine = rows_of_shard(total, replica, 2, ALIGNMENT) if isinstance(param, etp.ETPShardedParam) else total
        assert torch.equal(param.grad, mine), name
    weights: list[Any] = [dense.weight.grad for dense in wholes.dense]
    assert torch.equal(model.dense.weight.grad, rows_of_shard(combined(weights, mean=True), rank, 4, ALIGNMENT))
    biases: list[Any] = [dense.bias.grad for dense in wholes.dense]
    torch.testing.assert_close(model.dense.bias.grad, combined(biases, mean=True))
