"""Every message that trainer ranks and engine workers exchange at a rendezvous, and the states of a subscription.

Links have a few short messages of their own (``transports/messages.py``). The trainer's calls to an engine are in
``vllm/refit_call.py``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec

from megatron_patches.refit.layout.boxes import TensorSpec
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.planning.layouts import Layout, Region
from megatron_patches.refit.planning.tensors import TensorGrid, unfold_tensors
from megatron_patches.refit.planning.transfers import Request

logger = logging.getLogger(__name__)


class Step(StrEnum):
    """Steps of all parties, in order. The registry (``parties/registry.py``) computes an answer for each party."""

    DESCRIBING = "describing the trainer's weights"
    RECORDING = "recording the engine's layout"
    PLANNING = "planning"
    CHECKING = "checking requests"
    CHOOSING = "choosing a transport"
    LISTENING = "listening"
    LINKING = "linking"
    SENDING = "sending version"
    """A version's number follows this name."""


class State(StrEnum):
    """Where a subscription stands, on either side.

    joining -> ready -> sending -> committing -> ready -> ... -> closed. From any state it may become failed. A version
    that does not arrive or is not committed leaves it ready if its workers are still there.
    """

    JOINING = "joining"
    """The engine's workers join, describe what they want and agree on a plan."""
    READY = "ready"
    """Nothing is under way."""
    SENDING = "sending"
    """A version is on its way. The weights must not change."""
    COMMITTING = "committing"
    """The workers have verified a version, and make it serve."""
    FAILED = "failed"
    """The workers have left, or joining failed. Only a new subscription can serve the engine again."""
    CLOSED = "closed"
    """The trainer has ended it."""


NEXT: Mapping[State, frozenset[State]] = {
    State.JOINING: frozenset({State.READY, State.FAILED, State.CLOSED}),
    # Ready again: a worker was asked to commit a version that it has given up.
    State.READY: frozenset({State.READY, State.SENDING, State.FAILED, State.CLOSED}),
    State.SENDING: frozenset({State.COMMITTING, State.READY, State.FAILED, State.CLOSED}),
    # Sending: others did not take the version, and the next one comes.
    State.COMMITTING: frozenset({State.READY, State.SENDING, State.FAILED, State.CLOSED}),
    # Sending: to workers that have left, which fails.
    State.FAILED: frozenset({State.FAILED, State.SENDING, State.CLOSED}),
    State.CLOSED: frozenset({State.CLOSED}),
}
"""The states that may follow each state."""


@dataclass(frozen=True)
class Standing:
    """The current state of a subscription.

    Attributes:
        state: its state.
        version: number of the version under way, or of the last one that serves; -1 if there is none.
        seconds: how long it has been in this state.
        waits_for: whom it waits for, as far as this process knows; empty if for nobody.
    """

    state: State
    version: int
    seconds: float
    waits_for: tuple[str, ...] = ()


class StateLog:
    """The state of one subscription in one process. Each change is logged once. Any thread may use it.

    Args:
        who: the other side, for the log.
        level: of the log.

    Attributes:
        lasted: seconds that each state lasted, since the last version was begun.
    """

    def __init__(self, who: str, level: int) -> None:
        self._who, self._level = who, level
        self._lock = threading.Lock()
        self._state, self._version, self._since = State.JOINING, -1, time.monotonic()
        self.lasted: dict[State, float] = {}

    def enter(self, state: State, version: int | None = None, reason: str = "") -> None:
        """Changes the state.

        Args:
            state: the next state.
            version: number of the version that it is about; None for the same as before.
            reason: why, if something failed.

        Raises:
            RuntimeError: if this state may not follow the current one, which is a defect of this package.
        """
        now = time.monotonic()
        with self._lock:
            left, seconds = self._state, now - self._since
            if state not in NEXT[left]:
                raise RuntimeError(
                    f"internal error: the refit with {self._who} was {left} and cannot be {state} next "
                    f"({reason or f'version {self._version if version is None else version}'}); please report this"
                )
            self._state, self._since = state, now
            self._version = self._version if version is None else version
            if state is State.SENDING:
                self.lasted = {}
            else:
                self.lasted[left] = seconds
            told = f" version {self._version}" if self._version >= 0 else ""
        because = f": {reason}" if reason else ""
        logger.log(self._level, "refit: %s%s: %s for %.3f s, now %s%s", self._who, told, left, seconds, state, because)

    def standing(self, waits_for: Callable[[State], Sequence[str]]) -> Standing:
        """The current state.

        Args:
            waits_for: returns whom the subscription waits for in a state.
        """
        with self._lock:
            state, version, seconds = self._state, self._version, time.monotonic() - self._since
        return Standing(state, version, seconds, tuple(waits_for(state)))


