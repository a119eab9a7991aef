"""What the first trainer rank makes of the parties' answers, so that each party receives only what concerns it.

Sources register layouts; destinations register what they want. A destination receives the layouts of the sources that
overlap it. A source receives the requests of destinations. Both receive the addresses of those with which they link.
No party receives everything.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping

import msgspec

from megatron_patches.refit.control.messages import (
    Asked,
    Held,
    Model,
    Moved,
    Orders,
    Overlap,
    Registered,
    Step,
    Wanted,
    decode,
    moved_by_all,
)
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.parties.choosing import Locality, choose
from megatron_patches.refit.planning.layouts import Holder, Layout, check_layout, check_region
from megatron_patches.refit.planning.local import OverlapIndex
from megatron_patches.refit.planning.tensors import agree, fold_tensors
from megatron_patches.refit.transports.base import Offer

_encode = msgspec.msgpack.encode
_NOTHING = _encode(None)


class Registry:
    """The registry of one session; parties are numbered sources first.

    Args:
        sources: number of sources.

    Attributes:
        cannot_send: why a destination could not send what it receives to another engine; empty if all could.
    """

    def __init__(self, sources: int) -> None:
        self.cannot_send = ""
        self._sources = sources
        self._index = OverlapIndex([])
        self._peers: dict[int, set[int]] = defaultdict(set)
        self._steps: Mapping[str, Callable[[list[bytes]], list[bytes]]] = {
            Step.DESCRIBING: self._describe,
            Step.RECORDING: self._overlaps,
            Step.PLANNING: self._orders,
            Step.CHECKING: _nothing,
            Step.CHOOSING: self._transport,
            Step.LISTENING: self._introduce,
            Step.LINKING: _nothing,
        }

    def answer(self, what: str, payloads: list[bytes]) -> list[bytes]:
        """Each party's answer at the end of a step.

        Args:
            what: name of the step.
            payloads: the parts of all parties, in order of their numbers.

        Raises:
            RefitError: if the parts are inconsistent, or there is no such step.
        """
        step = self._moved if what.startswith(Step.SENDING) else self._steps.get(what)
        if step is None:
            raise RefitError(f"there is no step {what!r}; do all run the same version of this package?")
        return step(payloads)

    def _describe(self, payloads: list[bytes]) -> list[bytes]:
        """Keeps the sources' layouts. Returns the model, for every party."""
        held = [decode(payload, Registered) for payload in payloads[: self._sources]]
        holders = [Holder(one.rank, one.host, one.layout) for one in held]
        for holder in holders:
            check_layout(holder.layout, f"source rank {holder.rank}")
        self._index = OverlapIndex(holders)
        first = held[0]
        tensors = agree(first.tensors, holders, partial=first.partial)
        return [_encode(Model(first.config, tensors, first.allow_narrowing))] * len(payloads)

    def _overlaps(self, payloads: list[bytes]) -> list[bytes]:
        """For each destination, the layouts that overlap what it wants; computed once where several want the same."""
        known: dict[bytes, bytes] = {}
        answers = []
        for payload in payloads:
            if payload not in known:
                known[payload] = _encode(self._overlap(payload))
            answers.append(known[payload])
        return answers

    def _overlap(self, payload: bytes) -> Overlap:
        wanted = decode(payload, Wanted)
        self.cannot_send = self.cannot_send or wanted.cannot_send
        for region in wanted.regions:
            check_region(region)
        return Overlap(*self._index.overlapping(wanted.regions))

    def _orders(self, payloads: list[bytes]) -> list[bytes]:
        """For each source, the requests to it; for every party, the digest of all plans together."""
        asked = [decode(payload, Asked[msgspec.Raw]) for payload in payloads]
        content = hashlib.sha256("".join(part.digest for part in asked).encode()).hexdigest()
        orders = [Orders[msgspec.Raw]([], content) for _ in payloads]
        self._peers.clear()
        for destination, part in enumerate(asked[self._sources :]):
            for source, requests in part.requests.items():
                if not 0 <= source < self._sources:
                    raise RefitError(f"destination rank {destination} asks source rank {source}, which is not there")
                orders[source].requests.append((destination, requests))
                self._peers[source].add(self._sources + destination)
                self._peers[self._sources + destination].add(source)
        return [_encode(order) for order in orders]

    def _transport(self, payloads: list[bytes]) -> list[bytes]:
        """The transport that reaches all parties that link with another, for every party."""
        linked = {payload for party, payload in enumerate(payloads) if self._peers.get(party)}
        localities = {decode(payload, Locality) for payload in linked or set(payloads)}
        return [_encode(choose(localities))] * len(payloads)

    def _introduce(self, payloads: list[bytes]) -> list[bytes]:
        """For each party, the offers of those with which it links, and those for everybody, by party."""
        for_all = {party for party, payload in enumerate(payloads) if decode(payload, Offer).to_all}
        known = [sorted(self._peers[party] | for_all) for party in range(len(payloads))]
        return [_encode({peer: msgspec.Raw(payloads[peer]) for peer in peers}) for peers in known]

    def _moved(self, payloads: list[bytes]) -> list[bytes]:
        """How all parties together moved a version, for every party."""
        moved = [decode(payload, Moved) for payload in payloads]
        return [_encode(moved_by_all(moved, self._sources))] * len(payloads)


def _nothing(payloads: list[bytes]) -> list[bytes]:
    """Tells each party only that all have succeeded."""
    return [_NOTHING] * len(payloads)


def registered(held: Held, layout: Layout) -> Registered:
    """What a source registers of what it holds."""
    manifest = held.manifest
    tensors = fold_tensors(held.tensors())
    return Registered(manifest.rank, manifest.host, held.config, tensors, layout, held.allow_narrowing, held.partial)
