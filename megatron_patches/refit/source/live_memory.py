"""The memory of a rank's tensors, looked up for each push, whatever describes them.

Describing thousands of experts takes longer than moving them. So a later lookup reuses the description if the model
consists of the same tensors, with the same shapes and dtypes; their memory may differ.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megatron_patches.refit.errors import RefitError, first_of
from megatron_patches.refit.memory.ports import FlatMemory

if TYPE_CHECKING:
    import torch


class Shard(Protocol):
    """The description of what a rank holds of one tensor. Equal if nothing but its memory has changed."""

    @property
    def name(self) -> str:
        """Name for messages."""

    @property
    def storage(self) -> str:
        """Name of its memory, unique on the rank; empty if the rank holds nothing of it."""

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Shape in memory, padding included."""

    @property
    def form(self) -> str:
        """Dtype and shape, for messages."""


@dataclass(frozen=True, slots=True)
class LiveTensor[S: Shard]:
    """A described tensor and its memory.

    Attributes:
        shard: the description.
        tensor: the parameter or buffer.
        dtype: its dtype.
    """

    shard: S
    tensor: torch.Tensor
    dtype: torch.dtype

    @property
    def memory(self) -> torch.Tensor:
        """Its current elements, padding included: a one-dimensional tensor that shares their memory.

        Raises:
            RefitError: if it has no memory now, and the rank holds something of it.
        """
        with _only_read():
            return self._flat(local_elements(self.tensor))

    def look_up(self) -> torch.Tensor | None:
        """Its current elements, as :attr:`memory`; None if the description is no longer valid. Within `_only_read`.

        Raises:
            RefitError: if it has no memory now, and the rank holds something of it.
        """
        local = local_elements(self.tensor)
        if local.shape != self.shard.held_shape or local.dtype != self.dtype or not local.is_contiguous():
            return None
        return self._flat(local)

    def _flat(self, local: torch.Tensor) -> torch.Tensor:
        end = local.storage_offset() * local.element_size() + local.nbytes
        if end > local.untyped_storage().nbytes():
            if not self.shard.storage:  # padding alone is not read
                return local
            raise RefitError(
                f"{self.shard.name} has no memory now: something, such as what moves weights to the host between two "
                "phases, has let go of it; bring it back before a push"
            )
        # All of it lies in the storage, so this changes only the shape of this tensor. A view would be a second one.
        return local.resize_(local.numel())


class LiveMemory[S: Shard](ABC):
    """Describes the tensors of a model, and looks up their memory for each push.

    Attributes:
        tensors: the tensors as they were described last.
    """

    changed: ClassVar[str]
    """What is wrong if the tensors have changed; the changes follow at ``{}``."""

    def __init__(self) -> None:
        self.tensors: Sequence[LiveTensor[S]] = ()
        self._prepared: Sequence[S] | None = None
        self._present: Sequence[Sequence[torch.Tensor | None]] = ()

    @abstractmethod
    def _models(self) -> Sequence[torch.nn.Module]:
        """The modules that the tensors belong to."""

    @abstractmethod
    def _described(self) -> Sequence[LiveTensor[S]]:
        """Describes all tensors of the modules."""

    def prepare(self) -> None:
        """Describes the tensors. Later lookups must find the same.

        Raises:
            RefitError: if one cannot be described.
        """
        self._describe()
        self._prepared = [live.shard for live in self.tensors]

    def look_up(self) -> FlatMemory:
        """The storages of the description, by name: flat tensors, all in the host's memory or all on one device.

        Raises:
            RefitError: before :meth:`prepare`, if the tensors have changed, one has no memory now, or some are in the
                host's memory and others on a device.
        """
        if self._prepared is None:
            raise RefitError("prepare() has not succeeded")
        found = self._found()
        if found is None:
            self._describe()
            now = [live.shard for live in self.tensors]
            if now != self._prepared:
                self._present = ()  # otherwise the next lookup would accept the changed model
                raise RefitError(self.changed.format(_changes(self._prepared, now)))
            found = {live.shard.storage: live.memory for live in self.tensors if live.shard.storage}
        on_host = [storage for storage, memory in found.items() if memory.is_cpu]
        if 0 < len(on_host) < len(found):
            name = next(live.shard.name for live in self.tensors if live.shard.storage == on_host[0])
            raise RefitError(
                f"{name} (and {len(on_host) - 1} more) is in the host's memory, and others are on a device; "
                "bring all to one before a push"
            )
        return found

    def _describe(self) -> None:
        self.tensors = self._described()
        self._present = [held_tensors(model) for model in self._models()]

    def _found(self) -> FlatMemory | None:
        """The storages, if the description is still valid."""
        present = [held_tensors(model) for model in self._models()]
        if list(map(len, present)) != list(map(len, self._present)):
            return None
        if not all(map(operator.is_, chain.from_iterable(present), chain.from_iterable(self._present))):
            return None
        found: dict[str, torch.Tensor] = {}
        with _only_read():
            for live in self.tensors:
                memory = live.look_up()
                if memory is None:
                    return None
                if storage := live.shard.storage:
                    found[storage] = memory
        return found


@contextmanager
def _only_read() -> Iterator[None]:
    """Leaves out what a parameter's class does when it is asked for something, and what autograd records of that."""
    import torch

    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        yield


def local_elements(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that has this rank's elements of a tensor."""
    return (tensor.to_local() if isinstance(tensor, _dtensor()) else tensor).data


@cache
def _dtensor() -> type[Any]:
    from torch.distributed.tensor import DTensor

    return DTensor


def held_tensors(model: torch.nn.Module) -> list[torch.Tensor | None]:
    """Every parameter and persistent buffer, once per module that has it; fast, and in a fixed order."""
    found: list[torch.Tensor | None] = []
    left = [model]
    while left:
        module = left.pop()
        found += module._parameters.values()
        if module._buffers:
            left_out = module._non_persistent_buffers_set
            found += [buffer for name, buffer in module._buffers.items() if name not in left_out]
        if module._modules:
            left += [child for child in module._modules.values() if child is not None]
    return found


def _changes(before: Iterable[Shard], after: Iterable[Shard]) -> str:
    """Which tensors have changed, for a message."""
    old, new = ({shard.storage or shard.name: shard for shard in shards} for shards in (before, after))
    found = [f"{old[storage].name} is gone" for storage in old.keys() - new.keys()]
    found += [f"{new[storage].name} is new" for storage in new.keys() - old.keys()]
    both = [(old[storage], new[storage]) for storage in old.keys() & new.keys()]
    found += [f"{was.name} was {was.form} and is {now.form}" for was, now in both if was != now]
    if not found:
        return "they come in another order"
    return first_of(sorted(found))
