"""Executes a plan between memories of one process, with the same steps as transports between processes.

:meth:`Receiver.commit` may replace the old weights only after :meth:`Receiver.verify` has succeeded on all receivers.
After any error the old ones serve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_patches.refit.errors import StaleVersionError, TransferError
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.memory.loads import Terms
from megatron_patches.refit.memory.packets import Packet
from megatron_patches.refit.memory.ports import Bits, Payload
from megatron_patches.refit.memory.sender import Sender
from megatron_patches.refit.memory.unpacker import Unpacker
from megatron_patches.refit.planning.plan import Link, Plan


class Receiver:
    """The receiving side of one destination rank.

    Args:
        plan: the plan.
        manifest: what this rank wants and where.
        memory: its storages, by the names of the manifest; written only by :meth:`commit`.
        terms: the senders' terms.
    """

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest,
        memory: Mapping[str, Bits],
        terms: Mapping[Link, Terms] | None = None,
    ) -> None:
        self._rank, self._serving = manifest.rank, memory
        self._unpacker = Unpacker(plan, manifest, terms)
        self.version = 0  # of the serving weights; 0 for the initial ones
        self._incoming_version = 0
        self._incoming: dict[str, Bits] = {}
        self._verified = False

    def begin(self, version: int) -> None:
        """Prepares to receive ``version``, and drops what has arrived of another version.

        Raises:
            StaleVersionError: if it is not later than the serving version.
        """
        if version <= self.version:
            raise StaleVersionError(
                f"destination rank {self._rank} is asked to receive version {version} and serves {self.version}"
            )
        self._incoming_version, self._verified = version, False
        self._incoming = {name: storage.copy() for name, storage in self._serving.items()}
        self._unpacker.begin(version, self._incoming)

    def accept(self, packet: Packet, payload: Payload) -> None:
        """Unpacks a packet beside the serving weights; raises as :meth:`Unpacker.accept`."""
        self._unpacker.accept(packet, payload)

    def verify(self) -> None:
        """Compares every wanted box with what was sent; raises as :meth:`Unpacker.verify`."""
        self._unpacker.verify()
        self._verified = True

    def commit(self) -> None:
        """Makes the new weights serve.

        Raises:
            TransferError: if they were not verified.
        """
        if not self._verified:
            raise TransferError(f"destination rank {self._rank} has not verified version {self._incoming_version}")
        for name, storage in self._serving.items():
            storage[...] = self._incoming[name]
        self.version, self._verified = self._incoming_version, False


def refit(senders: Sequence[Sender], receivers: Mapping[int, Receiver], version: int) -> int:
    """Moves one version from all senders to all receivers, packet by packet. Commits once all have verified it.

    Args:
        senders: every source.
        receivers: every destination, by rank.
        version: number of the weights; later than the serving version.

    Returns:
        The size of the largest packet.

    Raises:
        RefitError: if anything differs from the plan; every receiver then serves what it served before.
    """
    for receiver in receivers.values():
        receiver.begin(version)
    peak = 0
    for sender in senders:
        for packet, payload in sender.pack(version):
            peak = max(peak, packet.nbytes)
            receivers[packet.destination].accept(packet, payload)
    for receiver in receivers.values():
        receiver.verify()
    for receiver in receivers.values():
        receiver.commit()
    return peak
