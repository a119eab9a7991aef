"""When hooks run: on visits of the shards' nodes by a real autograd, with reductions that end when the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from etp.config import EtpConfig
from etp.grad_hooks import Chosen, GradHooks, returned_by_autograd
from etp.grads import Destinations, PendingReduction
from etp.group import WeightGroup
from etp.mode import Modes
from etp.shard import Shard
from tests.support.fake_group import fake_group
from tests.unit.test_group import shard_named


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    with fake_group(rank=0, world_size=2) as group:
        yield group


class Use(torch.autograd.Function):
    """A layer that reduces its weights' gradients itself, and so has none for autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward: Callable[[], None], *shards: Shard) -> torch.Tensor:
        ctx.call, ctx.count = backward, len(shards)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.call()
        return grad, None, *[None] * ctx.count


class Pending:
    """A reduction in flight, as far as hooks ask for it."""

    def __init__(self, group: WeightGroup, *, belated: bool = False) -> None:
        self.group, self.belated = group, belated


class Noting(GradHooks):
    """Notes the gradients that autograd itself brings, and leaves them as they are."""

    def __init__(self, *parts: Any, noted: list[tuple[str, torch.Tensor]]) -> None:
        super().__init__(*parts)
        self._noted = noted

    def _beside(self, shard: Shard, grad: torch.Tensor) -> torch.Tensor | None:
        self._noted.append((shard.fqn, grad))
        self._run_when_accumulated(shard)
        return grad


class Case:
    """A group of weights whose hooks are logged, with the group's own hook."""

    def __init__(self, world: dist.ProcessGroup, *names: str) -> None:
        self.ran: list[str] = []
        self.brought: list[tuple[str, torch.Tensor]] = []
        self.pending: list[Pending] = []
        self.modes = Modes(EtpConfig())
        pending = cast("list[PendingReduction]", self.pending)
        self.hooks = Noting(EtpConfig(), self.modes, pending, (), lambda _: None, noted=self.brought)
        self.shards = [shard_named(name) for name in names]
        for shard in self.shards:
            shard.register_post_accumulate_grad_hook(lambda param: self.ran.append(cast("Shard", param).fqn))
        self.group = WeightGroup(self.shards, world)
        self.group.reduce_hooks.append(self._group_told)
        self.hooks.watch(self.group)

    def _group_told(self, shard: Shard | None) -> None:
        self.ran.append("group" if shard is None else f"group for {shard.fqn}")

    def start(self) -> None:
        """A reduction is started at a use."""
        self.hooks.used_further[self.group] = next(shard for shard in self.shards if shard.requires_grad)

    def end(self, *which: int, run_hooks: bool = True) -> None:
        """A reduction of these shards ends, or of all."""
        chosen: Chosen = tuple(index in which for index in range(len(self.shards))) if which else None
        trained = [self.shards[index] for index in which] or self.shards
        into = Destinations.of(trained)
        for sink in into.sinks:
            sink.zero_()
        self.hooks.complete(self.group, trained, into, chosen, run_hooks)

    def differentiate(self, *backwards: Callable[[], None]) -> None:
        """A backward pass through a use for each of these, the first of them first."""
        x = torch.ones(1, requires_grad=True)
        for backward in reversed(backwards):
            x = cast("torch.Tensor", Use.apply(x, backward, *self.shards))
        x.backward()

    def end_pass(self) -> list[str]:
        """What has run when the pass has ended; forgotten by the next call."""
        self.hooks.used_further.clear()
        self.hooks.run_owed()
        self.hooks.done.clear()
        ran, self.ran = self.ran, []
        return ran


