"""One party's client of the rendezvous: takes steps and receives the outcome of every party's part."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.control.messages import (
    TICK_S,
    Alert,
    Answer,
    Beat,
    Failure,
    Invitation,
    Join,
    Notice,
    Outcome,
    Rejection,
    decode,
    decode_of_server,
    encode,
    endpoint,
)
from megatron_patches.refit.errors import DigestError, PartyFailedError

_GRACE_S = 5.0  # how much longer than the server's timeout a client waits for a verdict
_LEAVING_S = 1.0  # for the rendezvous to receive this party's last message
_REFUSED_S = 2.0  # for the network path to the rendezvous to come up; the server listens before any party is invited
_UNREACHABLE_S = 10.0  # the same where the connection is not refused
_NEVER_MS = 24 * 3600 * 1000  # a party leaves as soon as its connection has ended
_TOPICS = 16  # for which notices are kept until collected


class Assembly:
    """A party's connection to the rendezvous. All parties must take steps in the same order.

    Attributes:
        local_host: address of this machine from which it reached the rendezvous.
        next_step: number of the next step. A party that missed a failed step sets it to the others' number.
        most_silence_s: seconds without a message after which this party takes the rendezvous for lost, because the
            server's process may hang; None for no limit.

    Args:
        invitation: from :class:`megatron_patches.refit.control.rendezvous.Rendezvous`.
        party: this party's number, from 0.
        name: for messages, such as "trainer rank 3 on host a".

    Raises:
        PartyFailedError: if the server cannot be reached within seconds, or does not listen.
    """

    def __init__(self, invitation: Invitation, party: int, name: str) -> None:
        self.party, self.name = party, name
        self.timeout_s = invitation.timeout_s
        self._condition = threading.Condition()
        self._answers: dict[int, Answer | Failure] = {}
        self._alerts: dict[int, str] = {}
        self._notices: dict[str, dict[int, str | None]] = {}
        self._lost: str | None = None
        self.next_step = 0
        self.most_silence_s: float | None = None
        self._heard = time.monotonic()
        self.local_host, server = _reach(invitation)
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.linger = round(_LEAVING_S * 1000)
        self._dealer.sndhwm = 0
        # The server would take a new connection for another party. -1 would drop what arrived just before the end.
        self._dealer.reconnect_ivl = _NEVER_MS
        self._dealer.ipv6 = ":" in server
        self._dealer.curve_serverkey = bytes.fromhex(invitation.token)
        self._dealer.curve_publickey, self._dealer.curve_secretkey = zmq.curve_keypair()
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        # zmq sockets are not thread-safe: other threads send through this queue to the one thread that uses the dealer.
        self._said = self._context.socket(zmq.PULL)
        self._said.bind("inproc://said")
        self._saying, self._sending = self._context.socket(zmq.PUSH), threading.Lock()
        self._saying.connect("inproc://said")
        self._dealer.connect(endpoint(server, invitation.port))
        self._dealer.send(encode(Join(party, name)))
        self._thread = threading.Thread(target=self._run, name="refit-assembly", daemon=True)
        self._thread.start()

    def exchange[A](self, what: str, kind: type[A], work: Callable[[], object]) -> A:
        """Does this party's part of the next step and waits for the answer that the rendezvous computes from all parts.

        Args:
            what: name of the step; the same for all parties.
            kind: type of the answer.
            work: this party's part; returns what msgspec can encode.

        Returns:
            The answer for this party.

        Raises:
            PartyFailedError: on every party if any failed, with all reasons, or if the rendezvous could not process the
                parts; its cause is this party's own error. On this party alone if it cannot decode the answer.
        """
        step, self.next_step = self.next_step, self.next_step + 1
        mine: Exception | None = None
        try:
            outcome = Outcome(step, what, payload=encode(work()))
        except Exception as error:  # noqa: BLE001 - reported to all parties, and raised below as the cause
            mine = error
            # A party that only passes on another's failure adds nothing to the reasons. It may have learned of it
            # through a link, before the rendezvous did.
            passed_on = isinstance(error, PartyFailedError)
            known = (self._alerts.get(step) or "; ".join(self.gone())) if passed_on else None
            reason = known or f"{self.name}: {type(error).__name__}: {describe_error(error)}"
            differ = isinstance(error, DigestError)
            outcome = Outcome(step, what, reason=reason, passed_on=passed_on, digests_differ=differ)
        try:
            self._send(outcome)
            answer = self._answer(step, what)
        except PartyFailedError as lost:
            raise lost from mine  # of which nobody has heard
        if isinstance(answer, Failure):
            reasons = "; ".join(answer.reasons)
            raise PartyFailedError(f"{what} failed: {reasons}", digests_differ=answer.digests_differ) from mine
        try:
            return decode(answer.payload, kind)
        except msgspec.MsgspecError as error:
            raise PartyFailedError(
                f"{what}: {self.name} cannot read what another party answered ({error}); do all run the same version "
                "of this package?"
            ) from error

    def check(self) -> None:
        """Raises if another party has failed in the step that this party is working on.

        Raises:
            PartyFailedError: with its reason.
        """
        step = self.next_step - 1
        reason, verdict = self._alerts.get(step), self._answers.get(step)
        if isinstance(verdict, Failure):  # for example because this party has taken too long
            reason = "; ".join(verdict.reasons)
        if reason is None and self._lost is None:
            reason = "; ".join(self.gone()) or None  # no step succeeds without them
        if reason is not None or self._lost is not None:
            raise PartyFailedError(reason or f"{self.name} lost the rendezvous: {self._lost}")
        self._check_heard()

    @property
    def is_lost(self) -> bool:
        """Whether the connection to the rendezvous has ended. Any thread may ask."""
        return self._lost is not None

    def gone(self, first: int = 0) -> list[str]:
        """A sentence for each party, from number ``first`` on, that has disconnected, during a step or not."""
        with self._condition:
            left = self._notices.get("", {}).items()
            return [reason for party, reason in left if reason is not None and party >= first]

    def fail(self, step: int, what: str, reason: str) -> None:
        """Fails a step from a thread other than the one that takes it, even before that thread has begun it.

        Args:
            step: its number, from :attr:`next_step`. If this party is already past it, the step under way fails.
            what: its name.
            reason: why, for all parties.
        """
        self._send(Outcome(max(step, self.next_step - 1), what, reason=reason))

    def post(self, topic: str, reason: str | None) -> None:
        """Reports an outcome outside of any step to all parties. ``reason`` is why it failed, or None on success."""
        self._send(Notice(topic, self.party, reason))

    def collect(self, topic: str, parties: Iterable[int], timeout_s: float) -> dict[int, str | None]:
        """Waits until each of ``parties`` has posted on ``topic`` or disconnected; one that does neither has failed.

        Returns:
            For each party, why it failed, or None.
        """
        deadline = time.monotonic() + timeout_s
        wanted = set(parties)
        with self._condition:
            while True:
                found = self._notices.get("", {}) | self._notices.get(topic, {})
                if wanted <= set(found) or self._lost is not None or time.monotonic() > deadline:
                    break
                self._condition.wait(TICK_S)
            self._notices.pop(topic, None)
        missing = self._lost or f"no answer within {timeout_s:g} s"
        return {party: found.get(party, missing) for party in wanted}

    def close(self) -> None:
        """Leaves the rendezvous. Other parties' steps fail, and so do waits in this party's other threads."""
        with self._sending:
            if not self._saying.closed:
                self._saying.send(b"")
        self._thread.join()

    def _send(self, message: Outcome | Notice) -> None:
        with self._sending:
            if self._saying.closed:
                raise PartyFailedError(f"{self.name} lost the rendezvous: {self._lost}")
            self._saying.send(encode(message))

    def _answer(self, step: int, what: str) -> Answer | Failure:
        deadline = time.monotonic() + self.timeout_s + _GRACE_S
        with self._condition:
            while step not in self._answers:
                if self._lost is not None:
                    raise PartyFailedError(f"{what}: {self.name} lost the rendezvous: {self._lost}")
                self._check_heard()
                if time.monotonic() > deadline:
                    raise PartyFailedError(f"{what}: {self.name} got no answer from the rendezvous in time")
                self._condition.wait(TICK_S)
            answer = self._answers.pop(step)
            for kept in (self._alerts, self._answers):  # also drop steps that this party has skipped
                for old in [number for number in kept if number <= step]:
                    del kept[old]
            return answer

    def _run(self) -> None:
        """Moves messages in both directions until the connection ends."""
        poller = zmq.Poller()
        for each in (self._dealer, self._monitor, self._said):
            poller.register(each, zmq.POLLIN)
        lost: str | None = None
        try:
            while lost is None:
                poller.poll()
                lost = self._pass_on()
        except Exception as error:  # noqa: BLE001 - whatever the error, nothing reads the sockets after it
            lost = describe_error(error)
        with self._sending:
            self._saying.close()
        with self._condition:
            self._lost = lost
            self._condition.notify_all()
        self._context.destroy()

    def _pass_on(self) -> str | None:
        """Moves pending messages in both directions. Returns why the connection ended, or None."""
        lost: str | None = None
        if self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            lost = "the connection has ended, or was refused"
        while self._dealer.poll(0):  # messages sent before the end count
            message = decode_of_server(self._dealer.recv())
            if isinstance(message, Rejection):
                return message.reason
            self._note(message)
        while lost is None and self._said.poll(0):
            said = self._said.recv()
            if not said:
                return f"{self.name} has left it"
            self._dealer.send(said, zmq.NOBLOCK)
        return lost

    def _note(self, message: Answer | Failure | Alert | Notice | Beat) -> None:
        self._heard = time.monotonic()
        with self._condition:
            if isinstance(message, Alert):
                self._alerts.setdefault(message.step, message.reason)
            elif isinstance(message, Notice):
                self._keep(message)
            elif not isinstance(message, Beat):
                self._answers[message.step] = message
            self._condition.notify_all()

    def _check_heard(self) -> None:
        silence_s = time.monotonic() - self._heard
        if self.most_silence_s is not None and silence_s > self.most_silence_s:
            raise PartyFailedError(
                f"{self.name} has heard nothing of the trainer's first rank for {silence_s:.0f} s, so it gives up what "
                "it was at"
            )

    def _keep(self, notice: Notice) -> None:
        """Keeps a notice for :meth:`collect`. Most parties never call it, so old topics are dropped."""
        if notice.topic not in self._notices:
            topics = [topic for topic in self._notices if topic]
            for old in topics[: len(topics) - _TOPICS + 1]:
                del self._notices[old]
        self._notices.setdefault(notice.topic, {})[notice.party] = notice.reason


def _reach(invitation: Invitation) -> tuple[str, str]:
    """The local and the remote address of a connection to the rendezvous.

    This tries a plain TCP connection first, because zmq does not report why it cannot connect, and the caller may be an
    engine that answers no requests while it waits.

    Raises:
        PartyFailedError: if the server cannot be reached within seconds; sooner if it refuses, as after its end.
    """
    began = time.monotonic()
    while True:
        try:
            with socket.create_connection((invitation.host, invitation.port), timeout=5.0) as connection:
                return connection.getsockname()[0], connection.getpeername()[0]
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            most_s = min(invitation.timeout_s, _REFUSED_S if refused else _UNREACHABLE_S)
            if time.monotonic() - began > most_s:
                raise PartyFailedError(
                    f"cannot reach the rendezvous at {invitation.host}:{invitation.port} within "
                    f"{most_s:.0f} s ({error.strerror or error}); the trainer's option host must be an "
                    "address of its machine that engines reach, and the trainer must not have given up meanwhile"
                ) from error
            time.sleep(TICK_S)
