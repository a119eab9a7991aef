"""Where trainer ranks and engine workers meet: one process serves, all parties proceed in common steps.

In a step every party does its part and reports the outcome; when all have, each gets everybody's. If any part fails,
the step fails for all, with every reason; a party whose part depends on another's is told at once
(:meth:`Assembly.check`). A party that ends, or does not answer in time, has failed. So a step either succeeds for
all or raises for all, and none waits for ever.

Messages are msgpack over TCP. A common token keeps out who was not invited; it is not encryption.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from megatron_patches.refit import frames
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.exchange import describe_error
from megatron_patches.refit.frames import Patience

logger = logging.getLogger(__name__)

_TICK_S = 0.2
_GRACE_S = 5.0  # how much longer than the server a client waits for the server's verdict
_AFTER_FAILURE_S = 10.0  # for parties that have not answered yet once a step has failed
_REMEMBERED = 4  # steps that are kept for a party that is late
_TOPICS = 16  # on which notices are kept for whoever collects them
_TELLING_S = 30.0  # for a party to take a message; all others wait meanwhile
_INTRODUCTION_BYTES = 1 << 16  # the most that somebody may send who has not shown the token
_FOREVER_S = 10.0 * 365 * 86400


class _Join(msgspec.Struct, tag=True):
    """A party introduces itself."""

    token: str
    party: int
    name: str


class _Outcome(msgspec.Struct, tag=True):
    """What a party's part of a step came to."""

    step: int
    what: str
    payload: bytes = b""
    reason: str | None = None


class _Results(msgspec.Struct, tag=True):
    """All parts of a step, by party."""

    step: int
    payloads: list[bytes]


class _Failure(msgspec.Struct, tag=True):
    """A step has failed."""

    step: int
    reasons: list[str]


class _Alert(msgspec.Struct, tag=True):
    """A party has failed in a step that others are still at work in."""

    step: int
    reason: str


class _Notice(msgspec.Struct, tag=True):
    """What a party has to say outside of any step; with an empty topic, that it has ended."""

    topic: str
    party: int
    reason: str | None = None


_ToServer = msgspec.msgpack.Decoder(_Join | _Outcome | _Notice)
_ToParty = msgspec.msgpack.Decoder(_Results | _Failure | _Alert | _Notice)
_encode = msgspec.msgpack.encode


@dataclass(frozen=True)
class Invitation:
    """What a party needs to know to join.

    Attributes:
        host: address that the server listens on.
        port: its port.
        token: secret that all parties share.
        parties: how many there are.
        timeout_s: seconds that a step may take after its first party has finished.
    """

    host: str
    port: int
    token: str
    parties: int
    timeout_s: float


