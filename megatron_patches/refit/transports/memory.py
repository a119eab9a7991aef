"""The reference transport: executes a plan between memories of one process, with the same steps as the others.

Only when :meth:`Receiver.verify` went well on all may :meth:`Receiver.commit` put the new weights in the place of the
old. After any error the old ones serve. See :mod:`megatron_patches.refit.packets` for how boxes are packed and
compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_patches.refit.errors import StaleVersionError, TransferError
from megatron_patches.refit.loads import Terms
from megatron_patches.refit.manifest import Manifest
from megatron_patches.refit.packets import Packet, Sender, Unpacker
from megatron_patches.refit.plan import Link, Plan
from megatron_patches.refit.ports import Bits


class Receiver:
    """The side of one destination rank.

    Args:
        plan: the plan.
        manifest: what this rank wants and where.
        memory: its storages, by the names of the manifest; written by :meth:`commit` alone.
        terms: those of the senders.
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
        self.version = 0  # of the weights that serve; 0 are those that were there at first
        self._incoming_version = 0
        self._incoming: dict[str, Bits] = {}
        self._verified = False

    def begin(self, version: int) -> None:
        """Makes ready to receive ``version``; drops what has arrived of another.

        Raises:
            StaleVersionError: if it is not later than the version that serves.
        """
        if version <= self.version:
            raise StaleVersionError(
                f"destination rank {self._rank} is asked to receive version {version} and serves {self.version}"
            )
        self._incoming_version, self._verified = version, False
        self._incoming = {name: storage.copy() for name, storage in self._serving.items()}
        self._unpacker.begin(version, self._incoming)

    def accept(self, packet: Packet) -> None:
        """Unpacks a packet beside the weights that serve; raises what :meth:`Unpacker.accept` raises."""
        self._unpacker.accept(packet)

    def verify(self) -> None:
        """Compares every wanted box with what was sent; raises what :meth:`Unpacker.verify` raises."""
        self._unpacker.verify()
        self._verified = True

    def commit(self) -> None:
        """Lets the new weights serve.

        Raises:
            TransferError: if they were not verified.
        """
        if not self._verified:
            raise TransferError(f"destination rank {self._rank} has not verified version {self._incoming_version}")
        for name, storage in self._serving.items():
            storage[...] = self._incoming[name]
        self.version, self._verified = self._incoming_version, False


def refit(senders: Sequence[Sender], receivers: Mapping[int, Receiver], version: int) -> int:
    """Moves one version from all senders to all receivers, packet by packet; commits when all have verified it.

    Args:
        senders: every source.
        receivers: every destination, by rank.
        version: number of the weights; later than the one that serves.

    Returns:
        The size of the largest packet.

    Raises:
        RefitError: if anything is not as planned; every receiver then serves what it served before.
    """
    for receiver in receivers.values():
        receiver.begin(version)
    peak = 0
    for sender in senders:
        for packet in sender.pack(version):
            peak = max(peak, len(packet.payload))
            receivers[packet.destination].accept(packet)
    for receiver in receivers.values():
        receiver.verify()
    for receiver in receivers.values():
        receiver.commit()
    return peak
