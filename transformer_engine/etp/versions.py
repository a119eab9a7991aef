"""What the engine knows of changes to the shards: since when they are as they are, and whether peers were told.

[Note: observation] The first visit of a forward pass *observes* the shards: it records an event behind which they are
final and, with a transport that publishes, publishes them. Gathers of that pass and of the backward passes after it
wait for the event only, not for the compute that was enqueued since. Within a pass a shard must not change: one that
did is observed again at the next forward visit, and refused in a backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from etp.collectives.base import Transport
from etp.errors import StaleWeightError
from etp.group import WeightGroup
from etp.streams import Lane


@runtime_checkable
class PublishingTransport(Protocol):
    """A transport whose gathers read what was published, not the shards themselves."""

    def publish(self, shards: Sequence[torch.Tensor]) -> None:
        """Let peers see these shards as they are now. Collective."""


@runtime_checkable
class InPlaceTransport(Protocol):
    """A publishing transport that can read shards where they lie."""

    @property
    def reads_in_place(self) -> bool:
        """Whether peers read this rank's shards where they lie."""

    def symmetric_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory to keep shards in. Collective."""

    def finish_reading(self) -> None:
        """Behind the gathers on the calling stream: wait until no peer reads this rank's shards. Collective."""


@runtime_checkable
class GraphableTransport(Protocol):
    """A transport with streams and events of its own, which are not the same inside and outside of a capture."""

    def change_mode(self, *, capturing: bool) -> None:
        """A capture into a CUDA graph begins, with the device idle, or has ended."""

    def watch_replays(self) -> None:
        """Expect what the calling stream was given so far, replays of graphs among it, to end in time."""


class WeightVersions:
    """Versions of the shards of one runtime.

    Args:
        groups: the runtime's groups; the list that it adds to.
        reuse_across_forwards: whether every change of weights is counted by PyTorch or announced. Otherwise each
            forward pass observes them anew.
        before_publication: orders a group's lane of gathers after what has to come before.
    """

    def __init__(
        self,
        groups: list[WeightGroup],
        *,
        reuse_across_forwards: bool,
        before_publication: Callable[[WeightGroup, Lane], None],
    ) -> None:
        self.epoch = 0
        """Count of announced changes."""
        self._groups = groups
        self._before_publication = before_publication
        self._reuse = reuse_across_forwards
        self._replayed_unseen = False
        self._capturing = False
        self._forward = 0
        self._observed: dict[WeightGroup, tuple[int, ...]] = {}
        self._final: dict[torch.device, Any] = {}

    @property
    def trusted(self) -> bool:
        """Whether weights are as they were unless a change was counted or announced."""
        return self._reuse and (self._capturing or not self._replayed_unseen)

    def change_mode(self, *, capturing: bool, replayed_unseen: bool) -> None:
        """A capture into a CUDA graph begins, or has ended.

        Args:
            capturing: which of the two.
            replayed_unseen: whether whole training steps will be replayed, which tell nobody that weights change.
        """
        self._capturing = capturing
        self._replayed_unseen |= replayed_unseen
        self._final.clear()

    def begin_forward(self) -> None:
        """A new forward pass begins: shards may have changed since the last one."""
        self._forward += 1
        self._final.clear()

    def _version(self, group: WeightGroup) -> tuple[int, ...]:
        return (self.epoch, 0 if self.trusted else self._forward, *group.weights_version())

    def is_observed(self, group: WeightGroup, transport: Transport) -> bool:
        """Whether ``group`` may be gathered ahead of its visit."""
        return not isinstance(transport, PublishingTransport) or self._observed.get(group) == self._version(group)

    def observe(self, group: WeightGroup, lane: Lane, transport: Transport, *, in_backward: bool) -> None:
        """Bring the record up to date, at a visit of ``group``. Collective with a publishing transport.

        Raises:
            StaleWeightError: if the shard changed since the forward pass, with a transport that would not see it.
        """
        device = lane.device
        if not in_backward and device not in self._final:
            self._final[device] = lane.mark()
            if not isinstance(transport, PublishingTransport):
                self._note([group for group in self._groups if group.specs[0].device == device])
        if not isinstance(transport, PublishingTransport) or self._observed.get(group) == self._version(group):
            return
        if in_backward and group in self._observed:
            raise StaleWeightError(
                f"{group.name} changed between its forward and its backward pass, and its peers were not told; change "
                "weights after the backward pass"
            )
        self._publish(group, lane, transport)

    def _publish(self, group: WeightGroup, lane: Lane, transport: PublishingTransport) -> None:
        members = [other for other in self._groups if other.process_group == group.process_group]
        for member in members:
            for hook in member.before_gather:
                hook()
        shards = [shard.local_shard() for member in members for shard in member.shards]
        self._before_publication(group, lane)
        lane.start(enqueue(lambda: transport.publish(shards)))
        self._note(members)

    def _note(self, groups: Sequence[WeightGroup]) -> None:
        for group in groups:
            self._observed[group] = self._version(group)

    def gather_waits(self, group: WeightGroup, lane: Lane, transport: Transport) -> list[Any] | None:
        """What a gather into the group's slot has to come after; see :meth:`etp.streams.Lane.start`."""
        slot = group.slot
        publishes = isinstance(transport, PublishingTransport)
        if not publishes:
            for hook in group.before_gather:
                hook()
        if not slot.allocated:
            # The allocator may give it memory that compute enqueued so far still uses.
            return None
        last_read = lane.mark(slot.reader_stream) if slot.last_read is None else slot.last_read
        if publishes:
            # The publication is earlier on the same lane.
            return [last_read]
        final = self._final.get(lane.device)
        if final is None or group.before_gather or self._observed.get(group) != self._version(group):
            return None
        return [final, last_read]


class _Enqueued:
    def join(self) -> None:
        """All is on the calling stream already."""


def enqueue(work: Callable[[], None]) -> Callable[[], _Enqueued]:
    """Work that only enqueues, in the form that :meth:`etp.streams.Lane.start` takes."""

    def start() -> _Enqueued:
        work()
        return _Enqueued()

    return start


def after_optimizer_steps[T](owner: T, then: Callable[[T], None]) -> None:
    """Call ``then(owner)`` after every step of any optimizer in this process, as long as ``owner`` lives."""
    reference = weakref.ref(owner)

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        alive = reference()
        if alive is not None:
            then(alive)

    weakref.finalize(owner, register_optimizer_step_post_hook(stepped).remove)
