"""What sources and destinations have in common: connection to the other parties, plan, packet memory, and links."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.control.messages import Step
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.memory.loads import Terms
from megatron_patches.refit.memory.staging import StagingPool, slot_bytes
from megatron_patches.refit.parties.agreement import Agreed
from megatron_patches.refit.parties.choosing import locality_of
from megatron_patches.refit.parties.terms import LinkOptions, links_of_party, terms_of
from megatron_patches.refit.planning.plan import Link, Plan
from megatron_patches.refit.transports.base import Offer, Place, Transport, TransportName
from megatron_patches.refit.transports.receiving import ReceivingEnd
from megatron_patches.refit.transports.sending import SendingEnd
from megatron_patches.refit.transports.shm import ShmTransport
from megatron_patches.refit.transports.tcp import TcpTransport

logger = logging.getLogger(__name__)


class Party[End: (SendingEnd, ReceivingEnd)]:
    """One party.

    Args:
        assembly: its connection to the other parties.
        options: how to move bytes.
        device: device of its storages: ``cpu``, or torch's name of a GPU.

    Attributes:
        staging: memory of this party's packets.
        seconds: time of each part of the last version; see :class:`megatron_patches.refit.control.messages.Moved`.
    """

    def __init__(self, assembly: Assembly, options: LinkOptions, device: str = "cpu") -> None:
        self._assembly, self._options, self._device = assembly, options, device
        self._agreed: Agreed | None = None
        self._transport = options.transport
        self._terms: dict[Link, Terms] = {}
        self._end: End | None = None
        self.staging = StagingPool(options.staging_bytes)
        self.seconds: dict[str, float] = {}

    @property
    def plan(self) -> Plan:
        """This party's part of the plan."""
        return self.agreed.plan

    @property
    def agreed(self) -> Agreed:
        """What all parties have agreed on.

        Raises:
            PartyFailedError: before ``prepare`` has succeeded.
        """
        if self._agreed is None:
            raise PartyFailedError(f"{self._assembly.name} has no plan; prepare() has not succeeded")
        return self._agreed

    @property
    def transport(self) -> TransportName:
        """The transport of packets.

        Raises:
            PartyFailedError: before ``prepare`` has succeeded, if the parties choose.
        """
        if self._transport is None:
            raise PartyFailedError(f"{self._assembly.name} has chosen no transport; prepare() has not succeeded")
        return self._transport

    @property
    def linked(self) -> bool:
        """Whether links are up. If not, the next version connects them."""
        return self._end is not None

    @property
    def is_complete(self) -> bool:
        """Whether it is connected to all other parties. Any thread may ask."""
        return not self._assembly.is_lost and not self._assembly.gone()

    def leave(self) -> None:
        """Disconnects from the other parties. Whatever is under way in another thread fails and closes its links."""
        self._assembly.close()

    def close(self) -> None:
        """Disconnects and closes the links, which no other thread may be using; see :meth:`leave`."""
        self.leave()
        self.unlink()

    def unlink(self) -> None:
        """Closes the links, which gives back their memory. The next version connects them again."""
        end, self._end = self._end, None
        if end is not None:
            end.close()

    def _follow(self, agreed: Agreed) -> None:
        self._agreed = agreed
        if self._transport is None:
            self._transport = self._assembly.exchange(Step.CHOOSING, TransportName, lambda: locality_of(self._device))
            logger.info("refit: %s takes the transport %s", self._assembly.name, self._transport.value)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - started

    def _links(self) -> list[Link]:
        return links_of_party(self.plan, self._assembly.party, self._options.sources)

    def _slot_bytes(self) -> int:
        """The largest slots that this party can have.

        It reserves one more on a GPU, for staging through the host. With deltas, it reserves one for a load of the
        base, and on a GPU another one for the load itself.
        """
        on_gpu, deltas = self._device != "cpu", self._options.payload is PayloadKind.DELTA
        extra = int(on_gpu) + int(deltas) * (1 + int(on_gpu))
        return slot_bytes(self._options.staging_bytes, len(self._links()), extra)

    def _link(
        self,
        make: Callable[[Place, Transport], End],
        offer_of: Callable[[End], Offer],
        begin: Callable[[], object] = lambda: None,
    ) -> End:
        """Returns the links of this party. If they are not up, all parties connect them together.

        Args:
            make: makes this side's end of them.
            offer_of: what an end offers to those with which it links.
            begin: called first in the step in which they are made, even if that fails afterwards.
        """
        if self._end is not None:
            return self._end
        made: list[End] = []
        mine: list[Offer] = []

        def listen() -> Offer:
            begin()
            place = self._place()
            # A party without links may lack what the transport needs, unless all parties connect together.
            together = self.transport is TransportName.C10D
            name = self.transport if together or self._links() else TransportName.TCP
            made.append(make(place, open_transport(name, place)))
            mine.append(offer_of(made[0]))
            return mine[0]

        try:
            peers = self._assembly.exchange(Step.LISTENING, dict[int, Offer], listen)
            offers = {**peers, self._assembly.party: mine[0]}
            self._terms = terms_of(self.plan, self._links(), offers, self._options, self.transport)
            # A link is a pair of source and destination; the peer is the one that is not this party.
            peer = 1 if self._assembly.party < self._options.sources else 0
            slots = {link[peer]: terms.packet_bytes or 0 for link, terms in self._terms.items()}
            digests = {link[peer]: digest for link, digest in self.plan.digests.items()}
            check = self._assembly.check
            self._assembly.exchange(Step.LINKING, type(None), lambda: made[0].connect(offers, slots, digests, check))
        except BaseException:
            for end in made:
                end.close()
            raise
        self._end = made[0]
        return made[0]

    def _place(self) -> Place:
        return Place(
            party=self._assembly.party,
            sources=self._options.sources,
            host=self._assembly.local_host,
            device=self._device,
            pool=self.staging,
            timeout_s=self._assembly.timeout_s,
            nics=self._options.nics,
        )


def open_transport(name: TransportName, place: Place) -> Transport:
    """One party's part of the transport ``name``.

    Args:
        name: the transport.
        place: where the party runs.

    Raises:
        RefitError: if the transport needs something that is not installed.
    """
    if name is TransportName.SHM:
        return ShmTransport(place)
    if name is TransportName.TCP:
        return TcpTransport(place)
    # Imported here: they need torch, or more.
    if name is TransportName.NIXL:
        from megatron_patches.refit.transports.nixl import NixlTransport

        return NixlTransport(place)
    if name is TransportName.CUDA_IPC:
        from megatron_patches.refit.transports.cuda_ipc import CudaIpcTransport
        from megatron_patches.refit.transports.cuda_runtime import CudaRuntime

        return CudaIpcTransport(place, CudaRuntime(place.device))
    from megatron_patches.refit.transports.c10d import C10dTransport

    return C10dTransport(place)
