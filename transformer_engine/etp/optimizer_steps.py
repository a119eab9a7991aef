"""Tells of the steps of every ``torch.optim`` optimizer, for as long as the one who asked is alive."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


def before_optimizer_steps(owner: object, then: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call ``then(optimizer)`` before every step of any optimizer in this process, while ``owner`` exists.

    Args:
        owner: hashable; asking again replaces what it asked for.
        then: must not refer to ``owner``, which would then live forever.
    """
    _before()[owner] = then


def after_optimizer_steps[T](owner: T, then: Callable[[T], None]) -> None:
    """Call ``then(owner)`` after every step of any optimizer in this process, while ``owner`` exists.

    Args:
        owner: hashable; asking again replaces what it asked for.
        then: must not refer to ``owner``, which would then live forever.
    """
    _after()[owner] = then


# PyTorch keeps such hooks in two dicts of the process, and a step iterates over them. Removing one when its owner is
# collected would change the dict under a step, since the garbage collector may run there: so there is one hook each,
# for good. Weak dictionaries put off removals while they are iterated over.


@functools.cache
def _before() -> WeakKeyDictionary[Any, Callable[[torch.optim.Optimizer], None]]:
    asked: WeakKeyDictionary[Any, Callable[[torch.optim.Optimizer], None]] = WeakKeyDictionary()

    def stepping(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        for then in list(asked.values()):
            then(optimizer)

    register_optimizer_step_pre_hook(stepping)
    return asked


@functools.cache
def _after() -> WeakKeyDictionary[Any, Callable[[Any], None]]:
    asked: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        for owner, then in list(asked.items()):
            then(owner)

    register_optimizer_step_post_hook(stepped)
    return asked
