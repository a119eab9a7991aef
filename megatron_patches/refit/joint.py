"""What trainer ranks and engine workers do together, each party in its own process: plan once, then move versions.

Parties are numbered sources first. All take the same steps of one :class:`Assembly`, so a failure anywhere is
everybody's, with its reason; see there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from megatron_patches.refit.boxes import TensorSpec
from megatron_patches.refit.errors import PartyFailedError, PlanMismatchError
from megatron_patches.refit.manifest import Manifest, agree_on_tensors
from megatron_patches.refit.packets import Memory, Sender, Unpacker
from megatron_patches.refit.plan import Plan, PlanOptions, make_plan
from megatron_patches.refit.proof import prove
from megatron_patches.refit.rendezvous import Assembly
from megatron_patches.refit.transports.base import ReceivingEnd, SendingEnd, TransportName
from megatron_patches.refit.transports.sockets import SocketReceiver, SocketSender


class Held(msgspec.Struct, frozen=True):
    """What a source holds.

    Attributes:
        config: content of the model's ``config.json``.
        shapes: global shape of every tensor of the model, by Hugging Face name.
        manifest: its own part.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    manifest: Manifest


@dataclass(frozen=True)
class Model:
    """What destinations are told of the model.

    Attributes:
        config: content of its ``config.json``.
        tensors: its tensors, with the trainer's element types.
    """

    config: Mapping[str, Any]
    tensors: Sequence[TensorSpec]


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
        staging_bytes: half of it is the most that a party sends, or receives, in one round; two may be under way.
        sources: number of source parties.
        host: address that this party listens on, for TCP.
    """

    transport: TransportName
    staging_bytes: int
    sources: int
    host: str = "127.0.0.1"


class _Common:
    """Steps of both sides."""

    def __init__(self, assembly: Assembly, options: LinkOptions) -> None:
        self._assembly, self._options = assembly, options
        self._plan: Plan | None = None

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
        options = PlanOptions(staging_bytes=self._options.staging_bytes // 2)

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

    def _addresses(self, own: Callable[[], str]) -> dict[int, str]:
        addresses = self._assembly.gather("listening", str, own)
        return dict(enumerate(addresses[self._options.sources :]))


def _commit_topic(version: int) -> str:
    return f"committing version {version}"


class SourceParty(_Common):
    """One trainer rank.

    Args:
        assembly: its place among the parties; its number is its rank as a source.
        options: how to move bytes.
    """

    def __init__(self, assembly: Assembly, options: LinkOptions) -> None:
        super().__init__(assembly, options)
        self._link: SendingEnd | None = None

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
        return self._link is not None

    def push(self, version: int, look_up: Callable[[], Memory]) -> None:
        """Sends one version; when this returns, every destination has verified it.

        Args:
            version: number of the weights.
            look_up: gives the storages of this rank's manifest, by name, as flat arrays of unsigned integers. It is
                called inside the step, so that its failure is everybody's at once.

        Raises:
            PartyFailedError: on all parties, if any failed.
        """
        try:
            link = self._linked()

            def send() -> None:
                sender = Sender(self.plan, self._assembly.party, look_up())
                for number in range(self.plan.rounds):
                    for packet in sender.pack(number, version):
                        link.send(packet, self._assembly.check)

            self._assembly.gather(f"sending version {version}", type(None), send)
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

    def _linked(self) -> SendingEnd:
        if self._link is None:
            addresses = self._addresses(lambda: "")

            def dial() -> None:
                self._link = SocketSender(
                    self._options.transport,
                    self._assembly.party,
                    self.plan,
                    addresses,
                    self._assembly.timeout_s,
                    self._assembly.check,
                )

            self._assembly.gather("linking", type(None), dial)
        if self._link is None:
            raise PartyFailedError(f"{self._assembly.name} has no links")
        return self._link

    def _unlink(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()


class DestinationParty(_Common):
    """One engine worker.

    Args:
        assembly: its place among the parties; its number less ``options.sources`` is its rank as a destination.
        options: how to move bytes.
    """

    def __init__(self, assembly: Assembly, options: LinkOptions) -> None:
        super().__init__(assembly, options)
        self.rank = assembly.party - options.sources
        self._link: ReceivingEnd | None = None
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
        self._unpacker = Unpacker(self.plan, found[0])
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
            link, unpacker = self._linked(), self._unpacker
            if unpacker is None:
                raise PartyFailedError(f"{self._assembly.name} has no plan; prepare() has not succeeded")
            received: list[Memory] = []

            def take() -> None:
                memory = make_memory()
                unpacker.begin(version, memory)
                for _, source in unpacker.expected:
                    with link.receive(source, self._assembly.check) as packet:
                        unpacker.accept(packet)
                unpacker.verify()
                received.append(memory)

            self._assembly.gather(f"sending version {version}", type(None), take)
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
        if self._link is None:
            made: list[SocketReceiver] = []

            def listen() -> str:
                made.append(SocketReceiver(self._options.transport, self._options.host, self._assembly.timeout_s))
                return made[0].address

            try:
                self._addresses(listen)
                mine = sorted({item.source for item in self.plan.transfers if item.destination == self.rank})
                self._assembly.gather(
                    "linking",
                    type(None),
                    lambda: made[0].accept(mine, self.plan.digest, self._assembly.check),
                )
            except BaseException:
                for receiver in made:
                    receiver.close()
                raise
            self._link = made[0]
        return self._link

    def _unlink(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
