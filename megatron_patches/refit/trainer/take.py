"""The first trainer rank's part when one engine takes versions from others.

They meet in a session of their own: the workers of the serving engines are the sources, and those of the taking engine
the destinations. The first rank is a source too: it describes the model, makes the engines take part, and holds no
weights. So plans, proofs, digests, transports, time-outs and commits are those of a push. Like a subscription, a
meeting keeps its plan as long as the same engines meet and none of their workers leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.control.messages import Held, Moved
from megatron_patches.refit.control.rendezvous import Rendezvous
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.memory.ports import Memory
from megatron_patches.refit.parties.registry import Registry
from megatron_patches.refit.parties.source import SourceParty
from megatron_patches.refit.source.weight_source import Once
from megatron_patches.refit.trainer.engine_control import EngineControl, meeting_at
from megatron_patches.refit.trainer.trainer_rank import Trainer
from megatron_patches.refit.transports.frames import Patience
from megatron_patches.refit.transports.worker import wait_for

if TYPE_CHECKING:
    from megatron_patches.refit.trainer.subscription import Subscription


class Meeting:
    """Where the workers of one engine meet those of engines from which it takes versions.

    Args:
        servers: the engines that send.
        control: of the engine that takes.
        trainer: this rank.

    Attributes:
        servers: the engines that send.
    """

    def __init__(self, servers: Sequence[Subscription], control: EngineControl, trainer: Trainer) -> None:
        self.servers, self._control, self._trainer = servers, control, trainer
        # Only whole versions: the servers do not know what else the engine holds.
        self._options = options = replace(control.options, payload=PayloadKind.WHOLE)
        self._sources = 1 + sum(server.workers for server in servers)
        self._given_up: str | None = None
        self._assembly: Assembly | None = None
        self._party: SourceParty | None = None
        self._rendezvous = Rendezvous(
            self._sources + control.workers,
            options.timeout_s,
            Registry(self._sources).answer,
            options.host,
            silence_s=options.lease_s,
        )

    @property
    def awaited(self) -> list[str]:
        """Whom it waits for. Any thread may ask."""
        return self._rendezvous.awaited

    @property
    def is_complete(self) -> bool:
        """Whether nobody has left, and the meeting was not given up."""
        return self._given_up is None and (self._party is None or self._party.is_complete)

    def give_up(self, reason: str) -> None:
        """Ends the meeting. Any thread may call it."""
        self._given_up = reason
        self._rendezvous.give_up(reason)

    def close(self) -> None:
        """Closes the meeting. No version may be under way."""
        if self._party is not None:
            self._party.close()
        self._rendezvous.close(None if self._party is None else 0)

    def bring(self, version: int) -> Moved:
        """Makes the engine receive a version. It is then ready to be committed.

        Raises:
            RefitError: if the version did not come. The meeting cannot move another one.
        """
        control, invitation = self._control, self._rendezvous.invitation
        where = meeting_at(invitation, self._sources, self._options, self._options.staging_bytes)
        call = {"version": version, "key": invitation.token, **where}
        self._ask_servers(call)
        if self._assembly is None or self._party is None:
            self._assembly, self._party = self._agree(call)
        assembly, party = self._assembly, self._party

        def ask() -> Memory:
            control.receive(assembly, version, step, linked=False, key=invitation.token)
            return {}

        step = assembly.next_step
        moved = party.push(version, Once(ask))
        party.unlink()
        return moved

    def _ask_servers(self, call: Mapping[str, Any]) -> None:
        first = 1
        for server in self.servers:
            patience = Patience(self._options.timeout_s, f"{server.name} to send", partial(self._check, server))
            wait_for(server.relay({**call, "first": first}), patience)
            self._rendezvous.check_joined(range(first, first + server.workers), server.name)
            first += server.workers

    def _check(self, server: Subscription) -> None:
        if self._given_up is not None:
            raise PartyFailedError(self._given_up)
        server.check_there()

    def _agree(self, call: Mapping[str, Any]) -> tuple[Assembly, SourceParty]:
        options = self._options.links(self._sources, self._options.staging_bytes)
        assembly = Assembly(self._rendezvous.invitation, 0, self._trainer.name)
        party = SourceParty(assembly, options, self._trainer.device)
        try:
            self._control.meet(assembly, call)
            party.prepare(self._describe)
        except BaseException:
            party.close()
            raise
        return assembly, party

    def _describe(self) -> Held:
        """The model alone, of which this source holds nothing. Engines may lack tensors that they do not serve."""
        held = self._trainer.describe()
        return replace(held, manifest=Manifest(held.manifest.rank, held.manifest.host, (), ()), partial=True)


class Take:
    """One engine takes one version from others.

    Args:
        version: number of the version.
        servers: who serves it.

    Attributes:
        version: number of the version.
        servers: who serves it.
        sources: names of the sources, in order.
        is_given_up: whether it was given up.
        failure: why the engine does not serve the version; None if it does, or that is not known yet.
    """

    def __init__(self, version: int, servers: Sequence[Subscription]) -> None:
        self.version, self.servers = version, servers
        workers = [f"{server.name} worker {worker}" for server in servers for worker in range(server.workers)]
        self.sources = ("the trainer's first rank", *workers)
        self.is_given_up = False
        self.failure: str | None = None
        self._lock = threading.Lock()
        self._meeting: Meeting | None = None  # while the version is on its way
        self._has_come = False
        self._reason = ""

    @property
    def awaited(self) -> list[str]:
        """Whom it waits for. Any thread may ask."""
        meeting = self._meeting
        return [] if meeting is None else meeting.awaited

    def give_up(self, reason: str) -> bool:
        """Gives up the version, unless it has come already. Any thread may call it.

        Returns:
            Whether it had neither come nor been given up before.
        """
        with self._lock:
            was_open = not self._has_come and not self.is_given_up
            self.is_given_up, self._reason = True, reason
            if self._meeting is not None:
                self._meeting.give_up(reason)
            return was_open

    def run(self, meeting: Meeting) -> Moved:
        """Makes the engine receive the version in a meeting with the servers.

        Raises:
            RefitError: if the version did not come.
        """
        with self._lock:
            if self.is_given_up:
                raise PartyFailedError(self._reason)
            self._meeting = meeting
        moved: Moved | None = None
        try:
            moved = meeting.bring(self.version)
            return moved
        finally:
            with self._lock:
                self._meeting, self._has_come = None, moved is not None
