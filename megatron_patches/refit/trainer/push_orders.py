"""What trainer ranks tell each other in the short collectives of a push."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.control.messages import Invitation
from megatron_patches.refit.trainer.push_options import EngineReport


@dataclass(frozen=True)
class Newcomer:
    """An engine that begins to join.

    Attributes:
        number: number of its subscription, the same on all ranks.
        name: name of the engine.
        invitation: to its rendezvous.
        staging_bytes: staging memory of the subscription on each rank.
    """

    number: int
    name: str
    invitation: Invitation
    staging_bytes: int


@dataclass
class PushOrders:
    """What the first rank tells all ranks at the start of a push.

    Attributes:
        new: engines that begin to join, or began since the last push. Ranks may have begun already.
        next: number of the next subscription. Those with lower numbers are in use, or will never be.
        lobby: invitation to where newcomers are announced; None for nowhere.
        ended: numbers of subscriptions to close.
        anew: whether all ranks must prepare again before this push, as it has other tensors than the one before.
        taking: numbers of those that are sent the version.
        following: numbers of those that take it from the engines that are sent it.
        fates: what became of engines since the last push, by name.
        error: why the push fails, if it does.
        engines: names of the engines to blame for that.
    """

    new: list[Newcomer] = field(default_factory=list)
    next: int = 0
    lobby: Invitation | None = None
    ended: list[int] = field(default_factory=list)
    anew: bool = False
    taking: list[int] = field(default_factory=list)
    following: list[int] = field(default_factory=list)
    fates: dict[str, EngineReport] = field(default_factory=dict)
    error: str | None = None
    engines: tuple[str, ...] = ()


@dataclass
class PartOutcome:
    """What became of one subscription's part, on one rank.

    Attributes:
        reason: why it failed; None if it did not.
        paused_s: how long the engine was paused, in seconds; known on the first rank.
        unreachable: whether the engine did not answer when it was to join; known on the first rank.
    """

    reason: str | None = None
    paused_s: float = 0.0
    unreachable: bool = False


def outcome_of(future: Future[Any]) -> PartOutcome:
    """What became of a part that has ended."""
    error = future.exception()
    if error is not None:
        return PartOutcome(describe_error(error))
    found = future.result()
    return PartOutcome(paused_s=found if isinstance(found, float) else 0.0)
