"""An engine worker's part in fan-out: takes a version that other engines serve, from their workers.

To them it is a destination like in a push: it plans, proves and verifies what it wants. The counterpart of
:mod:`megatron_patches.refit.parties.relay`.
"""

from __future__ import annotations

import threading

from megatron_patches.refit.assembly import Assembly
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.manifest import Manifest
from megatron_patches.refit.parties.destination import DestinationParty
from megatron_patches.refit.parties.messages import Invitation
from megatron_patches.refit.parties.terms import LinkOptions


class Taking:
    """A worker's meeting with those that serve a version.

    Args:
        invitation: to the rendezvous.
        worker: number of this worker in its engine.
        name: of this worker, for messages.
        options: how to move bytes.
        device: device of the storages: ``cpu``, or torch's name of a GPU.
        lease_s: seconds without a message from the rendezvous after which this worker gives up.
    """

    def __init__(
        self, invitation: Invitation, worker: int, name: str, options: LinkOptions, device: str, lease_s: float
    ) -> None:
        self._invitation, self._worker, self._name = invitation, worker, name
        self._options, self._device, self._lease_s = options, device, lease_s
        self._lock = threading.Lock()
        self._party: DestinationParty | None = None
        self._is_left = False
        self._has_met = False

    def meet(self, manifest: Manifest) -> None:
        """Agrees on a plan with all parties.

        Args:
            manifest: what this worker wants.

        Raises:
            PartyFailedError: on all parties, if any failed, or after :meth:`leave`.
        """
        assembly = Assembly(self._invitation, self._options.sources + self._worker, self._name)
        party = DestinationParty(assembly, self._options, self._device)
        with self._lock:
            self._party = party
            if self._is_left:
                party.leave()
        try:
            party.prepare(lambda _: manifest)
        except BaseException:
            party.close()
            raise
        assembly.most_silence_s = self._lease_s  # only now, as long messages before it may delay others
        self._has_met = True

    @property
    def party(self) -> DestinationParty:
        """This worker's party.

        Raises:
            PartyFailedError: if no plan has been agreed on.
        """
        if self._party is None or not self._has_met:
            raise PartyFailedError(f"{self._name} has agreed on no plan with other engines")
        return self._party

    def leave(self) -> None:
        """Ends it. Whatever is under way in another thread fails and closes its links."""
        with self._lock:
            self._is_left = True
            party = self._party
        if party is not None:
            party.leave()
