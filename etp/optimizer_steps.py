"""Runs callbacks before or after every step of any ``torch.optim`` optimizer, as long as the callback's owner lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import optimizer as optimizers
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


def before_optimizer_steps(owner: object, then: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call ``then(optimizer)`` before every step of any optimizer in this process, while ``owner`` exists.

    Args:
        owner: hashable; a second call replaces its callback.
        then: must not refer to ``owner``, which would then live forever.
    """
    _found(_Stepping, optimizers._global_optimizer_pre_hooks, register_optimizer_step_pre_hook)[owner] = then


def after_optimizer_steps[T](owner: T, then: Callable[[T], None]) -> None:
    """Call ``then(owner)`` after every step of any optimizer in this process, while ``owner`` exists.

    Args:
        owner: hashable; a second call replaces its callback.
        then: must not refer to ``owner``, which would then live forever.
    """
    _found(_Stepped, optimizers._global_optimizer_post_hooks, register_optimizer_step_post_hook)[owner] = then


# PyTorch keeps such hooks in two dicts per process, and each step iterates over them. Removing a hook when its owner is
# collected could change a dict during a step, because the garbage collector may run then. So there is one permanent
# hook in each, which PyTorch's dict owns.


class _Asked(WeakKeyDictionary[Any, Callable[[Any], None]]):
    """Callbacks by owner; the dictionary itself is the hook."""

    # By identity, as a dict of hooks needs it.
    __hash__ = object.__hash__

    def asked(self) -> Iterator[tuple[Any, Callable[[Any], None]]]:
        """The owners that live, with their callbacks. Meanwhile, other threads may add owners."""
        for owner in [reference() for reference in self.keyrefs()]:
            if owner is not None:
                yield owner, self[owner]


class _Stepping(_Asked):
    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Run the callbacks before a step of an optimizer."""
        del args, kwargs
        for _, then in self.asked():
            then(optimizer)


class _Stepped(_Asked):
    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Run the callbacks after a step of an optimizer."""
        del optimizer, args, kwargs
        for owner, then in self.asked():
            then(owner)


def _found[H: _Asked](kind: type[H], hooks: Mapping[int, Any], register: Callable[[Any], object]) -> H:
    """The hook of this kind among PyTorch's, created and registered at the first call."""
    found = next((hook for hook in list(hooks.values()) if isinstance(hook, kind)), None)
    if found is None:
        found = kind()
        register(found)
    return found
