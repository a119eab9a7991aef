"""Fan-out on the first trainer rank: an engine that is behind takes the newest version from engines that serve it.

An engine is behind if it has joined after a push began, failed and came back, or was still committing when a version
was sent. It takes the version beside its subscription, so it takes part in the next push like all others. Neither the
training loop nor other trainer ranks take part, and no serving engine is paused. :mod:`megatron_patches.refit.take`
moves the version.

Waves come from :func:`megatron_patches.refit.planning.fan_out.assign`: an engine that is sending is busy, engines that
are behind are assigned to those that are not, and an engine that has committed sends as well. There is no thread of its
own: whenever an engine has joined, or committed or given up a version, its thread looks who can begin now.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_patches.refit.candidates import Candidates, Source, candidates_of
from megatron_patches.refit.parties.messages import State
from megatron_patches.refit.planning.fan_out import Server as PlannedServer
from megatron_patches.refit.planning.fan_out import Waiting, assign
from megatron_patches.refit.push_options import RefitOptions
from megatron_patches.refit.subscription import Subscription
from megatron_patches.refit.take import Server, Take
from megatron_patches.refit.trainer_rank import Trainer

logger = logging.getLogger(__name__)

_ATTEMPTS = 3  # for one engine and version; then it waits for the next push


@dataclass
class _Failures:
    """How an engine has failed to take a version.

    Attributes:
        version: the version.
        count: how often.
        servers: names of the engines from which it could not take it.
    """

    version: int
    count: int = 0
    servers: set[str] = field(default_factory=set)


class FanOut:
    """Brings engines to the newest version that others serve. Any thread may use it.

    Args:
        options: of the session.
        trainer: this rank, as in its subscriptions.
        ranks: number of trainer ranks.
        subscribed: the trainer's subscriptions whose engines are attached.
    """

    def __init__(
        self, options: RefitOptions, trainer: Trainer, ranks: int, subscribed: Callable[[], Collection[Subscription]]
    ) -> None:
        self._options, self._trainer, self._ranks, self._subscribed = options, trainer, ranks, subscribed
        self._lock = threading.Lock()
        self._is_held = False
        self._taking: dict[str, tuple[Subscription, Take]] = {}
        self._failures: dict[str, _Failures] = {}

    def look(self) -> None:
        """Lets engines that are behind begin to take the newest version, as far as others can send it now."""
        with self._lock:
            self._note_ends()
            if self._is_held:
                return
            known = self._subscribed()
            version = _newest(known)
            busy = {server.name for _, take in self._taking.values() for server in take.servers}
            free = {one.name: one for one in _able(known, version) if one.name not in busy}
            behind = {one.name: one for one in self._behind(known, version)}
            for name, servers in self._assign([*free], [*behind], version):
                self._begin(behind[name], version, [free[server] for server in servers])

    def hold(self, reason: str) -> None:
        """Ends all that engines take from each other, but for commits. Nothing begins until :meth:`resume`."""
        with self._lock:
            self._is_held = True
            for one, _ in self._taking.values():
                one.give_up_taking(reason)

    def resume(self) -> None:
        """Ends :meth:`hold`."""
        with self._lock:
            self._is_held = False
        self.look()

    def leave_out(self, name: str) -> None:
        """Ends what an engine takes from others."""
        with self._lock:
            if name in self._taking:
                self._taking[name][0].give_up_taking(f"{name} was detached")

    def candidates(self) -> Candidates:
        """The sources of the newest version that an engine serves."""
        with self._lock:
            self._note_ends()
            known = self._subscribed()
            version = _newest(known)
            able, behind = _able(known, version), self._behind(known, version)
            takes = {name: [server.name for server in take.servers] for name, (_, take) in self._taking.items()}
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
        for name, (one, take) in list(self._taking.items()):
            if one.served.done():
                del self._taking[name]
                if one.serves != take.version and not take.is_given_up:
                    failures = self._failed(name, take.version)
                    failures.count += 1
                    failures.servers.update(server.name for server in take.servers)
                    self._failures[name] = failures

    def _behind(self, known: Collection[Subscription], version: int) -> list[Subscription]:
        """Engines that could begin to take a version now."""
        return [one for one in known if one.is_idle and one.serves < version and one.name not in self._taking]

    def _failed(self, name: str, version: int) -> _Failures:
        failures = self._failures.get(name)
        return failures if failures is not None and failures.version == version else _Failures(version)

    def _assign(self, free: list[str], behind: Sequence[str], version: int) -> Iterator[tuple[str, list[str]]]:
        """Servers for engines that are behind. One that has failed takes from one that it has not taken from before."""
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
        servers: dict[str, list[str]] = {}
        for share in assign(
            [PlannedServer(name=name) for name in free], [Waiting(name=name) for name in (fresh if free else ())]
        ):
            servers.setdefault(share.receiver, []).append(share.server)
        yield from servers.items()

    def _begin(self, one: Subscription, version: int, servers: Sequence[Subscription]) -> None:
        logger.info("refit: %s takes version %d from %s", one.name, version, ", ".join(each.name for each in servers))
        take = Take(
            version, [Server(each.name, each.workers, each.relay) for each in servers], self._options, self._trainer
        )
        self._taking[one.name] = one, take
        one.take(take)


def _newest(known: Collection[Subscription]) -> int:
    """The newest version that an engine serves; -1 if there is none."""
    return max((one.serves for one in known if one.has_all_workers), default=-1)


def _able(known: Collection[Subscription], version: int) -> list[Subscription]:
    """Those that can send a version, now or once they have sent it to others."""
    return [one for one in known if one.is_idle and one.serves == version >= 0]