class Rendezvous:
    """Serves the steps of ``parties`` parties, in threads of its own, until :meth:`close`.

    Args:
        parties: how many will join, numbered from 0.
        timeout_s: seconds that a step may take after its first party has finished.
        host: address to listen on; other machines must reach it if parties run there.

    Raises:
        PartyFailedError: if the address is none of this machine.
    """

    def __init__(self, parties: int, timeout_s: float, host: str = "127.0.0.1") -> None:
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._connections: dict[int, socket.socket] = {}
        self._gone: dict[int, str] = {}
        self._steps: dict[int, _Step] = {}
        self._closed = False
        try:
            self._listener = socket.create_server((host, 0))
        except OSError as error:
            raise PartyFailedError(
                f"cannot listen on {host} ({error.strerror or error}); host must be an address of this machine that "
                "engines reach"
            ) from error
        self._listener.settimeout(_TICK_S)
        self.invitation = Invitation(host, self._listener.getsockname()[1], secrets.token_hex(16), parties, timeout_s)
        for target in (self._accept, self._watch):
            threading.Thread(target=target, name=f"refit-rendezvous-{target.__name__}", daemon=True).start()

    def close(self) -> None:
        """Ends it; parties that still wait are told so."""
        with self._lock:
            self._closed = True
            for connection in self._connections.values():
                frames.end(connection)
        frames.end(self._listener)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._closed:  # such as too many open files, which may pass
                    logger.warning("refit: cannot accept a connection: %s", error)
                    time.sleep(_TICK_S)
                continue
            frames.prepare(connection)
            threading.Thread(target=self._serve, args=(connection, peer), name="refit-party", daemon=True).start()

    def _serve(self, connection: socket.socket, peer: object) -> None:
        """One party, from its introduction to its end."""
        party: int | None = None
        try:
            joined = self._introduced(connection)
            if joined is None:
                logger.warning("refit: refused a connection from %s, which did not show the token", peer)
                return
            with self._lock:
                if self._closed:
                    return
                if joined.party in self._connections or not 0 <= joined.party < self.invitation.parties:
                    logger.warning("refit: refused %s: there is no free place %d", joined.name, joined.party)
                    return
                party = joined.party
                self._names[party], self._connections[party] = joined.name, connection
                self._catch_up(party)
            while True:
                message = _ToServer.decode(frames.receive(connection, Patience(_FOREVER_S, "a step")))
                with self._lock:
                    if isinstance(message, _Outcome):
                        self._report(party, message)
                    elif isinstance(message, _Notice):
                        self._tell_all(message)
        except Exception as error:  # noqa: BLE001 - whatever it was, nobody listens to this party any more
            if party is not None:
                with self._lock:
                    self._leave(party, error)
        finally:
            connection.close()

    def _introduced(self, connection: socket.socket) -> _Join | None:
        """Who it is, or None for whoever does not know the token."""
        patience = Patience(30, "a party's introduction")
        try:
            joined = _ToServer.decode(frames.receive(connection, patience, most_bytes=_INTRODUCTION_BYTES))
        except (PartyFailedError, msgspec.MsgspecError):
            return None
        if not isinstance(joined, _Join):
            return None
        known = hmac.compare_digest(joined.token.encode(), self.invitation.token.encode())
        return joined if known else None

    def _catch_up(self, party: int) -> None:
        """Tells a new party what others have been told before it came."""
        for number, step in self._steps.items():
            if step.verdict is not None:
                self._tell(party, _encode(step.verdict))
            elif step.failed:
                reason = next(item.reason for item in step.outcomes.values() if item.reason is not None)
                self._tell(party, _encode(_Alert(number, reason)))

    def _leave(self, party: int, error: Exception) -> None:
        if self._closed:
            return
        self._gone[party] = f"{self._names[party]} has ended or closed its connection"
        logger.debug("refit: %s (%s)", self._gone[party], error)
        self._tell_all(_Notice("", party, self._gone[party]))
        for number, step in list(self._steps.items()):
            if party not in step.outcomes:
                step.outcomes[party] = _Outcome(number, step.what, reason=self._gone[party])
                step.fail()
                self._tell_all(_Alert(number, self._gone[party]))
                self._settle(number)

    def _report(self, party: int, outcome: _Outcome) -> None:
        if outcome.step not in self._steps:
            self._steps[outcome.step] = _Step(outcome.what, time.monotonic() + self.invitation.timeout_s)
        step = self._steps[outcome.step]
        for gone, reason in self._gone.items():
            step.outcomes.setdefault(gone, _Outcome(outcome.step, step.what, reason=reason))
            step.fail()
        if step.what != outcome.what:
            outcome.reason = (
                f"{self._names[party]} is at step {outcome.what!r} while others are at {step.what!r}; "
                "do all run the same version of this package?"
            )
        before = step.outcomes.get(party)
        if before is None or before.reason is None:  # a failure that was reported for it already stands
            step.outcomes[party] = outcome
        if outcome.reason is not None and step.verdict is None:
            step.fail()
            self._tell_all(_Alert(outcome.step, outcome.reason))
        self._settle(outcome.step)

    def _settle(self, number: int) -> None:
        step = self._steps[number]
        if step.verdict is not None or len(step.outcomes) < self.invitation.parties:
            return
        reasons = list(dict.fromkeys(item.reason for item in step.outcomes.values() if item.reason is not None))
        if reasons:
            step.verdict = _Failure(number, reasons)
        else:
            step.verdict = _Results(number, [step.outcomes[party].payload for party in sorted(step.outcomes)])
        self._tell_all(step.verdict)
        self._steps.pop(number - _REMEMBERED, None)

    def _watch(self) -> None:
        """Ends steps that some party never answered."""
        while not self._closed:
            time.sleep(_TICK_S)
            with self._lock:
                for number, step in list(self._steps.items()):
                    if step.verdict is None and time.monotonic() > step.deadline:
                        for party in set(range(self.invitation.parties)) - set(step.outcomes):
                            reason = self._silence(party, step.what)
                            # Where somebody has failed, that others are still at work is no reason.
                            known = reason if not step.failed else None
                            step.outcomes[party] = _Outcome(number, step.what, reason=known)
                        self._settle(number)

    def _silence(self, party: int, what: str) -> str:
        if party in self._names:
            return f"{self._names[party]} gave no answer to {what!r} in time"
        here = f"{self.invitation.host}:{self.invitation.port}"
        return f"party {party}, which never joined, gave no answer to {what!r} in time; it must reach {here}"

    def _tell_all(self, message: _Results | _Failure | _Alert | _Notice) -> None:
        encoded = _encode(message)
        for party in self._connections:
            if party not in self._gone:
                self._tell(party, encoded)

    def _tell(self, party: int, encoded: bytes) -> None:
        try:
            frames.send(self._connections[party], encoded, Patience(_TELLING_S, self._names[party]))
        except PartyFailedError as error:
            logger.debug("refit: cannot reach %s: %s", self._names[party], error)
            # Part of the message may be on its way, after which it could read nothing more. Its own thread notices the
            # end of the connection and reports it.
            frames.end(self._connections[party])


