"""Fan-out on the first trainer rank: an engine that is behind takes the newest version from engines that serve it.

An engine is behind if it has joined after a push began, failed and came back, or was still committing when a version
was sent. It takes the version beside its subscription, so it takes part in the next push like all others. Neither the
training loop nor other trainer ranks take part, and no serving engine is paused.
:mod:`megatron_patches.refit.trainer.take` moves the version. With a width, a push sends to that many engines, and the
others *follow*: they are behind until they have taken the version, and all ranks can wait for that.

Waves come from :func:`megatron_patches.refit.planning.fan_out.assign`: an engine that is sending is busy, engines that
are behind are assigned to those that are not, and an engine that has committed sends as well. Fan-out has no thread of
its own: when an engine has joined, or has committed or given up a version, its thread checks which engines can begin.

Who can send a version is also a JSON document, for engines that join and for programs that watch a fleet.
docs/refit.md documents the schema.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from megatron_patches.refit.control.messages import State
from megatron_patches.refit.planning.fan_out import Server, Waiting, assign
from megatron_patches.refit.trainer.push_options import RefitOptions
from megatron_patches.refit.trainer.subscription import Subscription
from megatron_patches.refit.trainer.take import Take

logger = logging.getLogger(__name__)

CANDIDATES_SCHEMA = 1
_GIVING_UP_S = 2.0  # for what is given up to end
_ATTEMPTS = 3  # for one engine and version; then it waits for the next push


class Source(msgspec.Struct, frozen=True):
    """One source of a version.

    Attributes:
        name: of the engine; ``trainer`` for the trainer.
        kind: ``engine`` or ``trainer``. The trainer is a source only while it sends this version.
        workers: number of the engine's workers, or of trainer ranks.
        receivers: names of the engines to which it sends the version now.
    """

    name: str
    kind: Literal["engine", "trainer"]
    workers: int
    receivers: Sequence[str]


class Candidates(msgspec.Struct, frozen=True):
    """The sources of the newest version that an engine serves.

    Attributes:
        schema: changes if a key changes its meaning.
        version: number of the version; -1 if no engine serves one.
        sources: all that have exactly this version.
        waiting: names of engines that wait for a source.
        digest: sha256, in hexadecimal digits, of the document with an empty digest.
    """

    schema: int
    version: int
    sources: Sequence[Source]
    waiting: Sequence[str]
    digest: str


def candidates_of(version: int, sources: Sequence[Source], waiting: Sequence[str]) -> Candidates:
    """The document, with its digest."""
    found = Candidates(CANDIDATES_SCHEMA, version, sources, waiting, "")
    return msgspec.structs.replace(found, digest=hashlib.sha256(msgspec.json.encode(found)).hexdigest())


def candidates_json(candidates: Candidates) -> str:
    """The document as JSON, with its keys in the order above and without blanks."""
    return msgspec.json.encode(candidates).decode()


@dataclass
class _Failures:
    """How an engine has failed to take a version.

    Attributes:
        version: the version.
        count: how often.
        reason: why, the last time.
        servers: names of the engines from which, alone, it could not take it.
    """

    version: int
    count: int = 0
    reason: str = ""
    servers: set[str] = field(default_factory=set)


class FanOut:
    """Brings engines to the newest version that others serve. Any thread may use it.

    Args:
        options: of the session.
        ranks: number of trainer ranks.
        subscribed: the trainer's subscriptions whose engines are attached.
        cannot_follow: names of engines to which every push sends, as they could not take a version from others. Those
            that cannot are added.
    """

    def __init__(
        self,
        options: RefitOptions,
        ranks: int,
        subscribed: Callable[[], Collection[Subscription]],
        cannot_follow: set[str],
    ) -> None:
        self._options, self._ranks, self._subscribed = options, ranks, subscribed
        self._lock = threading.Lock()
        self._is_held = self._is_closed = False
        self._taking: dict[str, tuple[Subscription, Take, Future[float]]] = {}  # with what ends once it is over
        self._failures: dict[str, _Failures] = {}
        self._cannot_follow = cannot_follow

    def look(self) -> None:
        """Lets engines that are behind begin to take the newest version, as far as others can send it now."""
        with self._lock:
            self._note_ends()
            if self._is_closed:
                return
            known = self._subscribed()
            # Before the version, because a commit may end meanwhile. Its thread looks again, but after this one.
            under_way = [one for one in known if not one.has_ended]
            version = _newest(known)
            for one in known:
                self._end_following(one, known, version, may_come=bool(under_way))
            busy = {server.name for _, take, _ in self._taking.values() for server in take.servers}
            free = {one.name: one for one in _able(known, version) if one.name not in busy}

            def order(one: Subscription) -> tuple[bool, bool]:
                return not one.can_send, not one.met or not free.keys() >= set(one.met)

            # Those that will send it as well come first, then those that have a plan with engines that are free.
            behind = {one.name: one for one in sorted(self._behind(known, version), key=order)}
            # Nobody shares a server while the trainer sends to others, which are about to have the version.
            sent_to = any(one.name not in self._taking and one.follows < 0 for one in under_way)
            most = len(free) if sent_to else len(behind)
            for name, servers in self._assign([*free], dict([*behind.items()][:most]), version):
                self._begin(behind[name], version, [free[server] for server in servers])

    def hold(self) -> None:
        """Stops engines from taking versions from others, until :meth:`resume`. Commits under way continue.

        Engines that follow also continue: a push waits for them, and does not send to those that are late.
        """
        with self._lock:
            self._is_held = True
            ending = [
                ended
                for one, _, ended in self._taking.values()
                if one.follows < 0 and one.give_up_taking("a newer version is about to be pushed")
            ]
        # Otherwise they would lag, and miss every version if pushes come fast. One that hangs is waited for once.
        wait(ending, _GIVING_UP_S)

    def resume(self) -> None:
        """Ends :meth:`hold`."""
        with self._lock:
            self._is_held = False
        self.look()

    def close(self) -> None:
        """Lets nothing begin any more. The caller ends the subscriptions."""
        with self._lock:
            self._is_closed = True

    def leave_out(self, one: Subscription) -> None:
        """Stops an engine that was detached from taking a version from others."""
        with self._lock:
            one.leave_others()

    def candidates(self) -> Candidates:
        """The sources of the newest version that an engine serves."""
        with self._lock:
            self._note_ends()
            known = self._subscribed()
            version = _newest(known)
            able, behind = _able(known, version), self._behind(known, version)
            takes = {name: [server.name for server in take.servers] for name, (_, take, _) in self._taking.items()}
        sources = [
            Source(one.name, "engine", one.workers, [to for to, names in takes.items() if one.name in names])
            for one in able
        ]
        sent_to = [
            one.name
            for one in known
            if one.standing.state is State.SENDING and one.standing.version == version and one.name not in takes
        ]
        if sent_to:
            sources.insert(0, Source("trainer", "trainer", self._ranks, sent_to))
        return candidates_of(version, sources, [one.name for one in behind])

    def _note_ends(self) -> None:
        for name, (_, take, ended) in list(self._taking.items()):
            if ended.done():
                del self._taking[name]
                if take.failure is not None and not take.is_given_up:
                    failures = self._failed(name, take.version)
                    failures.count, failures.reason = failures.count + 1, take.failure
                    if len(take.servers) == 1:  # of several, it is not known whose fault it was
                        failures.servers.add(take.servers[0].name)
                    self._failures[name] = failures
                    logger.warning(
                        "refit: %s did not take version %d from %s: %s",
                        name,
                        take.version,
                        ", ".join(server.name for server in take.servers),
                        take.failure,
                    )

    def _behind(self, known: Collection[Subscription], version: int) -> list[Subscription]:
        """Engines that could begin to take a version now."""
        return [
            one
            for one in known
            if one.is_idle
            and max(one.serves, one.follows - 1) < version
            and one.name not in self._taking
            and (one.follows >= 0 or not self._is_held)
        ]

    def _end_following(
        self, one: Subscription, known: Collection[Subscription], version: int, *, may_come: bool
    ) -> None:
        """Ends the wait of an engine that follows, if it serves its version or no engine will be able to send it.

        Args:
            one: the engine.
            known: all engines.
            version: the newest version that one of them serves.
            may_come: whether a commit was under way before that was known, so that another version may come.
        """
        if one.follows < 0 or one.name in self._taking:
            return
        if one.serves >= one.follows:
            one.end_following(None)
            return
        failures = self._failed(one.name, version)
        able = [each.name for each in _able(known, version) if version >= one.follows]
        if one.is_idle and failures.count < _ATTEMPTS and (may_come or not failures.servers.issuperset(able)):
            return
        if failures.count and not one.gone:
            self._cannot_follow.add(one.name)
        last = self._failed(one.name, one.follows)  # of a version that now nobody may serve
        reason = "; ".join(one.gone) or failures.reason or last.reason or "nobody sends it"
        one.end_following(f"{one.name} did not take version {one.follows} from other engines: {reason}")

    def divide(self, known: Mapping[int, Subscription], ready: Sequence[int]) -> tuple[list[int], list[int]]:
        """Divides those that can take part in a push.

        Args:
            known: the subscriptions, by number.
            ready: numbers of those that can take part.

        Returns:
            Numbers of those to which the trainer sends, and of those that follow. The trainer chooses engines with the
            oldest versions first, so that none waits for ever if pushes come too fast, and of equally old ones those
            that can send to others. At least one that can is among them; if there is none, the trainer sends to all.
        """
        width = len(ready) if self._options.fan_out_width is None else self._options.fan_out_width
        with self._lock:
            able = [number for number in ready if known[number].name not in self._cannot_follow]
        able.sort(key=lambda number: (known[number].serves, not known[number].can_send))
        if not any(known[number].can_send for number in able[:width]):
            sender = next((number for number in able if known[number].can_send), None)
            if sender is None:
                return list(ready), []
            able.remove(sender)
            able.insert(0, sender)
        following = set(able[width:])
        return [number for number in ready if number not in following], sorted(following)

    def _failed(self, name: str, version: int) -> _Failures:
        failures = self._failures.get(name)
        return failures if failures is not None and failures.version == version else _Failures(version)

    def _assign(
        self, free: list[str], behind: Mapping[str, Subscription], version: int
    ) -> Iterator[tuple[str, list[str]]]:
        """Yields engines that are behind, with their servers. One that has failed gets a server that is new to it."""
        fresh = []
        for name in behind:
            failures = self._failed(name, version)
            if not failures.count:
                fresh.append(name)
            elif failures.count < _ATTEMPTS:
                untried = [server for server in free if server not in failures.servers]
                if untried:
                    free.remove(untried[0])
                    yield name, untried[:1]
        places: dict[str, list[str]] = {}
        for share in assign(
            [Server(name=name) for name in free], [Waiting(name=name) for name in (fresh if free else ())]
        ):
            places.setdefault(share.receiver, []).append(share.server)
        waiting, left = list(places), list[list[str]]()
        for servers in places.values():  # receivers are alike, so one with a plan for these servers gets them
            known = [name for name in waiting if behind[name].met == servers]
            if known:
                waiting.remove(known[0])
                yield known[0], servers
            else:
                left.append(servers)
        yield from zip(waiting, left, strict=True)

    def _begin(self, one: Subscription, version: int, servers: Sequence[Subscription]) -> None:
        logger.info("refit: %s takes version %d from %s", one.name, version, ", ".join(each.name for each in servers))
        take = Take(version, servers)
        self._taking[one.name] = one, take, one.take(take)


def _newest(known: Collection[Subscription]) -> int:
    """The newest version that an engine serves; -1 if there is none."""
    return max((one.serves for one in known if one.has_all_workers), default=-1)


def _able(known: Collection[Subscription], version: int) -> list[Subscription]:
    """Engines that can send a version, now or once they have sent it to others."""
    return [one for one in known if one.can_send and one.is_idle and one.serves == version >= 0]
