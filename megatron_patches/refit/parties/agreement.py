"""Agreement on plans: destinations plan and prove what they want; sources check what destinations request of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatron_patches.refit.control.messages import (
    Asked,
    Held,
    Model,
    Orders,
    Overlap,
    Registered,
    Step,
    Wanted,
)
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.parties.registry import registered
from megatron_patches.refit.planning.layouts import Holder, Layout, Receiver, holder_of, receiver_of
from megatron_patches.refit.planning.local import SourceIndex
from megatron_patches.refit.planning.plan import PartOf, Plan, PlanOptions, plan_for
from megatron_patches.refit.planning.proof import prove_with
from megatron_patches.refit.planning.transfers import Moves, Request, check_requests, moves_of


class Steps(Protocol):
    """A party's connection to the other parties, which take steps together.

    It is a :class:`megatron_patches.refit.control.assembly.Assembly`, or a simulation's replacement.

    Attributes:
        party: the party's number.
    """

    party: int

    def exchange[A](self, what: str, kind: type[A], work: Callable[[], object]) -> A:
        """Does this party's part of a step. Returns the registry's answer for it."""


@dataclass(frozen=True)
class Agreed:
    """What a party has agreed on with the others.

    Attributes:
        plan: this party's part.
        digest: of the plans of all destinations together, as hexadecimal digits.
    """

    plan: Plan
    digest: str


def agree_as_source(assembly: Steps, held: Callable[[], Held], told: Callable[[], None] = lambda: None) -> Agreed:
    """A source's part: registers what it holds and checks what destinations request of it.

    Args:
        assembly: this party's connection to the others, which take these steps together.
        held: describes what this party holds.
        told: called once destinations know the model, just before they describe what they want.

    Raises:
        RefitError: on all parties, if any failed.
    """
    found: list[Layout] = []

    def describe() -> Registered:
        described = held()
        found.append(holder_of(described.manifest).layout)
        return registered(described, found[0])

    model = assembly.exchange(Step.DESCRIBING, Model, describe)
    told()
    assembly.exchange(Step.RECORDING, Overlap, lambda: Wanted(()))
    orders = assembly.exchange(Step.PLANNING, Orders[list[Request]], lambda: Asked({}, ""))
    plans: list[Plan] = []

    def check() -> None:
        moves: list[Moves] = []
        for destination, requests in orders.requests:
            check_requests(requests, found[0], assembly.party, destination)
            moves += moves_of(requests, found[0], assembly.party, destination)
        plans.append(Plan(model.grids, tuple(moves), PartOf("source", assembly.party)))

    assembly.exchange(Step.CHECKING, type(None), check)
    return Agreed(plans[0], orders.digest)


def agree_as_destination(
    assembly: Steps, wanted: Callable[[Model], Manifest], cannot_send: Callable[[], str] = lambda: ""
) -> Agreed:
    """A destination's part: plans what it requests of each source, and proves that this covers all that it wants.

    Args:
        assembly: this party's connection to the others, which take these steps together.
        wanted: describes what this party wants of the given model.
        cannot_send: called after it; see :class:`megatron_patches.refit.control.messages.Wanted`.

    Raises:
        RefitError: on all parties, if any failed, or no plan covers what is wanted.
    """
    model = assembly.exchange(Step.DESCRIBING, Model, lambda: None)
    recorded: list[Receiver] = []

    def record() -> Wanted:
        recorded.append(receiver_of(wanted(model)))
        return Wanted(tuple(template.region for template in recorded[0].layout.templates), cannot_send())

    overlap = assembly.exchange(Step.RECORDING, Overlap, record)
    plans: list[Plan] = []

    def plan() -> Asked[list[Request]]:
        options = PlanOptions(allow_narrowing=model.allow_narrowing)
        holders = [Holder(rank, host, overlap.layouts[number]) for rank, host, number in overlap.holders]
        own, asked = plan_for(model.grids, SourceIndex(holders), recorded[0], options)
        prove_with(own, holders, recorded, options)
        plans.append(own)
        requests = {source: list(of_source) for source, of_source in asked.items()}
        return Asked(requests, own.digest)

    orders = assembly.exchange(Step.PLANNING, Orders[list[Request]], plan)
    assembly.exchange(Step.CHECKING, type(None), lambda: None)
    return Agreed(plans[0], orders.digest)
