"""What trainer ranks and engine workers do together, each party in its own process: plan once, then move versions.

Parties are numbered sources first. All take the same steps of one :class:`Assembly`, so a failure anywhere is
everybody's, with its reason; see there.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from megatron_patches.refit.boxes import TensorSpec
from megatron_patches.refit.errors import PartyFailedError, PlanMismatchError
from megatron_patches.refit.loads import DEFAULT_TERMS, Link, Reach, Terms, links_of
from megatron_patches.refit.manifest import Manifest, agree_on_tensors
from megatron_patches.refit.packets import Sender, Unpacker
from megatron_patches.refit.plan import Plan, PlanOptions, make_plan
from megatron_patches.refit.ports import Memory
from megatron_patches.refit.proof import prove
from megatron_patches.refit.pump import receive_version, send_version
from megatron_patches.refit.rendezvous import Assembly
from megatron_patches.refit.staging import StagingPool, slot_bytes, useful_bytes
from megatron_patches.refit.transports.base import Offer, Place, Transport, TransportName
from megatron_patches.refit.transports.opening import open_transport
from megatron_patches.refit.transports.receiving import ReceivingEnd
from megatron_patches.refit.transports.sending import SendingEnd


class Held(msgspec.Struct, frozen=True):
    """What a source holds.

    Attributes:
        config: content of the model's ``config.json``.
        shapes: global shape of every tensor of the model, by Hugging Face name.
        manifest: its own part.
        allow_narrowing: see :class:`megatron_patches.refit.plan.PlanOptions`; what the first source says counts.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    manifest: Manifest
    allow_narrowing: bool = False


@dataclass(frozen=True)
class Model:
    """What destinations are told of the model.

    Attributes:
        config: content of its ``config.json``.
        tensors: its tensors, with the trainer's element types.
    """

    config: Mapping[str, Any]
    tensors: Sequence[TensorSpec]


class Moved(msgspec.Struct, frozen=True):
    """How a party moved a version, or how all did.

    Attributes:
        seconds: what its parts took; of all, the longest on any destination. ``move`` (packing, the way and unpacking,
            which overlap), and on a destination ``allocate`` before and ``verify`` after it.
        staged_bytes: the most memory that packets took at a time; of all, on any party.
        beside_bytes: memory that a destination made for the version beside what serves; of all, on any.
        backup_bytes: memory of its host in which it keeps what serves; of all, on any.
    """

    seconds: dict[str, float]
    staged_bytes: int
    beside_bytes: int = 0
    backup_bytes: int = 0


class _Held(msgspec.Struct):
    """What any party answers to what it holds."""

    held: Held | None


class _Wanted(msgspec.Struct):
    """What any party answers to what it wants."""

    manifest: Manifest | None


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """How the parties move bytes; the same for all.

    Attributes:
        transport: how packets travel.
        staging_bytes: the most that all packets of one party take.
        sources: number of source parties.
        direct_bytes: the least that travels unpacked, where a transport can.
    """

    transport: TransportName
    staging_bytes: int
    sources: int
    direct_bytes: int = DEFAULT_TERMS.direct_bytes