class _Step:
    """A step that some party has answered."""

    def __init__(self, what: str, deadline: float) -> None:
        self.what, self.deadline = what, deadline
        self.outcomes: dict[int, _Outcome] = {}
        self.verdict: _Results | _Failure | None = None
        self.failed = False

    def fail(self) -> None:
        """Waits only a little longer for the others."""
        self.failed = True
        self.deadline = min(self.deadline, time.monotonic() + _AFTER_FAILURE_S)


class Assembly:
    """One party's place among all. Steps must be taken in the same order by all parties.

    Attributes:
        local_host: address of this machine from which it reached the rendezvous.
        next_step: number of the next step. A party that was not there for a step that failed sets it to the others'.

    Args:
        invitation: from :class:`Rendezvous`.
        party: the own number, from 0.
        name: for messages: "trainer rank 3 on host a".

    Raises:
        PartyFailedError: if the server cannot be reached within the time-out.
    """

    def __init__(self, invitation: Invitation, party: int, name: str) -> None:
        self.party, self.size, self.name = party, invitation.parties, name
        self.timeout_s = invitation.timeout_s
        self._condition = threading.Condition()
        self._answers: dict[int, _Results | _Failure] = {}
        self._alerts: dict[int, str] = {}
        self._notices: dict[str, dict[int, str | None]] = {}
        self._lost: str | None = None
        self.next_step = 0
        self._sending = threading.Lock()
        self._connection = frames.prepare(_connect(invitation))
        self.local_host: str = self._connection.getsockname()[0]
        self._send(_Join(invitation.token, party, name))
        threading.Thread(target=self._listen, name="refit-assembly", daemon=True).start()

    def gather[T](self, what: str, kind: type[T], work: Callable[[], T]) -> list[T]:
        """Does this party's part of the next step and waits for all others.

        Args:
            what: name of the step; the same for all parties.
            kind: type of every part, which msgspec can encode.
            work: this party's part.

        Returns:
            Everybody's parts, by party.

        Raises:
            PartyFailedError: on every party, if any failed; names each, with its reason. Its cause is the own error.
        """
        step, self.next_step = self.next_step, self.next_step + 1
        mine: Exception | None = None
        try:
            outcome = _Outcome(step, what, payload=_encode(work()))
        except Exception as error:  # noqa: BLE001 - reported to all parties, and raised below as the cause
            mine = error
            # A party that only passes on another's failure adds nothing to the reasons.
            known = self._alerts.get(step) if isinstance(error, PartyFailedError) else None
            reason = known or f"{self.name}: {type(error).__name__}: {describe_error(error)}"
            outcome = _Outcome(step, what, reason=reason)
        self._send(outcome)
        answer = self._answer(step, what)
        if isinstance(answer, _Failure):
            raise PartyFailedError(f"{what} failed: {'; '.join(answer.reasons)}") from mine
        return [msgspec.msgpack.decode(payload, type=kind) for payload in answer.payloads]

    def check(self) -> None:
        """Raises if another party has failed in the step that this one is at work in.

        Raises:
            PartyFailedError: with its reason.
        """
        step = self.next_step - 1
        reason, verdict = self._alerts.get(step), self._answers.get(step)
        if isinstance(verdict, _Failure):  # such as that this party has taken too long
            reason = "; ".join(verdict.reasons)
        if reason is not None or self._lost is not None:
            raise PartyFailedError(reason or f"{self.name} lost the rendezvous: {self._lost}")

    def fail(self, step: int, what: str, reason: str) -> None:
        """Fails a step from another thread than the one that takes it, even before that one has begun it.

        Args:
            step: its number, from :attr:`next_step`; if this party is further already, the step under way fails.
            what: its name.
            reason: why, for everybody.
        """
        self._send(_Outcome(max(step, self.next_step - 1), what, reason=reason))

    def post(self, topic: str, reason: str | None) -> None:
        """Tells all parties how something went that is no step: ``reason`` is why it failed, or None."""
        self._send(_Notice(topic, self.party, reason))

    def collect(self, topic: str, parties: Iterable[int], timeout_s: float) -> dict[int, str | None]:
        """Waits until each of ``parties`` has posted on ``topic`` or ended; one that does neither has failed.

        Returns:
            By party: why it failed, or None.
        """
        deadline = time.monotonic() + timeout_s
        wanted = set(parties)
        with self._condition:
            while True:
                found = self._notices.get("", {}) | self._notices.get(topic, {})
                if wanted <= set(found) or self._lost is not None or time.monotonic() > deadline:
                    break
                self._condition.wait(_TICK_S)
            self._notices.pop(topic, None)
        missing = self._lost or f"no answer within {timeout_s:g} s"
        return {party: found.get(party, missing) for party in wanted}

    def close(self) -> None:
        """Leaves; steps that others still take will fail, and so does what another thread of this party waits for."""
        frames.end(self._connection)

    def _send(self, message: _Join | _Outcome | _Notice) -> None:
        with self._sending:
            try:
                frames.send(self._connection, _encode(message), Patience(self.timeout_s, "the rendezvous"))
            except BaseException:
                frames.end(self._connection)  # after a part of a message the rendezvous could read nothing more
                raise

    def _answer(self, step: int, what: str) -> _Results | _Failure:
        deadline = time.monotonic() + self.timeout_s + _GRACE_S
        with self._condition:
            while step not in self._answers:
                if self._lost is not None:
                    raise PartyFailedError(f"{what}: {self.name} lost the rendezvous: {self._lost}")
                if time.monotonic() > deadline:
                    raise PartyFailedError(f"{what}: {self.name} got no answer from the rendezvous in time")
                self._condition.wait(_TICK_S)
            answer = self._answers.pop(step)
            for kept in (self._alerts, self._answers):  # of steps that this party has not taken as well
                for old in [number for number in kept if number <= step]:
                    del kept[old]
            return answer

    def _listen(self) -> None:
        try:
            while True:
                patience = Patience(_FOREVER_S, "the rendezvous")
                message = _ToParty.decode(frames.receive(self._connection, patience))
                with self._condition:
                    if isinstance(message, _Alert):
                        self._alerts.setdefault(message.step, message.reason)
                    elif isinstance(message, _Notice):
                        self._note(message)
                    else:
                        self._answers[message.step] = message
                    self._condition.notify_all()
        except Exception as error:  # noqa: BLE001 - whatever it was, nobody listens any more
            with self._condition:
                self._lost = describe_error(error)
                self._condition.notify_all()

    def _note(self, notice: _Notice) -> None:
        """Keeps a notice for :meth:`collect`, which most parties never call."""
        if notice.topic not in self._notices:
            topics = [topic for topic in self._notices if topic]
            for old in topics[: len(topics) - _TOPICS + 1]:
                del self._notices[old]
        self._notices.setdefault(notice.topic, {})[notice.party] = notice.reason


def _connect(invitation: Invitation) -> socket.socket:
    deadline = time.monotonic() + invitation.timeout_s
    while True:
        try:
            return socket.create_connection((invitation.host, invitation.port), timeout=5.0)
        except OSError as error:
            if time.monotonic() > deadline:
                raise PartyFailedError(
                    f"cannot reach the rendezvous at {invitation.host}:{invitation.port} within "
                    f"{invitation.timeout_s:.0f} s ({error.strerror or error}); the trainer's option host must be an "
                    "address of its machine that engines reach"
                ) from error
            time.sleep(_TICK_S)
