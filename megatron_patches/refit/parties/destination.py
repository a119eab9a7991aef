"""An engine worker's part in a refit: agrees on a plan, receives versions and verifies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.control.messages import Model, Moved, Step, commit_topic
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.memory.delta import Base
from megatron_patches.refit.memory.ports import Memory
from megatron_patches.refit.memory.unpacker import Unpacker
from megatron_patches.refit.parties.agreement import agree_as_destination
from megatron_patches.refit.parties.party import Party
from megatron_patches.refit.parties.terms import LinkOptions
from megatron_patches.refit.transports.pump import receive_version
from megatron_patches.refit.transports.receiving import ReceivingEnd


class DestinationParty(Party[ReceivingEnd]):
    """One engine worker.

    Args:
        assembly: connection to the other parties. Its party number less ``options.sources`` is its destination rank.
        options: how to move bytes.
        device: device of its storages: ``cpu``, or torch's name of a GPU.

    Attributes:
        beside_bytes: see :class:`megatron_patches.refit.control.messages.Moved`; set by the maker of the memory.
        backup_bytes: as ``beside_bytes``.
        cannot_send: see :class:`megatron_patches.refit.control.messages.Wanted`; set while recording.
        verified: digests of the boxes of the manifest, of the last version received.
    """

    beside_bytes = 0
    backup_bytes = 0
    cannot_send = ""
    verified: Sequence[int] = ()

    def __init__(self, assembly: Assembly, options: LinkOptions, device: str = "cpu") -> None:
        super().__init__(assembly, options, device)
        self._manifest: Manifest | None = None
        self._unpacker: Unpacker | None = None

    def prepare(self, wanted: Callable[[Model], Manifest]) -> Manifest:
        """Agrees on a plan with all parties.

        Args:
            wanted: describes what this worker wants of the given model, and where.

        Returns:
            What ``wanted`` returned.

        Raises:
            RefitError: on all parties, if any failed.
        """
        found: list[Manifest] = []

        def record(model: Model) -> Manifest:
            found.append(wanted(model))
            return found[0]

        self._follow(agree_as_destination(self._assembly, record, lambda: self.cannot_send))
        self._manifest = found[0]
        return found[0]

    def receive(
        self,
        version: int,
        step: int,
        linked: bool,
        make_memory: Callable[[], Memory],
        meanwhile: Callable[[], None] | None = None,
        base: Callable[[], Base | None] = lambda: None,
    ) -> Memory:
        """Receives one version into fresh memory and compares every box with what was sent.

        Args:
            version: number of the weights.
            step: number of the sources' next step; this party may have missed one that failed.
            linked: whether the sources' links are up.
            make_memory: makes the storages of the manifest; called before the first byte arrives.
            meanwhile: called once while bytes arrive; see
                :func:`megatron_patches.refit.transports.pump.receive_version`.
            base: returns what the version may be sent relative to, if anything; called after ``make_memory``.

        Returns:
            The memory.

        Raises:
            PartyFailedError: on all parties, if any failed.
        """
        self._assembly.next_step = step
        if not linked:
            self.unlink()
        try:
            end, manifest = self._link(ReceivingEnd, lambda end: end.offer(self._slot_bytes())), self._manifest
            if manifest is None:
                raise PartyFailedError(f"{self._assembly.name} has no plan; prepare() has not succeeded")
            received: list[Memory] = []

            def take() -> Moved:
                with self._timed("allocate"):
                    memory = make_memory()
                if self._unpacker is None:
                    self._unpacker = Unpacker(self.plan, manifest, self._terms, self.staging)
                unpacker = self._unpacker
                unpacker.begin(version, memory, base())
                with closing(unpacker):
                    with self._timed("move"):
                        receive_version(unpacker, end, self._assembly.timeout_s, self._assembly.check, meanwhile)
                    with self._timed("verify"):
                        unpacker.verify()
                self.verified = unpacker.verified.tolist()
                received.append(memory)
                return Moved(self.seconds, self.staging.peak_bytes, self.beside_bytes, self.backup_bytes)

            self._assembly.exchange(f"{Step.SENDING} {version}", Moved, take)
            return received[0]
        except BaseException:
            self.unlink()
            raise

    @property
    def awaited(self) -> str:
        """What this worker waits for while it receives. Any thread may ask."""
        end = self._end
        return "links" if end is None else end.awaited

    def post_commit(self, version: int, reason: str | None) -> None:
        """Reports a commit to the sources. ``reason`` is why it failed, or None."""
        self._assembly.post(commit_topic(version), reason)

    def unlink(self) -> None:
        """See :class:`megatron_patches.refit.parties.party.Party`."""
        self._unpacker = None
        super().unlink()