def both(*calls: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def test_hooks_run_as_soon_as_the_reduction_of_the_last_use_ends(world: dist.ProcessGroup) -> None:
    case = Case(world, "a", "b")
    for _ in range(2):
        case.differentiate(case.start)
        assert case.ran == []
        case.end()
        assert case.ran == ["group", "a", "b"]
        assert case.end_pass() == ["group", "a", "b"]


def test_hooks_of_several_uses_run_once_when_the_pass_ends(world: dist.ProcessGroup) -> None:
    case = Case(world, "a")
    case.differentiate(case.start, both(case.end, case.start), case.end)
    assert case.ran == []
    assert case.end_pass() == ["group", "a"]
    assert case.end_pass() == []


def test_a_reduction_that_ends_behind_the_last_use_pays_what_is_owed(world: dist.ProcessGroup) -> None:
    case = Case(world, "a")
    case.differentiate(case.start, both(case.end, case.start))
    assert case.ran == []
    case.end()
    assert case.end_pass() == ["group", "a"]


def test_hooks_that_are_owed_wait_for_a_reduction_in_flight(world: dist.ProcessGroup) -> None:
    case = Case(world, "a")
    case.differentiate(both(case.start, case.end, case.start))
    case.pending.append(Pending(case.group))
    assert case.end_pass() == []
    case.pending.clear()
    case.end()
    assert case.end_pass() == ["group", "a"]


def test_a_use_that_autograd_does_not_see_is_the_last_when_the_pass_ends(world: dist.ProcessGroup) -> None:
    case = Case(world, "a")
    case.start()
    case.end()
    assert case.ran == []
    assert case.end_pass() == ["group", "a"]


def test_only_shards_that_were_asked_for_are_told(world: dist.ProcessGroup) -> None:
    case = Case(world, "a", "b", "c")
    case.differentiate(case.start)
    case.end(0, 2)
    assert case.ran == []
    assert case.end_pass() == ["group for a", "a", "group for c", "c"]


@pytest.mark.parametrize("forget", [GradHooks.forget, lambda hooks: hooks.owed.clear()])
def test_hooks_of_an_earlier_pass_do_not_run(world: dist.ProcessGroup, forget: Callable[[GradHooks], None]) -> None:
    case = Case(world, "a", "b")
    case.differentiate(both(case.start, case.end, lambda: case.end(1)))
    forget(case.hooks)
    assert case.end_pass() == []
    case.end(run_hooks=False)
    assert case.end_pass() == []


def test_a_reduction_says_that_it_was_added_to_main_grad(world: dist.ProcessGroup) -> None:
    case = Case(world, "a")
    shard: Any = case.shards[0]
    shard.main_grad, shard.grad_added_to_main_grad = torch.zeros(shard.shape), False
    case.end()
    assert shard.grad_added_to_main_grad
    assert shard.grad is None


def test_in_a_part_hooks_run_behind_autograds_own_accumulation(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(world, "a")
    (shard,) = case.shards
    with monkeypatch.context() as patch:
        patch.setattr(case.modes, "now", replace(case.modes.now, is_part=True))
        for _ in range(2):
            case.end()
    assert case.end_pass() == []
    (shard * 2).sum().backward()
    assert case.end_pass() == ["group for a", "a"], "once, though two reductions were captured"
    for belated, later in ((True, ["group for a", "a"]), (False, [])):  # the end of one of this pass runs them itself
        case.pending.append(Pending(case.group, belated=belated))
        (shard * 2).sum().backward()
        assert case.end_pass() == []
        case.pending.clear()
        assert case.end_pass() == later
    case.differentiate(lambda: None)
    assert case.end_pass() == [], "autograd has brought nothing"


def test_the_first_trained_shard_tells_of_its_group_and_all_tell_what_autograd_brings(
    world: dist.ProcessGroup,
) -> None:
    case = Case(world, "a", "b")
    case.start()
    (case.shards[1] * 3).sum().backward()
    assert case.hooks.used_further == {case.group: case.shards[0]}
    (case.shards[0] * 3).sum().backward()
    assert case.hooks.used_further == {}
    assert [name for name, _ in case.brought] == ["b", "a"]
    assert all(torch.equal(grad, torch.full_like(grad, 3.0)) for _, grad in case.brought)


def test_a_frozen_shard_is_watched_too_and_stays_frozen(world: dist.ProcessGroup) -> None:
    case = Case(world, "a")
    group = WeightGroup([shard_named("frozen", requires_grad=False), shard_named("trained")], world)
    for _ in range(2):
        case.hooks.watch(group)
    assert [shard.requires_grad for shard in group.shards] == [False, True]
    group.shards[0].requires_grad_(True)
    torch.stack([(shard * 2).sum() for shard in group.shards]).sum().backward()
    assert sorted(name for name, _ in case.brought) == ["frozen", "trained"]


def test_what_was_released_is_watched_no_more(world: dist.ProcessGroup) -> None:
    case = Case(world, "a")
    case.hooks.replayed.add(id(case.shards[0]))
    case.hooks.release([case.group])
    case.start()
    case.differentiate(lambda: None)
    (case.shards[0] * 3).sum().backward()
    assert case.hooks.used_further == {case.group: case.shards[0]}
    assert case.hooks.replayed == set()
    assert case.brought == []
    assert case.ran == []


def test_only_the_error_of_autograd_grad_is_taken_for_an_answer(world: dist.ProcessGroup) -> None:
    (shard,) = Case(world, "a").shards
    with pytest.raises(RuntimeError, match="backward"):
        returned_by_autograd(shard)


def test_a_gradient_of_autograds_own_runs_hooks_unless_the_end_of_a_reduction_has_run_them_in_this_pass(
    world: dist.ProcessGroup,
) -> None:
    case = Case(world, "a", "b")
    case.differentiate(case.start)
    case.end()
    (case.shards[1] * 3).sum().backward()
    assert case.end_pass() == ["group", "a", "b"]
    (case.shards[1] * 3).sum().backward()
    assert case.end_pass() == ["group for b", "b"]


def test_hooks_of_main_grad_run_behind_autograds_own_gradient_but_are_megatrons_once_the_shard_is_captured(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard: Any = shard_named("a")
    shard.main_grad = torch.zeros(shard.shape)
    ran: list[str] = []
    shard.register_reduce_hook(lambda: ran.append("a"))
    group, modes = WeightGroup([shard], world), Modes(EtpConfig())
    hooks = GradHooks(EtpConfig(), modes, (), (), lambda _: None)
    hooks.watch(group)
    (shard * 2).sum().backward()
    assert ran == ["a"]
    assert torch.equal(shard.main_grad, torch.full_like(shard.main_grad, 2.0))
    with monkeypatch.context() as patch:
        patch.setattr(modes, "now", replace(modes.now, is_part=True))
        hooks.complete(group, [shard], Destinations.of([shard]), None, run_hooks=True)
    (shard * 2).sum().backward()
    assert ran == ["a"]
