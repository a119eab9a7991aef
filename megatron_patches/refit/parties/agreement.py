"""Agreement on a plan: parties exchange manifests, plan and prove independently, and compare the results."""

from __future__ import annotations

from collections.abc import Callable

from megatron_patches.refit.assembly import Assembly
from megatron_patches.refit.errors import PlanMismatchError
from megatron_patches.refit.manifest import Manifest, agree_on_tensors
from megatron_patches.refit.parties.messages import Held, HeldAnswer, Model, WantedAnswer
from megatron_patches.refit.plan import Plan, PlanOptions, make_plan
from megatron_patches.refit.proof import prove


def agree_on_plan(
    assembly: Assembly,
    staging_bytes: int,
    held: Callable[[], Held | None],
    wanted: Callable[[Model], Manifest | None],
) -> Plan:
    """The plan that all parties follow; taken by all of them together.

    Args:
        assembly: this party's place among them.
        staging_bytes: the most that all packets of one party take; a round takes half.
        held: describes what this party holds; None of a destination.
        wanted: describes, given the model, what it wants; None of a source.

    Raises:
        RefitError: on all parties, if any failed, or no plan serves all.
        PlanMismatchError: if they came to different plans.
    """
    answers = assembly.gather("describing the trainer's weights", HeldAnswer, lambda: HeldAnswer(held()))
    sources = [answer.held for answer in answers if answer.held is not None]
    manifests = [source.manifest for source in sources]
    tensors = agree_on_tensors(sources[0].shapes, manifests)
    model = Model(sources[0].config, tensors)
    wishes = assembly.gather("recording the engine's layout", WantedAnswer, lambda: WantedAnswer(wanted(model)))
    destinations = [wish.manifest for wish in wishes if wish.manifest is not None]
    options = PlanOptions(staging_bytes=staging_bytes // 2, allow_narrowing=sources[0].allow_narrowing)
    plans: list[Plan] = []

    def plan() -> str:
        plans.append(make_plan(tensors, manifests, destinations, options))
        prove(plans[0], manifests, destinations, options)
        return plans[0].digest

    digests = assembly.gather("planning", str, plan)
    differing = [party for party, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise PlanMismatchError(
            f"parties {differing[:8]} computed another plan than party 0; do all run the same version of this package?"
        )
    return plans[0]
