"""The first trainer rank's part when one engine takes a version from others.

It is a session of its own, for this engine and this version: the workers of the serving engines are the sources, and
those of the taking engine the destinations. The first rank is a source too: it describes the model, makes the engines
take part, and holds no weights. So plans, proofs, digests, transports, time-outs and commits are those of a push.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_patches.refit.assembly import Assembly
from megatron_patches.refit.delta import PayloadKind
from megatron_patches.refit.engine_control import EngineControl, meeting_at
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.frames import Patience
from megatron_patches.refit.manifest import Manifest
from megatron_patches.refit.parties.messages import Held, Moved
from megatron_patches.refit.parties.registry import Registry
from megatron_patches.refit.parties.source import SourceParty
from megatron_patches.refit.ports import Memory
from megatron_patches.refit.push_options import RefitOptions
from megatron_patches.refit.rendezvous import Rendezvous
from megatron_patches.refit.trainer_rank import Once, Trainer
from megatron_patches.refit.transports.worker import wait_for


@dataclass(frozen=True)
class Server:
    """An engine that serves the version.

    Attributes:
        name: of the engine.
        workers: number of its workers.
        relay: makes them send it; see :meth:`megatron_patches.refit.subscription.Subscription.relay`.
        check: raises if they have left.
    """

    name: str
    workers: int
    relay: Callable[[Mapping[str, Any]], Future[None]]
    check: Callable[[], None]


class Take:
    """One engine takes one version from others.

    Args:
        version: number of the version.
        servers: who serves it.
        options: of the session.
        trainer: this rank.

    Attributes:
        version: number of the version.
        servers: who serves it.
        sources: names of the sources, in order.
        is_given_up: whether it was given up.
        failure: why the engine does not serve the version; None if it does, or that is not known yet.
    """

    def __init__(self, version: int, servers: Sequence[Server], options: RefitOptions, trainer: Trainer) -> None:
        self.version, self.servers = version, servers
        workers = [f"{server.name} worker {worker}" for server in servers for worker in range(server.workers)]
        self.sources = ("the trainer's first rank", *workers)
        self.is_given_up = False
        self.failure: str | None = None
        # Only whole versions: the servers do not know what else the engine holds.
        self._options, self._trainer = replace(options, payload=PayloadKind.WHOLE), trainer
        self._lock = threading.Lock()
        self._rendezvous: Rendezvous | None = None
        self._reason = ""

    @property
    def awaited(self) -> list[str]:
        """Whom it waits for. Any thread may ask."""
        return [] if self._rendezvous is None else self._rendezvous.awaited

    def give_up(self, reason: str) -> None:
        """Ends it, unless the version has come already. Any thread may call it."""
        with self._lock:
            self.is_given_up, self._reason = True, reason
            if self._rendezvous is not None:
                self._rendezvous.give_up(reason)

    def run(self, control: EngineControl) -> Moved:
        """Makes the engine receive the version. It is then ready to be committed.

        Args:
            control: of the engine.

        Raises:
            RefitError: if it did not come.
        """
        options, sources = self._options, len(self.sources)
        with self._lock:
            self._check()
            self._rendezvous = rendezvous = Rendezvous(
                sources + control.workers,
                options.timeout_s,
                Registry(sources).answer,
                options.host,
                silence_s=options.lease_s,
            )
        invitation = rendezvous.invitation
        where = meeting_at(invitation, sources, options, options.staging_bytes)
        call = {"version": self.version, "key": invitation.token, **where}
        party: SourceParty | None = None
        try:
            self._ask_servers(rendezvous, call)
            assembly = Assembly(invitation, 0, self._trainer.name)
            party = SourceParty(assembly, options.links(sources, options.staging_bytes), self._trainer.device)
            control.meet(assembly, call)
            party.prepare(self._describe)

            def ask() -> Memory:
                control.receive(assembly, self.version, step, linked=False, key=invitation.token)
                return {}

            step = assembly.next_step
            return party.push(self.version, Once(ask))
        finally:
            if party is not None:
                party.close()
            rendezvous.close(None if party is None else 0)

    def _ask_servers(self, rendezvous: Rendezvous, call: Mapping[str, Any]) -> None:
        first = 1
        for server in self.servers:
            patience = Patience(self._options.timeout_s, f"{server.name} to send", partial(self._check, server))
            wait_for(server.relay({**call, "first": first}), patience)
            rendezvous.check_joined(range(first, first + server.workers), server.name)
            first += server.workers

    def _check(self, server: Server | None = None) -> None:
        if self.is_given_up:
            raise PartyFailedError(self._reason)
        if server is not None:
            server.check()

    def _describe(self) -> Held:
        """The model alone, of which this source holds nothing. Engines may lack tensors that they do not serve."""
        held = self._trainer.describe()
        return replace(held, manifest=Manifest(held.manifest.rank, held.manifest.host, (), ()), partial=True)
