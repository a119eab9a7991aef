"""Who is told of optimizers' steps, and what happens when it is collected meanwhile."""

from __future__ import annotations

import gc
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import optimizer as optimizers
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from etp.optimizer_steps import after_optimizer_steps, before_optimizer_steps


class Owner:
    """Hashable, and part of a cycle, so that only the garbage collector ends it."""

    def __init__(self) -> None:
        self.itself = self
        self.told: list[str] = []

    def note(self) -> None:
        """One step."""
        self.told.append("after")


def _note(owner: Owner, _: torch.optim.Optimizer) -> None:
    owner.note()


def _note_kind(owner: Owner, stepped: torch.optim.Optimizer) -> None:
    owner.told.append(type(stepped).__name__)


def _collect(*_: Any) -> None:
    gc.collect()


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    param = torch.nn.Parameter(torch.randn(3))
    param.grad = torch.randn(3)
    return torch.optim.SGD([param], lr=0.1)


@pytest.fixture
def collected_by_hand() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_owners_are_told_before_and_after_each_step(optimizer: torch.optim.Optimizer) -> None:
    owners = [Owner(), Owner()]
    for owner in owners:
        before_optimizer_steps(owner, _note_kind)
        after_optimizer_steps(owner, _note)

    optimizer.step()
    optimizer.step()

    assert all(owner.told == ["SGD", "after"] * 2 for owner in owners)


def test_an_owner_that_asks_again_is_told_once(optimizer: torch.optim.Optimizer) -> None:
    owner = Owner()
    after_optimizer_steps(owner, _note)
    after_optimizer_steps(owner, _note)

    optimizer.step()

    assert owner.told == ["after"]


@pytest.mark.usefixtures("collected_by_hand")
@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_an_owner_may_be_collected_in_the_middle_of_a_step(
    optimizer: torch.optim.Optimizer, register: Callable[[Callable[..., None]], RemovableHandle]
) -> None:
    calls: list[str] = []

    def doomed() -> None:
        owner = Owner()
        before_optimizer_steps(owner, lambda *_: calls.append("before"))
        after_optimizer_steps(owner, lambda *_: calls.append("after"))

    handle = register(_collect)
    try:
        for _ in range(3):
            doomed()
            optimizer.step()
        calls.clear()
        optimizer.step()
    finally:
        handle.remove()

    assert not calls


@pytest.mark.usefixtures("collected_by_hand")
def test_an_owner_may_be_collected_while_others_are_told(optimizer: torch.optim.Optimizer) -> None:
    told: list[str] = []

    class First(Owner):
        """Collects garbage when it is told."""

        def note(self) -> None:
            gc.collect()
            told.append("first")

    class Last(Owner):
        """Comes after what is collected."""

        def note(self) -> None:
            told.append("last")

    first, last = First(), Last()
    after_optimizer_steps(first, _note)
    after_optimizer_steps(Owner(), _note)
    after_optimizer_steps(last, _note)

    optimizer.step()
    optimizer.step()

    assert told == ["first", "last"] * 2


def test_another_thread_may_add_owners_during_steps(optimizer: torch.optim.Optimizer) -> None:
    """As a model does that is built while another one is trained."""
    owners = [Owner() for _ in range(500)]
    late = [Owner() for _ in range(2000)]

    def add(added: list[Owner]) -> None:
        for owner in added:
            before_optimizer_steps(owner, _note_kind)
            after_optimizer_steps(owner, _note)

    add(owners)
    adding = threading.Thread(target=add, args=(late,))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        adding.start()
        steps = 0
        while adding.is_alive() or not steps:
            optimizer.step()
            steps += 1
    finally:
        sys.setswitchinterval(interval)
        adding.join(60.0)
    assert all(owner.told == ["SGD", "after"] * steps for owner in owners)
    optimizer.step()
    assert all(owner.told[-2:] == ["SGD", "after"] for owner in late)


@pytest.mark.parametrize("when", ["pre", "post"])
def test_pytorch_owns_the_one_hook_of_each_kind(
    optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """So that whoever resets PyTorch's hooks, as tests do, does not leave later owners untold."""
    hooks: OrderedDict[int, Any] = OrderedDict()
    monkeypatch.setattr(optimizers, f"_global_optimizer_{when}_hooks", hooks)
    owners = [Owner(), Owner()]
    for owner in owners:
        before_optimizer_steps(owner, _note_kind)
        after_optimizer_steps(owner, _note)

    optimizer.step()

    assert len(hooks) == 1
    assert all(owner.told == ["SGD", "after"] for owner in owners)