@dataclass(frozen=True)
class Held:
    """What a source holds. Sources other than the first may leave everything but the manifest empty.

    Attributes:
        config: content of the model's ``config.json``.
        shapes: global shape of every tensor of the model, by Hugging Face name.
        manifest: this source's part.
        allow_narrowing: see :class:`megatron_patches.refit.planning.plan.PlanOptions`.
        partial: whether tensors that no source holds are left out of the model. Otherwise they are an error.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    manifest: Manifest
    allow_narrowing: bool = False
    partial: bool = False

    def tensors(self) -> list[TensorSpec]:
        """The tensors of the model, without dtypes, which only the holders know."""
        return [TensorSpec(name, tuple(shape), "") for name, shape in self.shapes.items()]


class Registered(msgspec.Struct, frozen=True):
    """:class:`Held` in compact form: a source's part in the step :attr:`Step.DESCRIBING`. Destinations have none.

    Attributes:
        rank: rank of the source.
        host: name of its machine.
        config: content of the model's ``config.json``.
        tensors: every tensor of the model, without types.
        layout: this source's part.
        allow_narrowing: see :class:`megatron_patches.refit.planning.plan.PlanOptions`.
        partial: see :class:`Held`.
    """

    rank: int
    host: str
    config: dict[str, Any]
    tensors: tuple[TensorGrid, ...]
    layout: Layout
    allow_narrowing: bool
    partial: bool = False


class Model(msgspec.Struct, frozen=True, dict=True):
    """The model, as the registry tells all parties.

    Attributes:
        config: content of its ``config.json``.
        grids: its tensors in compact form, with the trainer's element types.
        allow_narrowing: see :class:`megatron_patches.refit.planning.plan.PlanOptions`.
    """

    config: dict[str, Any]
    grids: tuple[TensorGrid, ...]
    allow_narrowing: bool = False

    @cached_property
    def tensors(self) -> Sequence[TensorSpec]:
        """Its tensors."""
        return unfold_tensors(self.grids)


class Wanted(msgspec.Struct, frozen=True):
    """A party's answer in the step :attr:`Step.RECORDING`.

    Attributes:
        regions: what it wants; none for a source.
        cannot_send: of a destination: why it could not send what it receives to another engine; empty if it could.
    """

    regions: tuple[Region, ...]
    cannot_send: str = ""


class Overlap(msgspec.Struct, frozen=True):
    """The sources that overlap what a destination wants.

    Attributes:
        layouts: distinct layouts, without the parts that do not overlap.
        holders: rank, host and index of the layout of each source.
    """

    layouts: list[Layout]
    holders: list[tuple[int, str, int]]


class Asked[R: (list[Request], msgspec.Raw)](msgspec.Struct, frozen=True):
    """What a destination requests of each source, by rank, and the digest of its plan.

    The registry forwards the requests without decoding them: the source checks them.
    """

    requests: dict[int, R]
    digest: str


class Orders[R: (list[Request], msgspec.Raw)](msgspec.Struct, frozen=True):
    """What is requested of a source, by destination rank; digest of the plans of all destinations."""

    requests: list[tuple[int, R]]
    digest: str


class Moved(msgspec.Struct, frozen=True):
    """How one party moved a version, or all parties together.

    Attributes:
        seconds: time of each part; for all parties, the longest of any. A source has ``look_up`` (of its storages). A
            destination has ``move`` (packing, transfer and unpacking, which overlap), ``allocate`` before it and
            ``verify`` after it.
        staged_bytes: peak memory of packets; for all parties, the highest of any.
        beside_bytes: memory that a destination allocated for the version beside the one served; as above.
        backup_bytes: host memory in which a destination keeps the version served; as above.
        bytes_by_source: bytes that a source sent; for all parties, in order of the sources.
    """

    seconds: dict[str, float]
    staged_bytes: int
    beside_bytes: int = 0
    backup_bytes: int = 0
    bytes_by_source: tuple[int, ...] = ()


def longest_parts(moved: Sequence[Moved]) -> dict[str, float]:
    """The longest time of each part, in seconds."""
    parts = sorted({part for item in moved for part in item.seconds})
    return {part: max(item.seconds.get(part, 0.0) for item in moved) for part in parts}


def moved_by_all(moved: Sequence[Moved], sources: int) -> Moved:
    """How all parties moved a version.

    Args:
        moved: of each party, sources first.
        sources: number of sources.
    """
    destinations = moved[sources:]
    looked_up = max(item.seconds.get("look_up", 0.0) for item in moved[:sources])
    return Moved(
        seconds={"look_up": looked_up, **longest_parts(destinations)},
        staged_bytes=max(item.staged_bytes for item in moved),
        beside_bytes=max(item.beside_bytes for item in moved),
        backup_bytes=max(item.backup_bytes for item in moved),
        bytes_by_source=tuple(nbytes for item in moved[:sources] for nbytes in item.bytes_by_source),
    )


def commit_topic(version: int) -> str:
    """Topic under which workers post the results of their commits."""
    return f"committing version {version}"


def served_topic(version: int) -> str:
    """Topic under which the first rank posts how an engine's commit of a version went."""
    return f"serving version {version}"


