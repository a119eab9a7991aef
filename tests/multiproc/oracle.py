"""The oracle: the unsharded model, run by every rank on all ranks' data, its gradients combined by hand.

Nothing here calls the engine's layout, reductions or collectives, so the two can only agree by being right.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import etp
from etp.cache import Slot
from etp.grads import WgradPool
from etp.shard_grad import ShardGrad
from etp.stack import Stack

Scenario = Callable[[nn.Module, int, int], Iterator[Any]]
"""``scenario(model, step, data_rank)`` yields each loss to be differentiated, or ``(loss, backward_kwargs)``."""


def rows_of_shard(full: torch.Tensor, rank: int, world_size: int, alignment: int) -> torch.Tensor:
    """This rank's rows, padded with zeros to the least multiple of the alignment that fits all ranks."""
    multiple = max(alignment, 1) * world_size
    each = -(-full.shape[0] // multiple) * multiple // world_size
    mine = full[rank * each : (rank + 1) * each]
    padded = full.new_zeros(each, *full.shape[1:])
    padded[: mine.shape[0]] = mine
    return padded


def combined(parts: list[torch.Tensor], mean: bool, per_host: int | None = None) -> torch.Tensor:
    """Sum in rank order, or within each host and then over hosts; in fp32 at least, divided once."""
    if per_host is not None:
        sums = [combined(parts[first : first + per_host], False) for first in range(0, len(parts), per_host)]
        return combined(sums, False) / len(parts) if mean else combined(sums, False)
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    # By a tensor: on CUDA a number of the host would become its reciprocal.
    return total / torch.full((), len(parts), dtype=total.dtype, device=total.device) if mean else total


def differentiate(model: nn.Module, scenario: Scenario, step: int, data_rank: int) -> Iterator[torch.Tensor]:
    """Run a scenario's backward passes; yields each loss after its backward."""
    for item in scenario(model, step, data_rank):
        loss, kwargs = item if isinstance(item, tuple) else (item, {})
        loss.backward(**kwargs)
        yield loss.detach()


class Reference:
    """The unsharded model.

    Args:
        model: a copy of what is sharded, before it is.
        world_size: ranks of the shard group.
        mean: average over ranks, or add.
        per_host: ranks whose gradients are added first; None if all are added in rank order.
    """

    def __init__(self, model: nn.Module, world_size: int, *, mean: bool = True, per_host: int | None = None) -> None:
        self.model = model
        self.world_size = world_size
        self.mean = mean
        self.per_host = per_host

    def step(self, scenario: Scenario, step: int) -> list[list[torch.Tensor]]:
        """Put the combined gradients of one step into ``.grad``; returns each rank's losses."""
        losses: list[list[torch.Tensor]] = []
        grads: list[list[dict[str, torch.Tensor]]] = []
        for rank in range(self.world_size):
            self.model.zero_grad()
            losses.append([])
            grads.append([])
            for loss in differentiate(self.model, scenario, step, rank):
                losses[-1].append(loss)
                grads[-1].append({n: p.grad for n, p in self.model.named_parameters() if p.grad is not None})
                self.model.zero_grad()
        # A backward pass is combined over ranks as a whole, then added to what is there: as the engine must.
        self.model.zero_grad()
        for backward in zip(*grads, strict=True):
            for name, param in self.model.named_parameters():
                if all(name in rank for rank in backward):
                    total = combined([rank[name] for rank in backward], self.mean, self.per_host)
                    if param.grad is None:
                        param.grad = total.to(backward[0][name].dtype)
                    else:
                        param.grad.add_(total)
        return losses


class Twins:
    """A sharded model and its unsharded reference.

    Args:
        model: is sharded in place; its copy becomes the reference.
        rank: this rank.
        world_size: ranks of the default group, which is the shard group.
        exact: whether gradients are compared bit by bit, where the order of sums allows it at all.
        replicated: names of the submodules that stay replicated.
        per_host: see :class:`Reference`.
        options: of :class:`etp.EtpConfig`.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        world_size: int,
        *,
        exact: bool = True,
        replicated: Sequence[str] = (),
        per_host: int | None = None,
        **options: Any,
    ) -> None:
        self.rank, self.world_size, self.exact = rank, world_size, exact
        self.config = etp.EtpConfig(**options)
        mean = self.config.grad_reduction is etp.GradReduction.MEAN
        self.reference = Reference(copy.deepcopy(model), world_size, mean=mean, per_host=per_host)
        self.model = model
        whole = [model.get_submodule(name) for name in replicated]
        self.runtime = etp.shard_module(model, dist.group.WORLD, config=self.config, replicated_modules=whole)

    def step(self, scenario: Scenario, step: int, *, reference_scenario: Scenario | None = None) -> None:
        """Run one step on both and compare losses and gradients."""
        expected = self.reference.step(reference_scenario or scenario, step)
        self.model.zero_grad()
        losses = list(differentiate(self.model, scenario, step, self.rank))
        etp.wait_async_comms(self.model)
        for number, (mine, theirs) in enumerate(zip(losses, expected[self.rank], strict=True)):
            same = torch.equal(mine, theirs) if self.exact else torch.allclose(mine, theirs, rtol=1e-5)
            assert same, f"step {step}, loss {number}: {mine.item()} is not {theirs.item()}"
        self.compare_grads(f"step {step}")

    def compare_grads(self, where: str) -> None:
        """Sharded gradients bitwise; replicated ones bitwise with two ranks, else within the all-reduce's order."""
        theirs = dict(self.reference.model.named_parameters())
        for name, param in self.model.named_parameters():
            expected = theirs[name].grad
            assert (param.grad is None) == (expected is None), f"{where}: {name} has a gradient on one side only"
            if expected is None or param.grad is None:
                continue
            kind = ShardGrad if isinstance(param, etp.ETPShardedParam) else torch.Tensor
            assert type(param.grad) is kind, f"{where}: {name}'s gradient is a {type(param.grad).__name__}"
            if isinstance(param, etp.ETPShardedParam):
                alignment = 1 if expected.dim() > 2 else self.config.pad_for_alignment  # whole experts
                shard = rows_of_shard(expected, self.rank, self.world_size, alignment)
                self._same(f"{where}: gradient of {name}", param.grad, shard)
            elif self.world_size == 2:
                self._same(f"{where}: gradient of {name}", param.grad, expected)
            else:
                prefix = f"{where}: {name}: "
                torch.testing.assert_close(param.grad, expected, msg=prefix.__add__)
                # What the all-reduce rounded otherwise must not reach the next step, where weights are exact again.
                param.grad.copy_(expected)

    def compare_weights(self, where: str) -> None:
        """Sharded weights, gathered, bitwise; so are the replicated ones with two ranks."""
        full = etp.full_state_dict(self.model)
        for name, expected in self.reference.model.state_dict().items():
            if self.world_size == 2 or isinstance(self.model.state_dict(keep_vars=True)[name], etp.ETPShardedParam):
                self._same(f"{where}: {name}", full[name], expected)

    def _same(self, what: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        if not self.exact:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7, msg=lambda text: f"{what}: {text}")
            return
        assert mine.shape == theirs.shape, f"{what}: {tuple(mine.shape)} is not {tuple(theirs.shape)}"
        assert mine.dtype == theirs.dtype, f"{what}: {mine.dtype} is not {theirs.dtype}"
        assert torch.equal(mine, theirs), f"{what}: differs by up to {(mine - theirs).abs().max().item():.3g}"


def _device_idle(buffers: Sequence[torch.Tensor]) -> None:
    """On a GPU, wait until no stream uses ``buffers``: the gather that fills a slot runs beside the caller's stream."""
    if buffers and buffers[0].is_cuda:
        torch.cuda.synchronize(buffers[0].device)


@contextlib.contextmanager
def poisoned() -> Iterator[dict[str, int]]:
    """Fill every slot when it is claimed, and every gradient buffer when it is leased, with NaN.

    Yields counts of both, so that a test can show that the poison was there.
    """
    counts = {"claims": 0, "leases": 0}
    claim, lease = Slot.claim, WgradPool.lease

    def poisoned_claim(self: Slot, owner: str) -> int:
        generation = claim(self, owner)
        _device_idle(self.buffers)
        for buffer in self.buffers:
            buffer.fill_(float("nan"))
        _device_idle(self.buffers)
        counts["claims"] += 1
        return generation

    def poisoned_lease(self: WgradPool, *args: Any, **kwargs: Any) -> Stack:
        buffers = lease(self, *args, **kwargs)
        counts["leases"] += 1
        buffers.block().fill_(float("nan"))
        return buffers

    with mock.patch.object(Slot, "claim", poisoned_claim), mock.patch.object(WgradPool, "lease", poisoned_lease):
        yield counts