class _Common:
    """Steps of both sides.

    Attributes:
        staging: memory of this party's packets.
        seconds: what the parts of the last version took; see :class:`Moved`.
    """

    def __init__(self, assembly: Assembly, options: LinkOptions, device: str) -> None:
        self._assembly, self._options, self._device = assembly, options, device
        self._plan: Plan | None = None
        self._terms: dict[Link, Terms] = {}
        self.staging = StagingPool(options.staging_bytes)
        self.seconds: dict[str, float] = {}

    @property
    def plan(self) -> Plan:
        """The plan that all parties follow.

        Raises:
            PartyFailedError: before :meth:`prepare` has succeeded.
        """
        if self._plan is None:
            raise PartyFailedError(f"{self._assembly.name} has no plan; prepare() has not succeeded")
        return self._plan

    def _agree(self, held: Callable[[], Held | None], wanted: Callable[[Model], Manifest | None]) -> None:
        """Exchanges manifests; every party plans and proves alone, and all compare."""
        parts = self._assembly.gather("describing the trainer's weights", _Held, lambda: _Held(held()))
        sources = [part.held for part in parts if part.held is not None]
        tensors = agree_on_tensors(sources[0].shapes, [part.manifest for part in sources])
        model = Model(sources[0].config, tensors)
        answers = self._assembly.gather("recording the engine's layout", _Wanted, lambda: _Wanted(wanted(model)))
        destinations = [answer.manifest for answer in answers if answer.manifest is not None]
        manifests = [part.manifest for part in sources]
        options = PlanOptions(
            staging_bytes=self._options.staging_bytes // 2, allow_narrowing=sources[0].allow_narrowing
        )

        def plan() -> str:
            self._plan = make_plan(tensors, manifests, destinations, options)
            prove(self._plan, manifests, destinations, options)
            return self._plan.digest

        digests = self._assembly.gather("planning", str, plan)
        differing = [party for party, digest in enumerate(digests) if digest != digests[0]]
        if differing:
            raise PlanMismatchError(
                f"parties {differing[:8]} computed another plan than party 0; do all run the same version of this "
                "package?"
            )

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - started

    def _place(self) -> Place:
        return Place(
            party=self._assembly.party,
            sources=self._options.sources,
            host=self._assembly.local_host,
            device=self._device,
            pool=self.staging,
            timeout_s=self._assembly.timeout_s,
        )

    def _links(self) -> list[Link]:
        """The links of this party."""
        rank = self._assembly.party
        if rank < self._options.sources:
            return [link for link in links_of(self.plan) if link[0] == rank]
        return [link for link in links_of(self.plan) if link[1] == rank - self._options.sources]

    def _slot_bytes(self) -> int:
        """The largest slots that this party can have. Where packets leave a GPU through the host, one more is used."""
        return slot_bytes(self._options.staging_bytes, len(self._links()), extra=int(self._device != "cpu"))

    def _exchange_offers(self, own: Callable[[], Offer]) -> tuple[list[Offer], dict[Link, Terms]]:
        """Everybody's offers, and what follows from them for each link of this party."""
        offers = self._assembly.gather("listening", Offer, own)
        sources = self._options.sources
        total: dict[Link, int] = defaultdict(int)
        for item in self.plan.transfers:
            total[item.source, item.destination] += item.nbytes
        # Where some storages are on the host and others on GPUs, no transport moves all of them as they lie.
        alike = len({offer.memory for offer in offers}) == 1
        terms = {}
        for link in self._links():
            source, destination = offers[link[0]], offers[sources + link[1]]
            terms[link] = Terms(
                packet_bytes=min(source.slot_bytes, destination.slot_bytes, useful_bytes(total[link])),
                reach=Reach(min(source.reach, destination.reach)) if alike else Reach.NONE,
                hidden=frozenset(source.hidden),
                direct_bytes=self._options.direct_bytes,
            )
        return offers, terms

    def _make_links[End: (SendingEnd, ReceivingEnd)](
        self, make: Callable[[Place, Transport], End], offer_of: Callable[[End], Offer], side: int
    ) -> End:
        """Makes all links of this party, together with all others; ``side`` is where links name the peer."""
        made: list[End] = []

        offers: list[Offer] = []

        def offer() -> Offer:
            place = self._place()
            made.append(make(place, open_transport(self._options.transport, place)))
            return offer_of(made[0])

        def connect() -> None:
            slots = {link[side]: terms.packet_bytes or 0 for link, terms in self._terms.items()}
            made[0].connect(offers, slots, self.plan.digest, self._assembly.check)

        try:
            found, self._terms = self._exchange_offers(offer)
            offers.extend(found)
            self._assembly.gather("linking", type(None), connect)
        except BaseException:
            for end in made:
                end.close()
            raise
        return made[0]


def _of_all(moved: Sequence[Moved], sources: int) -> Moved:
    destinations = moved[sources:]
    parts = {part for item in destinations for part in item.seconds}
    longest = {part: max(item.seconds.get(part, 0.0) for item in destinations) for part in sorted(parts)}
    return Moved(
        longest,
        max(item.staged_bytes for item in moved),
        max(item.beside_bytes for item in moved),
        max(item.backup_bytes for item in moved),
    )


def _commit_topic(version: int) -> str:
    return f"committing version {version}"


