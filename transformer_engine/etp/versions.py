"""Versions of the shards: when each became final, and which version has been published to peers.

[Note: observation] The first visit of a forward pass *observes* the shards: it records an event after which they are
final and, with a transport that publishes, publishes them. Gathers of that pass and of the backward passes after it
wait only for this event, not for compute that was enqueued later. A shard must not change within a pass. If it does, it
is observed again at the next forward visit. With a transport that publishes, a backward visit raises StaleWeightError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from etp.collectives.base import Route
from etp.errors import StaleWeightError
from etp.group import WeightGroup
from etp.mode import Mode
from etp.optimizer_steps import after_optimizer_steps
from etp.streams import enqueue


class WeightVersions:
    """Versions of the shards of one runtime.

    Args:
        groups: the runtime's own list of groups, shared so that later additions are seen.
        reuse_across_forwards: whether every change of weights is counted by PyTorch or announced. Otherwise each
            forward pass observes all shards again.
    """

    def __init__(self, groups: list[WeightGroup], *, reuse_across_forwards: bool) -> None:
        self.epoch = 0
        """Number of announced changes."""
        self._groups = groups
        self._reuse = reuse_across_forwards
        self._forward = 0
        self.final: dict[torch.device, Any] = {}
        """For each device, an event of this forward pass after which the observed shards are final."""
        self.trusted = reuse_across_forwards
        """Whether weights can be assumed unchanged unless a change was counted or announced."""
        self.stamp: tuple[int, int]
        """With the group's version, what :attr:`etp.group.WeightGroup.observed` is for shards that are observed."""
        self._renew_stamp()
        if reuse_across_forwards:
            self.watch_optimizers()

    def _renew_stamp(self) -> None:
        self.stamp = self.epoch, 0 if self.trusted else self._forward

    def announce_change(self) -> None:
        """Count a change of weights that PyTorch may not count."""
        self.epoch += 1
        self._renew_stamp()

    def watch_optimizers(self) -> None:
        """Count every optimizer step as a change from now on, because PyTorch does not count writes of fused ones."""
        after_optimizer_steps(self, WeightVersions.announce_change)

    def change_mode(self, mode: Mode) -> None:
        """Forget events, and decide anew what can be assumed; see :class:`etp.mode.Changing`."""
        self.trusted = self._reuse and not mode.replays_steps
        self._renew_stamp()
        self.final.clear()
        if mode.capture is not None:
            self.watch_optimizers()

    def begin_forward(self) -> None:
        """Begin a forward pass: shards may have changed since the last one."""
        self._forward += 1
        self._renew_stamp()
        self.final.clear()

    def observe(self, group: WeightGroup, route: Route, pass_number: int, *, in_backward: bool) -> None:
        """Update the record at a visit of ``group``. Collective with a publishing transport.

        Args:
            group: the group that is visited; its shards have been read.
            route: how it communicates.
            pass_number: the runtime's count of passes.
            in_backward: whether the visit is in a backward pass.

        Raises:
            StaleWeightError: if the shard changed since the forward pass, with a transport that would not see it.
        """
        device, publishes = route.device, route.transport.publishes
        if not in_backward and device not in self.final:
            self.final[device] = route.gather.mark()
            if not publishes:
                self._note([group for group in self._groups if group.spec.device == device], pass_number)
        if not publishes or group.observed == (self.stamp, group.version):
            return
        if in_backward and group.observed is not None:
            raise StaleWeightError(
                f"{group.name} changed between its forward and its backward pass, and its peers were not told; change "
                "weights after the backward pass"
            )
        self._publish(group, route, pass_number)

    def _publish(self, group: WeightGroup, route: Route, pass_number: int) -> None:
        members = [other for other in self._groups if other.process_group == group.process_group]
        for member in members:
            for hook in member.before_gather:
                hook()
        # After the hooks, which change the shards.
        self._note(members, pass_number)
        shards = [member.local_shards() for member in members]
        route.order_publication()
        label = f"publication of {members[0].name} and {len(members) - 1} other weight groups"
        route.gather.start(enqueue(lambda: route.transport.publish(shards)), label=label)

    def _note(self, groups: Sequence[WeightGroup], pass_number: int) -> None:
        for group in groups:
            group.read_shards(pass_number)
            group.observed = self.stamp, group.version
