"""A trainer rank's part in a refit: agrees on a plan, sends versions, and collects the results of workers' commits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.control.messages import Held, Moved, Step, commit_topic
from megatron_patches.refit.memory.delta import Base
from megatron_patches.refit.memory.ports import Memory, Writing
from megatron_patches.refit.memory.sender import Sender
from megatron_patches.refit.parties.agreement import agree_as_source
from megatron_patches.refit.parties.party import Party
from megatron_patches.refit.parties.terms import LinkOptions
from megatron_patches.refit.transports.pump import send_version
from megatron_patches.refit.transports.sending import SendingEnd


class SourceParty(Party[SendingEnd]):
    """One trainer rank.

    Args:
        assembly: its connection to the other parties; its party number is its source rank.
        options: how to move bytes.
        device: device of its storages: ``cpu``, or torch's name of a GPU.
    """

    def __init__(self, assembly: Assembly, options: LinkOptions, device: str = "cpu") -> None:
        super().__init__(assembly, options, device)
        self._sender: Sender | None = None

    def prepare(self, held: Callable[[], Held], told: Callable[[], None] = lambda: None) -> None:
        """Agrees on a plan with all parties.

        Args:
            held: describes what this rank holds.
            told: called once destinations know the model, just before they describe what they want.

        Raises:
            RefitError: on all parties, if any failed.
        """
        self._follow(agree_as_source(self._assembly, held, told))

    @property
    def late(self) -> list[int]:
        """Destination ranks whose packets are under way. Any thread may ask."""
        end = self._end
        return [] if end is None else end.late

    def push(
        self,
        version: int,
        look_up: Callable[[], Memory],
        base: Base | None = None,
        *,
        writing: Writing | None = None,
        confirm: Callable[[Memory], None] = lambda _: None,
    ) -> Moved:
        """Sends one version; when this returns, every destination has verified it.

        Args:
            version: number of the weights.
            look_up: returns the storages of this rank's manifest, by name, as flat arrays or tensors of unsigned
                integers. It is called first in every step, so that its failure fails the step for all parties at once,
                and what it asks others to do is asked even if this party fails.
            base: this rank's part of the version that every destination serves, relative to which it sends; None to
                send all elements.
            writing: what is still writing to them, on a GPU. If it fails, no destination takes the version.
            confirm: called with them inside the step, once this rank's boxes have been sent. If it raises, no
                destination takes the version.

        Returns:
            The summary over all parties.

        Raises:
            PartyFailedError: on all parties, if any failed.
        """
        try:
            end = self._link(SendingEnd, lambda end: end.offer(self._slot_bytes(), look_up()), look_up)

            def send() -> Moved:
                with self._timed("look_up"):
                    memory = look_up()
                    sender = self._ready(memory, writing)
                sender.relate_to(base)
                with closing(sender), self._timed("move"):
                    end.begin(memory, self._assembly.check)
                    written = None if writing is None else writing.confirm
                    send_version(sender, end, version, self._assembly.check, written)
                confirm(memory)
                return Moved(self.seconds, self.staging.peak_bytes, bytes_by_source=(end.sent_bytes,))

            return self._assembly.exchange(f"{Step.SENDING} {version}", Moved, send)
        except BaseException:
            # Packets of the failed version may still be in flight, so the next version gets new links.
            self.unlink()
            raise

    def collect_commits(self, version: int, destinations: int, timeout_s: float) -> dict[int, str]:
        """Why workers have not committed a version, by worker rank; empty if all have.

        Args:
            version: number of the weights.
            destinations: number of workers.
            timeout_s: seconds to wait for them.
        """
        parties = range(self._options.sources, self._options.sources + destinations)
        found = self._assembly.collect(commit_topic(version), parties, timeout_s)
        return {party - self._options.sources: reason for party, reason in found.items() if reason is not None}

    def _ready(self, memory: Memory, writing: Writing | None) -> Sender:
        """The sender that packs this rank's boxes. It lasts as long as the links, whose terms it follows."""
        if self._sender is None:
            self._sender = Sender(
                self.plan, self._assembly.party, memory, self._terms, self.staging, urgent=writing is not None
            )
        self._sender.renew(memory, writing)
        return self._sender

    def unlink(self) -> None:
        """See :class:`megatron_patches.refit.parties.party.Party`."""
        self._sender = None
        super().unlink()
