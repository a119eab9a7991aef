"""An engine worker's part in fan-out: sends a version that it has committed to another engine, or takes one.

Everything works as in a push. A worker that sends is a source like a trainer rank: it describes what it holds, checks
what is requested of it, and sends boxes with digests. A worker that takes a version plans, proves and verifies it.

[Note: the same version] Those digests only prove that what arrives is what the worker holds. That it holds what the
trainer published is proved by digests: it compared them with the trainer's when it received the version, and has kept
them. After sending, it digests its memory again. If a box has changed, because something wrote to the memory or turned
it into another form, the step fails for all parties, so the receiving engine keeps serving its old version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.control.messages import Held, Invitation, Model
from megatron_patches.refit.errors import DigestError, PartyFailedError, RefitError
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.memory.port_choice import open_port
from megatron_patches.refit.memory.ports import Batch, Memory, Piece
from megatron_patches.refit.parties.destination import DestinationParty
from megatron_patches.refit.parties.source import SourceParty
from megatron_patches.refit.parties.terms import LinkOptions


@dataclass(frozen=True)
class Committed:
    """A version that serves in a worker, in the form in which it arrived.

    Attributes:
        version: number of the weights.
        model: the model, as the trainer described it.
        manifest: what the worker received; no storage has a rule.
        memory: the storages.
        digests: digests of the boxes of the manifest, as compared with the trainer's.
    """

    version: int
    model: Model
    manifest: Manifest
    memory: Memory
    digests: Sequence[int]

    def check(self) -> None:
        """Checks that the memory still holds what the trainer sent.

        Raises:
            DigestError: naming the first box that has changed.
        """
        shapes = {spec.name: spec.shape for spec in self.model.tensors}
        pieces = tuple(
            Piece(item.view, self.manifest.storage[item.view.storage].dtype, item.box, shapes[item.box.tensor])
            for item in self.manifest.placements
        )
        port = open_port(self.memory, "the serving weights")
        try:
            found = port.digest(Batch(pieces)).result()
        finally:
            port.close()
        for placement, digest, kept in zip(self.manifest.placements, found, self.digests, strict=True):
            if digest != kept:
                raise DigestError(
                    f"{placement.box} in {placement.view.storage} no longer holds what the trainer sent of version "
                    f"{self.version}: its digest is {digest:016x}, and was {kept:016x}"
                )


class _Meeting[P: (SourceParty, DestinationParty)]:
    """A worker's party at a rendezvous of engines. Its plan is kept for all versions that come this way.

    Links are not kept: between versions, the engine uses their memory. Any failure ends the meeting.

    Args:
        invitation: to the rendezvous.
        number: number of this worker's party there.
        name: name of this worker, for messages.
        options: how to move bytes.
        device: device of the storages: ``cpu``, or torch's name of a GPU.
        lease_s: seconds without a message from the rendezvous after which this worker gives up.
    """

    def __init__(
        self, invitation: Invitation, number: int, name: str, options: LinkOptions, device: str, lease_s: float
    ) -> None:
        self._invitation, self._number, self._name = invitation, number, name
        self._options, self._device, self._lease_s = options, device, lease_s
        self._lock = threading.Lock()
        self._party: P | None = None
        self._has_left = self._has_plan = False

    @property
    def key(self) -> str:
        """The key by which calls name the meeting."""
        return self._invitation.token

    @property
    def goes_on(self) -> bool:
        """Whether the meeting can move another version: all parties have agreed on a plan, and none has left."""
        return self._has_plan and self._party is not None and self._party.is_complete

    def leave(self) -> None:
        """Ends the meeting. Whatever is under way in another thread fails and closes its links."""
        with self._lock:
            self._has_left = True
            party = self._party
        if party is not None:
            party.leave()

    def _agree(self, kind: type[P], prepare: Callable[[P], object]) -> P:
        """This worker's party. At the first call, joins, and agrees on a plan with all parties through ``prepare``."""
        if self._party is not None and self._has_plan:
            return self._party
        assembly = Assembly(self._invitation, self._number, self._name)
        party = kind(assembly, self._options, self._device)
        with self._lock:
            self._party = party
            if self._has_left:
                party.leave()
        try:
            prepare(party)
        except BaseException:
            party.close()
            raise
        assembly.most_silence_s = self._lease_s  # only now, as long messages before it may delay others
        self._has_plan = True
        return party


class Relay(_Meeting[SourceParty]):
    """Sends versions to one engine, one after another."""

    _reads = False

    def run(self, version: int, committed: Callable[[], Committed]) -> None:
        """Sends the version. Returns once all workers of the receiving engine have verified it.

        Args:
            version: number of the weights.
            committed: what this worker holds. If it raises, the step fails for all parties, with its reason.

        Raises:
            PartyFailedError: on all parties, if any failed, or after :meth:`stop`.
        """

        @cache
        def held() -> Committed:
            with self._lock:
                if self._has_left:
                    raise PartyFailedError(f"{self._name} takes another version, so it cannot send version {version}")
                self._reads = True
            found = committed()
            if found.version != version:
                raise RefitError(f"{self._name} was to send version {version}, but serves version {found.version}")
            return found

        def prepare(party: SourceParty) -> None:
            party.prepare(lambda: Held({}, {}, replace(held().manifest, rank=self._number)))

        party = self._agree(SourceParty, prepare)
        try:
            party.push(version, lambda: held().memory, confirm=lambda _: held().check())
        except BaseException:
            party.close()
            raise
        party.unlink()
        self._reads = False

    def stop(self) -> bool:
        """Stops sending, because the memory is about to change while :meth:`run` is under way in another thread.

        Returns:
            Whether :meth:`run` may still read the memory, until it has ended.
        """
        self.leave()
        return self._reads


class Taking(_Meeting[DestinationParty]):
    """Takes versions from other engines, one after another."""

    def meet(self, manifest: Manifest) -> None:
        """Agrees on a plan with all parties.

        Args:
            manifest: what this worker wants.

        Raises:
            PartyFailedError: on all parties, if any failed, or after :meth:`leave`.
        """
        self._agree(DestinationParty, lambda party: party.prepare(lambda _: manifest))

    @property
    def party(self) -> DestinationParty:
        """This worker's party.

        Raises:
            PartyFailedError: if no plan has been agreed on.
        """
        if self._party is None or not self._has_plan:
            raise PartyFailedError(f"{self._name} has agreed on no plan with other engines")
        return self._party
