"""Runs callbacks before or after every step of any ``torch.optim`` optimizer, as long as the callback's owner lives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import optimizer as optimizers
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


def before_optimizer_steps[T](owner: T, then: Callable[[T, torch.optim.Optimizer], None]) -> None:
    """Call ``then(owner, optimizer)`` before every step of any optimizer in this process, while ``owner`` exists.

    Args:
        owner: hashable; a second call replaces its callback.
        then: must not refer to ``owner``, which would then live forever.
    """
    _found(optimizers._global_optimizer_pre_hooks, register_optimizer_step_pre_hook)[owner] = then


def after_optimizer_steps[T](owner: T, then: Callable[[T, torch.optim.Optimizer], None]) -> None:
    """:func:`before_optimizer_steps`, but after every step."""
    _found(optimizers._global_optimizer_post_hooks, register_optimizer_step_post_hook)[owner] = then


class _Asked(WeakKeyDictionary[Any, Callable[[Any, torch.optim.Optimizer], None]]):
    """Callbacks by owner; the dictionary itself is the hook.

    PyTorch keeps such hooks in two dicts per process, and each step iterates over them. Removing a hook when its owner
    is collected could change a dict during a step, because the garbage collector may run then. So there is one
    permanent hook in each, which PyTorch's dict owns.
    """

    # By identity, as a dict of hooks needs it.
    __hash__ = object.__hash__

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Run the callbacks of the owners that live. Meanwhile, other threads may add owners."""
        del args, kwargs
        for owner in [reference() for reference in self.keyrefs()]:
            if owner is not None:
                self[owner](owner, optimizer)


def _found(hooks: Mapping[int, Any], register: Callable[[Any], object]) -> _Asked:
    """Our hook among PyTorch's, created and registered at the first call."""
    found = next((hook for hook in list(hooks.values()) if isinstance(hook, _Asked)), None)
    if found is None:
        found = _Asked()
        register(found)
    return found