class Join(msgspec.Struct, tag=True):
    """A party introduces itself."""

    party: int
    name: str


class Outcome(msgspec.Struct, tag=True):
    """The result of a party's part of a step.

    Attributes:
        step: number of the step.
        what: its name.
        payload: the part, encoded.
        reason: why it failed; None if it did not.
        passed_on: whether the reason is how it saw another party fail.
        digests_differ: whether it failed because what arrived differs from what was sent.
    """

    step: int
    what: str
    payload: bytes = b""
    reason: str | None = None
    passed_on: bool = False
    digests_differ: bool = False


class Answer(msgspec.Struct, tag=True):
    """What the registry answers a party at the end of a step."""

    step: int
    payload: bytes


class Failure(msgspec.Struct, tag=True):
    """A step has failed. ``digests_differ``: whether for any party because what arrived differs from what was sent."""

    step: int
    reasons: list[str]
    digests_differ: bool = False


class Alert(msgspec.Struct, tag=True):
    """A party has failed in a step that others are still working on."""

    step: int
    reason: str


class Notice(msgspec.Struct, tag=True):
    """A party's message outside of any step. An empty topic means that the party has disconnected."""

    topic: str
    party: int
    reason: str | None = None


class Rejection(msgspec.Struct, tag=True):
    """The party may not join."""

    reason: str


class Beat(msgspec.Struct, tag=True):
    """The rendezvous is alive."""


LONGEST_TIMEOUT_S = 3600.0
"""Longest timeout of a step, in seconds. An engine may answer no requests while it waits."""
BEAT_S = 1.0
"""Interval of the server's :class:`Beat`, in seconds."""
TICK_S = 0.2
"""Polling interval of waits on either side, in seconds."""

decode_of_party = msgspec.msgpack.Decoder(Join | Outcome | Notice).decode
decode_of_server = msgspec.msgpack.Decoder(Answer | Failure | Alert | Notice | Rejection | Beat).decode
encode = msgspec.msgpack.encode

_PREPARING = threading.Lock()


def decode[T](payload: bytes, kind: type[T]) -> T:
    """Decodes a part of a step, or an answer.

    msgspec prepares a type when it is first used, and crashes the process if another thread uses it meanwhile. Several
    engines join at once, so types are prepared by one thread at a time.

    Raises:
        msgspec.MsgspecError: if the payload is not of this kind.
    """
    with _PREPARING:
        decoder = msgspec.msgpack.Decoder(kind)
    return decoder.decode(payload)


@dataclass(frozen=True)
class Invitation:
    """What a party needs to know to join.

    Attributes:
        host: address that the server listens on.
        port: its port.
        token: the server's public key as 64 hexadecimal digits. Secret nevertheless: anyone who has it may join.
        timeout_s: seconds that a step may take after its first party has finished.
    """

    host: str
    port: int
    token: str
    timeout_s: float


def endpoint(host: str, port: int | str) -> str:
    """The zmq endpoint of a port at an IPv4 or IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
