"""Sends each sharded matrix, whole, to one rank of its group, and that rank's result back to the shards.

Optimizers such as Muon compute on whole matrices. Each matrix of a shard group is computed by one of its ranks, its
owner: an all-to-all carries every rank's rows to the owners, another the rows of the results back. So a matrix crosses
the network as in one gather and one scatter, and N ranks share the work. Liu et al., "Muon is Scalable for LLM
Training" (2025), gather each matrix in the same way, but compute it on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
import torch.distributed as dist

from etp.collectives.works import free_bytes
from etp.errors import PeerMismatchError
from etp.layout import ShardLayout
from etp.routes import Routes
from etp.shard import Shard

# Most elements of whole matrices that a rank holds at a time, unless one matrix is larger: 64 MiB of bf16, enough for a
# collective to run at full speed.
_ROUND_NUMEL = 1 << 25


@dataclass(frozen=True)
class MatrixPlan:
    """Which rank of a shard group computes on which matrix, and when.

    Attributes:
        layouts: how each of the matrices, ``[rows, columns]``, is cut; all into the same number of shards.
        rounds: for each round, and in it for each rank, the indices of the matrices that it computes on.
    """

    layouts: tuple[ShardLayout, ...]
    rounds: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def balanced(cls, layouts: Sequence[ShardLayout], round_numel: int = _ROUND_NUMEL) -> Self:
        """Spread matrices so that all ranks have about the same orthogonalization work.

        Matrices go to the rank with the least work so far, the most expensive ones first.

        Args:
            layouts: of the matrices; possibly none.
            round_numel: elements of whole matrices that a rank has in one round, unless it has a single matrix.
        """
        size = layouts[0].num_shards if layouts else 0
        work = [0] * size
        rounds: list[list[list[int]]] = []
        # For each rank, the elements in its last round, and the index of that round.
        filled, last = [0] * size, [-1] * size
        for index in sorted(range(len(layouts)), key=lambda index: (-_cost(layouts[index]), index)):
            owner = work.index(min(work))
            work[owner] += _cost(layouts[index])
            numel = layouts[index].rows * layouts[index].row_numel
            if last[owner] < 0 or filled[owner] + numel > round_numel:
                last[owner] += 1
                filled[owner] = 0
            if last[owner] == len(rounds):
                rounds.append([[] for _ in range(size)])
            filled[owner] += numel
            rounds[last[owner]][owner].append(index)
        return cls(tuple(layouts), tuple(tuple(map(tuple, owned)) for owned in rounds))

    def numel(self, index: int, rank: int) -> int:
        """Elements of a matrix that a rank holds, without padding."""
        return self.layouts[index].logical_rows(rank) * self.layouts[index].row_numel


def _cost(layout: ShardLayout) -> int:
    """Multiplications in one Newton-Schulz iteration: two products of m x m and m x n, and one of m x m and m x m."""
    short, long = sorted((layout.rows, layout.row_numel))
    return short * short * (2 * long + short)


def on_owners(
    routes: Routes,
    plan: MatrixPlan,
    group: dist.ProcessGroup,
    send: Callable[[int], torch.Tensor],
    compute: Callable[[int, torch.Tensor], torch.Tensor],
    receive: Callable[[int, torch.Tensor], None],
) -> None:
    """Compute on every matrix of a plan on its owner. Collective; no padding is sent.

    Args:
        routes: waits for each collective.
        plan: equal on all ranks.
        group: the shard group.
        send: called once with the index of each matrix; returns this rank's rows, ``[rows, columns]``, possibly
            none. All of one dtype.
        compute: called with the index of each matrix that this rank owns and the whole, which it may overwrite;
            returns a result of the same shape and dtype.
        receive: called once with the index of each matrix and this rank's rows of its result, which it must not
            keep.
    """
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    for owned in plan.rounds:
        mine = owned[rank]
        indices = [index for each in owned for index in each]
        sent = torch.cat([send(index).reshape(-1) for index in indices])
        to_owners = [sum(plan.numel(index, rank) for index in each) for each in owned]
        to_owner = [sum(plan.numel(index, source) for index in mine) for source in ranks]
        gathered = _all_to_all(routes, sent, to_owners, to_owner, group, "all-to-all of matrices to their owners")
        parts = gathered.split([plan.numel(index, source) for source in ranks for index in mine])
        results = []
        for place, index in enumerate(mine):
            whole = torch.cat(parts[place :: len(mine)]).view(plan.layouts[index].shape)
            results.append(compute(index, whole))
        rows = [
            result[slice(*plan.layouts[index].logical_range(target))].reshape(-1)
            for target in ranks
            for index, result in zip(mine, results, strict=True)
        ]
        returned = torch.cat(rows) if rows else sent.new_empty(0)
        received = _all_to_all(routes, returned, to_owner, to_owners, group, "all-to-all of results to their shards")
        for index, part in zip(indices, received.split([plan.numel(i, rank) for i in indices]), strict=True):
            receive(index, part.view(-1, *plan.layouts[index].shape[1:]))
        for buffer in (sent, gathered, returned, received):
            free_bytes(buffer)


def _all_to_all(
    routes: Routes,
    sent: torch.Tensor,
    sizes: list[int],
    received_sizes: list[int],
    group: dist.ProcessGroup,
    label: str,
) -> torch.Tensor:
    received = sent.new_empty(sum(received_sizes))
    on_cpu = sent.device.type != "cuda"
    # On GPUs on the calling stream: see [Note: the lane's stream] in etp/collectives/c10d.py.
    exchange = partial(dist.all_to_all_single, received, sent, received_sizes, sizes, group=group, async_op=on_cpu)
    routes.wait_for(exchange, group, label, on_cpu)
    return received


class MatrixExchange:
    """Sends sharded matrices that are stepped together to their owners and back."""

    def __init__(self) -> None:
        # The latest of each process group, because the same matrices have gradients in most steps.
        self._latest: dict[dist.ProcessGroup, _Matrices] = {}

    def run(
        self,
        member: Shard,
        shards: Sequence[Shard],
        send: Callable[[int], torch.Tensor],
        compute: Callable[[int, torch.Tensor], torch.Tensor],
        receive: Callable[[int, torch.Tensor], None],
    ) -> None:
        """:func:`on_owners` for the matrices of these shards, whose indices are theirs. Collective.

        Args:
            member: one of the optimizer's shards of this process group, which are cut into more than one.
            shards: those to be stepped, in the same order on all ranks; possibly none.
            send: as for :func:`on_owners`.
            compute: likewise.
            receive: likewise.

        Raises:
            PeerMismatchError: if the ranks would step different ones; on GPUs, on the ranks whose matrices are others
                than in their step before. The others wait for these until their timeout.
        """
        group, routes = member.group, member.driver.routes
        matrices = known = self._latest.get(group)
        if matrices is None or not matrices.are_of(shards, member.device):
            matrices = _Matrices.of(shards, member.device)
        # In every step, because a rank does not know whether its peers have others than before. On GPUs the host waits
        # for the answer only where it must have changed.
        label = "all-gather of the matrices that have gradients"
        everyone = routes.gather_numbers(matrices.digest, group, label)
        if matrices is not known or everyone.device.type == "cpu":
            _require_equal(everyone.tolist(), group, shards)
        self._latest[group] = matrices
        on_owners(routes, matrices.plan, group, send, compute, receive)


@dataclass(frozen=True)
class _Matrices:
    """The matrices of a step.

    Attributes:
        shards: their shards, so that no other parameter can take the place of one.
        plan: where they are computed.
        digest: their number, and a digest of their names and shapes; int64.
    """

    shards: list[Shard]
    plan: MatrixPlan
    digest: torch.Tensor

    @classmethod
    def of(cls, shards: Sequence[Shard], device: torch.device) -> Self:
        names = "\n".join(map(_described, shards))
        numbers = len(shards), int.from_bytes(hashlib.sha256(names.encode()).digest()[:7])
        digest = torch.tensor(numbers, dtype=torch.int64, device=device)
        return cls(list(shards), MatrixPlan.balanced([shard.layout for shard in shards]), digest)

    def are_of(self, shards: Sequence[Shard], device: torch.device) -> bool:
        """Whether they are the matrices of ``shards``, compared on this device."""
        return [*map(id, self.shards)] == [*map(id, shards)] and self.digest.device == device


def _described(shard: Shard) -> str:
    return f"{shard.fqn} {shard.layout.shape}"


def _require_equal(digests: list[list[int]], group: dist.ProcessGroup, shards: Sequence[Shard]) -> None:
    """Raise PeerMismatchError unless the ranks' digests of their matrices are equal."""
    if any(each != digests[0] for each in digests):
        ranks = dist.get_process_group_ranks(group)
        first = f"begins with {_described(shards[0])}" if shards else "has none"
        counts = {rank: each[0] for rank, each in zip(ranks, digests, strict=True)}
        raise PeerMismatchError(
            "Muon: the ranks of a shard group have gradients of different matrices, or another order of them; "
            f"by rank, their numbers are {counts}, and rank {dist.get_rank()} {first}. "
            "Give all ranks the same parameters, and clear gradients on all of them or on none"
        )
