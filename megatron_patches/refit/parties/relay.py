"""An engine worker's part in fan-out: sends a version that it has committed to the workers of another engine.

To the receiving workers, it is a source like a trainer rank: it describes what it holds, checks what they request of
it, and sends boxes with digests.

[Note: the same version] Those digests only prove that what arrives is what the worker holds. That it holds what the
trainer published is proved by the digests that it compared with the trainer's when it received the version, and has
kept. After sending, it digests its memory again. If a box has changed, because something wrote to the memory or turned
it into another form, the step fails for all parties, so the receiving engine serves on what it serves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_patches.refit.assembly import Assembly
from megatron_patches.refit.errors import DigestError, PartyFailedError, RefitError
from megatron_patches.refit.manifest import Manifest
from megatron_patches.refit.parties.messages import Held, Invitation, Model
from megatron_patches.refit.parties.source import SourceParty
from megatron_patches.refit.parties.terms import LinkOptions
from megatron_patches.refit.port_choice import open_port
from megatron_patches.refit.ports import Batch, Memory, Piece


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


class Relay:
    """Sends one version to one engine.

    Args:
        invitation: to the rendezvous of that engine's workers.
        party: number of this worker there.
        name: of this worker, for messages.
        options: how to move bytes.
        device: device of the storages: ``cpu``, or torch's name of a GPU.
        lease_s: seconds without a message from the rendezvous after which this worker gives up.
    """

    def __init__(
        self, invitation: Invitation, party: int, name: str, options: LinkOptions, device: str, lease_s: float
    ) -> None:
        self._invitation, self._party, self._name = invitation, party, name
        self._options, self._device, self._lease_s = options, device, lease_s
        self._lock = threading.Lock()
        self._source: SourceParty | None = None
        self._is_stopped = self._reads = False

    def run(self, version: int, committed: Callable[[], Committed]) -> None:
        """Sends the version. Returns once all workers of the receiving engine have verified it.

        Args:
            version: number of the weights.
            committed: what this worker holds. If it raises, the step fails for all parties, with its reason.

        Raises:
            PartyFailedError: on all parties, if any failed, or after :meth:`stop`.
        """
        assembly = Assembly(self._invitation, self._party, self._name)
        source = SourceParty(assembly, self._options, self._device)
        with self._lock:
            self._source = source
        found: list[Committed] = []

        def held() -> Held:
            with self._lock:
                if self._is_stopped:
                    raise PartyFailedError(f"{self._name} takes another version, so it cannot send version {version}")
                self._reads = True
            found.append(committed())
            if found[0].version != version:
                raise RefitError(f"{self._name} was to send version {version}, but serves version {found[0].version}")
            return Held({}, {}, replace(found[0].manifest, rank=self._party))

        try:
            source.prepare(held)
            assembly.most_silence_s = self._lease_s  # only now, as long messages before it may delay others
            source.push(version, lambda: found[0].memory, confirm=lambda _: found[0].check())
        finally:
            source.close()

    def stop(self) -> bool:
        """Ends it, because the memory is about to change. :meth:`run` then ends in its own thread.

        Returns:
            Whether it may still read the memory, until :meth:`run` has ended.
        """
        with self._lock:
            self._is_stopped = True
            source = self._source
        if source is not None:
            source.leave()
        return self._reads