class SourceParty(_Common):
    """One trainer rank.

    Args:
        assembly: its place among the parties; its number is its rank as a source.
        options: how to move bytes.
        device: device of its storages: ``cpu``, or torch's name of a GPU.
    """

    def __init__(self, assembly: Assembly, options: LinkOptions, device: str = "cpu") -> None:
        super().__init__(assembly, options, device)
        self._end: SendingEnd | None = None
        self._sender: Sender | None = None

    def prepare(self, held: Callable[[], Held]) -> None:
        """Agrees on a plan with all parties.

        Args:
            held: describes what this rank holds.

        Raises:
            RefitError: on all parties, if any failed.
        """
        self._agree(held, lambda _: None)

    @property
    def linked(self) -> bool:
        """Whether links are up; if not, the next push makes them."""
        return self._end is not None

    def push(self, version: int, look_up: Callable[[], Memory]) -> Moved:
        """Sends one version; when this returns, every destination has verified it.

        Args:
            version: number of the weights.
            look_up: gives the storages of this rank's manifest, by name, as flat arrays or tensors of unsigned
                integers. It is called inside the step, so that its failure is everybody's at once.

        Returns:
            How it went for all.

        Raises:
            PartyFailedError: on all parties, if any failed.
        """
        try:
            end = self._linked(look_up)

            def send() -> Moved:
                with self._timed("look_up"):
                    memory = look_up()
                    sender = self._ready(memory)
                with closing(sender), self._timed("move"):
                    end.begin(memory, self._assembly.check)
                    send_version(sender, end, version, self._assembly.check)
                return Moved(self.seconds, self.staging.peak_bytes)

            moved = self._assembly.gather(f"sending version {version}", Moved, send)
            return _of_all(moved, self._options.sources)
        except BaseException:
            # Packets of the failed version may still be on their way; the next one takes fresh links.
            self._unlink()
            raise

    def collect_commits(self, version: int, destinations: int, timeout_s: float) -> list[str]:
        """Why workers have not committed a version; nothing where all have.

        Args:
            version: number of the weights.
            destinations: number of workers.
            timeout_s: seconds to wait for them.
        """
        parties = range(self._options.sources, self._options.sources + destinations)
        found = self._assembly.collect(_commit_topic(version), parties, timeout_s)
        reasons = {
            f"engine worker {party - self._options.sources}: {reason}"
            for party, reason in found.items()
            if reason is not None
        }
        return sorted(reasons)

    def close(self) -> None:
        """Leaves."""
        self._unlink()
        self._assembly.close()

    def _linked(self, look_up: Callable[[], Memory]) -> SendingEnd:
        if self._end is None:
            self._end = self._make_links(SendingEnd, lambda end: end.offer(self._slot_bytes(), look_up()), 1)
        return self._end

    def _ready(self, memory: Memory) -> Sender:
        """What packs; it lasts as long as the links do, whose terms it follows."""
        if self._sender is None:
            self._sender = Sender(self.plan, self._assembly.party, memory, self._terms, self.staging)
        else:
            self._sender.renew(memory)
        return self._sender

    def _unlink(self) -> None:
        self._sender = None
        end, self._end = self._end, None
        if end is not None:
            end.close()


class DestinationParty(_Common):
    """One engine worker.

    Args:
        assembly: its place among the parties; its number less ``options.sources`` is its rank as a destination.
        options: how to move bytes.
        device: device of its storages: ``cpu``, or torch's name of a GPU.

    Attributes:
        beside_bytes: see :class:`Moved`; set by whoever makes the memory.
        backup_bytes: likewise.
    """

    beside_bytes = 0
    backup_bytes = 0

    def __init__(self, assembly: Assembly, options: LinkOptions, device: str = "cpu") -> None:
        super().__init__(assembly, options, device)
        self.rank = assembly.party - options.sources
        self._end: ReceivingEnd | None = None
        self._manifest: Manifest | None = None
        self._unpacker: Unpacker | None = None

    def prepare(self, wanted: Callable[[Model], Manifest]) -> Manifest:
        """Agrees on a plan with all parties.

        Args:
            wanted: describes, given the model, what this worker wants and where.

        Returns:
            What ``wanted`` gave.

        Raises:
            RefitError: on all parties, if any failed.
        """
        found: list[Manifest] = []

        def record(model: Model) -> Manifest:
            found.append(wanted(model))
            return found[0]

        self._agree(lambda: None, record)
        self._manifest = found[0]
        return found[0]

    def receive(self, version: int, step: int, linked: bool, make_memory: Callable[[], Memory]) -> Memory:
        """Receives one version into fresh memory and compares every box with what was sent.

        Args:
            version: number of the weights.
            step: number of the step at which the sources are; this party may have missed one that failed.
            linked: whether the sources' links are up.
            make_memory: makes the storages of the manifest; called before the first byte comes.

        Returns:
            The memory.

        Raises:
            PartyFailedError: on all parties, if any failed.
        """
        self._assembly.next_step = step
        if not linked:
            self._unlink()
        try:
            end, manifest = self._linked(), self._manifest
            if manifest is None:
                raise PartyFailedError(f"{self._assembly.name} has no plan; prepare() has not succeeded")
            received: list[Memory] = []

            def take() -> Moved:
                with self._timed("allocate"):
                    memory = make_memory()
                if self._unpacker is None:
                    self._unpacker = Unpacker(self.plan, manifest, self._terms, self.staging)
                unpacker = self._unpacker
                unpacker.begin(version, memory)
                with closing(unpacker):
                    with self._timed("move"):
                        receive_version(unpacker, end, self._assembly.timeout_s, self._assembly.check)
                    with self._timed("verify"):
                        unpacker.verify()
                received.append(memory)
                return Moved(self.seconds, self.staging.peak_bytes, self.beside_bytes, self.backup_bytes)

            self._assembly.gather(f"sending version {version}", Moved, take)
            return received[0]
        except BaseException:
            self._unlink()
            raise

    def post_commit(self, version: int, reason: str | None) -> None:
        """Tells the sources how a commit went; ``reason`` is why it failed, or None."""
        self._assembly.post(_commit_topic(version), reason)

    def close(self) -> None:
        """Leaves."""
        self._unlink()
        self._assembly.close()

    def _linked(self) -> ReceivingEnd:
        if self._end is None:
            self._end = self._make_links(ReceivingEnd, lambda end: end.offer(self._slot_bytes()), 0)
        return self._end

    def _unlink(self) -> None:
        self._unpacker = None
        end, self._end = self._end, None
        if end is not None:
            end.close()
