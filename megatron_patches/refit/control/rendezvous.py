"""The server at which trainer ranks and engine workers meet; all parties take the same steps together.

In each step, every party does its part and reports the outcome. Once all have reported, each party receives all
outcomes. If any part fails, the step fails for all parties, with every reason. A party whose part depends on another's
learns of the failure at once (:meth:`megatron_patches.refit.control.assembly.Assembly.check`). A party that disconnects
or misses the timeout has failed. So a step succeeds for all or raises for all, and no party waits for ever.

Messages travel over zmq, encrypted with CURVE (RFC 26 of ZeroMQ). The server's key is generated for one session and
appears only in its invitation. A client without the key fails libzmq's handshake, and can neither read nor send
messages.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message
from zmq.utils.z85 import decode as raw_key

from megatron_patches.refit.control.messages import (
    BEAT_S,
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
    decode_of_party,
    encode,
    endpoint,
)
from megatron_patches.refit.errors import PartyFailedError, RefitError, first_of

logger = logging.getLogger(__name__)

_AFTER_FAILURE_S = 10.0  # timeout for the remaining parties once a step has failed
_REMEMBERED = 4  # steps kept for late parties
_CLOSING_S = 5.0  # for all parties to receive pending messages before the end
_HANDSHAKE_S = 5.0  # for a new connection to prove that it was invited
_ARRIVING_S = 3.0  # for a Join that was sent to be read here
_MOST_BYTES = 1 << 30  # largest message from a party
_PING_S = 1.0  # between libzmq's own heartbeats, which a process answers unless it is stopped


class _Member(NamedTuple):
    """A party that has joined: its name, its zmq address, and the file descriptor of its connection."""

    name: str
    address: bytes
    connection: int


class Rendezvous:
    """Serves the steps of ``parties`` parties, in a thread of its own, until :meth:`close`.

    Args:
        parties: how many will join, numbered from 0; :meth:`expect` may change it until the last of them has joined.
        timeout_s: seconds that a step may take after its first party has finished.
        answer: given a step's name and all parts, returns an answer for each party.
        host: address to listen on; other machines must reach it if parties run there.
        silence_s: seconds after which a party counts as gone whose process is stopped, or whose machine or network is
            lost.
        called: what to call a party that has not joined, given its number.

    Raises:
        PartyFailedError: if ``host`` is not an address of this machine.
    """

    def __init__(
        self,
        parties: int,
        timeout_s: float,
        answer: Callable[[str, list[bytes]], list[bytes]],
        host: str = "127.0.0.1",
        *,
        silence_s: float = 30.0,
        called: Callable[[int], str] = "party {}".format,
    ) -> None:
        self._size, self._answer, self._called = parties, answer, called
        self._ended = f"has ended or closed its connection, or said nothing for {silence_s:g} s"
        self._condition = threading.Condition()
        self._members: dict[int, _Member] = {}
        self._parties: dict[bytes, int] = {}  # by zmq address
        self._gone: dict[int, str] = {}
        self._given_up: str | None = None
        self._steps: dict[int, _Step] = {}
        self._open: set[int] = set()  # file descriptors of connections
        self._closed = False
        self._last: int | None = None  # whom to hear out before the end, until the deadline
        self._deadline = 0.0
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = round(_CLOSING_S * 1000)
        self._router.handshake_ivl = round(_HANDSHAKE_S * 1000)
        self._router.maxmsgsize = _MOST_BYTES
        self._router.heartbeat_ivl = round(_PING_S * 1000)
        self._router.heartbeat_timeout = round(silence_s * 1000)
        # Unlimited: one machine may send gigabytes to hundreds of parties, and zmq drops messages beyond a limit.
        self._router.sndhwm = 0
        public, self._router.curve_secretkey = zmq.curve_keypair()
        self._router.curve_server = True
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        # Whoever closes the server wakes the thread that waits for messages.
        self._bell = self._context.socket(zmq.PULL)
        self._bell.bind("inproc://bell")
        self._ringing = self._context.socket(zmq.PUSH)
        self._ringing.connect("inproc://bell")
        try:
            port = bind_free_port(self._router, host)
        except PartyFailedError:
            self._context.destroy(linger=0)
            raise
        self.invitation = Invitation(host, port, raw_key(public).hex(), timeout_s)
        self._thread = threading.Thread(target=self._serve, name="refit-rendezvous", daemon=True)
        self._thread.start()

    @property
    def awaited(self) -> list[str]:
        """Names of the parties that have not ended their part of a step that others have ended."""
        with self._condition:
            under_way = [step for step in self._steps.values() if not step.verdicts]
            late = {party for step in under_way for party in range(self._size) if party not in step.outcomes}
            return [self._name_of(party) for party in sorted(late)]

    def expect(self, parties: int) -> None:
        """Sets the number of parties. No step ends before all of them have taken part."""
        with self._condition:
            self._size = parties

    def give_up(self, reason: str) -> None:
        """Fails every step from now on, without waiting for parties that have not taken part in it."""
        with self._condition:
            self._given_up = reason

    def check_joined(self, parties: Iterable[int], who: str) -> None:
        """Raises unless all of ``parties`` have joined, even if they have left since.

        Args:
            parties: their numbers. All have reported that they joined; their messages may take a moment to arrive.
            who: name of the parties for the error message.

        Raises:
            RefitError: with the address that they must reach.
        """
        absent = set(parties)
        with self._condition:
            self._condition.wait_for(lambda: self._closed or absent <= self._members.keys(), _ARRIVING_S)
            absent -= self._members.keys()
        if absent:
            raise RefitError(
                f"{len(absent)} of the workers of {who} did not join; they must reach {self.invitation.host}:"
                f"{self.invitation.port}, so the option host must be an address of this machine that engines reach; "
                "the log there says what went wrong"
            )

    def close(self, after: int | None = None) -> None:
        """Stops the server once parties have received pending messages or a timeout passed; waiting parties fail.

        Args:
            after: a party that leaves now: what it said before is passed on. None if nobody may still say anything.
        """
        self._last, self._deadline = after, time.monotonic() + _CLOSING_S
        self._closed = True
        with self._condition:
            self._condition.notify_all()
            if not self._ringing.closed:
                self._ringing.send(b"")
        self._thread.join()

    @property
    def _has_ended(self) -> bool:
        """Whether it was closed and has heard all that the last party said."""
        if not self._closed:
            return False
        return self._last is None or self._last in self._gone or time.monotonic() > self._deadline

    def _serve(self) -> None:
        """Runs until :meth:`close`. Only this thread uses the sockets."""
        poller = zmq.Poller()
        for each in (self._router, self._monitor, self._bell):
            poller.register(each, zmq.POLLIN)
        said = time.monotonic()
        try:
            while not self._has_ended:
                poller.poll(round(TICK_S * 1000))
                if self._bell.poll(0):
                    self._bell.recv()
                with self._condition:
                    self._take_what_came()
                    self._end_late_steps()
                    if time.monotonic() - said > BEAT_S:
                        said = time.monotonic()
                        self._tell_all(Beat())
        finally:
            with self._condition:
                self._ringing.close()
            self._context.destroy()  # blocks until all messages are sent or the linger time has passed

    def _take_what_came(self) -> None:
        """Handles messages before disconnects, so that what a party sent before its connection ended counts."""
        closed = self._closed_connections()
        ended = self._ended_members(closed)
        while self._router.poll(0):
            address, *frames = self._router.recv_multipart(copy=False)
            party = self._parties.get(address.bytes)
            try:
                message = decode_of_party(frames[-1].buffer)
            except msgspec.MsgspecError as error:
                if party is not None:
                    ended[party] = f"said what is no message ({error}); do all run the same version of this package?"
                continue
            if isinstance(message, Join):
                connection = frames[-1].get(zmq.SRCFD)
                # What is known of this descriptor's former connection by now must not count against the new party.
                closed |= (meanwhile := self._closed_connections())
                ended |= self._ended_members(meanwhile)
                self._admit(message, address.bytes, connection)
                if connection in closed - self._open:
                    ended[message.party] = self._ended
            elif party is not None and isinstance(message, Outcome):
                self._report(party, message)
            elif party is not None:
                self._tell_all(Notice(message.topic, party, message.reason))
        for party, how in ended.items():
            if party in self._members and party not in self._gone:
                self._leave(party, how)

    def _ended_members(self, closed: set[int]) -> dict[int, str]:
        """Parties whose connections are among those that have ended, and how they ended."""
        return {party: self._ended for party, member in self._members.items() if member.connection in closed}

    def _closed_connections(self) -> set[int]:
        """File descriptors of connections that have ended since the last call. The numbers may be reused."""
        closed: set[int] = set()
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open.add(event["value"])
            else:
                self._open.discard(event["value"])
                closed.add(event["value"])
        return closed

    def _admit(self, joined: Join, address: bytes, connection: int) -> None:
        if joined.party in self._members or not 0 <= joined.party < self._size:
            logger.warning("refit: refused %s: there is no free place %d", joined.name, joined.party)
            self._router.send_multipart([address, encode(Rejection(f"there is no free place {joined.party}"))])
            return
        self._members[joined.party] = _Member(joined.name, address, connection)
        self._parties[address] = joined.party
        self._condition.notify_all()
        self._catch_up(joined.party)

    def _catch_up(self, party: int) -> None:
        """Sends a new party the verdicts and alerts from before it joined."""
        for number, step in self._steps.items():
            if step.verdicts:
                self._tell(party, step.verdict_of(party))
            elif step.failed:
                reason = next(item.reason for item in step.outcomes.values() if item.reason is not None)
                self._tell(party, Alert(number, reason))

    def _leave(self, party: int, how: str) -> None:
        self._gone[party] = f"{self._members[party].name} {how}"
        logger.debug("refit: %s", self._gone[party])
        self._tell_all(Notice("", party, self._gone[party]))
        for number, step in list(self._steps.items()):
            if party not in step.outcomes:
                step.outcomes[party] = Outcome(number, step.what, reason=self._gone[party])
                step.fail()
                self._tell_all(Alert(number, self._gone[party]))
                self._settle(number)

    def _report(self, party: int, outcome: Outcome) -> None:
        if outcome.step not in self._steps:
            self._steps[outcome.step] = _Step(outcome.what, time.monotonic() + self.invitation.timeout_s)
        step = self._steps[outcome.step]
        for gone, reason in self._gone.items():
            if gone not in step.outcomes:  # what it reported before it left counts
                step.outcomes[gone] = Outcome(outcome.step, step.what, reason=reason)
                step.fail()
        # A failure counts under any step name: an engine that could not be asked to take part reports it under its own.
        if step.what != outcome.what and outcome.reason is None and not step.failed:
            outcome.reason = (
                f"{self._members[party].name} is at step {outcome.what!r} while others are at {step.what!r}; "
                "do all run the same version of this package?"
            )
        before = step.outcomes.get(party)
        if before is None or before.reason is None:  # keep a failure that was already reported for this party
            step.outcomes[party] = outcome
        if outcome.reason is not None and not step.verdicts:
            step.fail()
            self._tell_all(Alert(outcome.step, outcome.reason))
        self._settle(outcome.step)

    def _settle(self, number: int) -> None:
        step = self._steps[number]
        if step.verdicts or (len(step.outcomes) < self._size and self._given_up is None):
            return
        reasons = step.reasons if self._given_up is None else [self._given_up]
        if not reasons:
            parts = [step.outcomes[party].payload for party in sorted(step.outcomes)]
            try:
                answers = self._answer(step.what, parts)
            except Exception as error:  # noqa: BLE001 - every party raises it; the server goes on
                reasons = [f"the registry: {type(error).__name__}: {error}"]
            else:
                step.verdicts = [Answer(number, answer) for answer in answers]
        if reasons:
            differ = any(outcome.digests_differ for outcome in step.outcomes.values())
            step.verdicts = [Failure(number, reasons, digests_differ=differ)]
        for party in self._members:
            self._tell(party, step.verdict_of(party))
        self._steps.pop(number - _REMEMBERED, None)

    def _end_late_steps(self) -> None:
        """Ends steps that some party has not answered in time."""
        for number, step in list(self._steps.items()):
            if self._given_up is not None:
                self._settle(number)
            if not step.verdicts and time.monotonic() > step.deadline:
                silent = sorted(set(range(self._size)) - step.outcomes.keys())
                # After a failure elsewhere, parties that are still working are no cause.
                reasons = [] if step.causes else [self._silence(party, step.what) for party in silent]
                known = first_of(reasons, "; ") or None
                step.outcomes |= {party: Outcome(number, step.what, reason=known) for party in silent}
                self._settle(number)

    def _silence(self, party: int, what: str) -> str:
        if party in self._members:
            return f"{self._members[party].name} gave no answer to {what!r} in time"
        here = f"{self.invitation.host}:{self.invitation.port}"
        return (
            f"{self._called(party)}, which never joined, gave no answer to {what!r} in time; it must reach {here}, and "
            "its log says why it did not join if it did"
        )

    def _name_of(self, party: int) -> str:
        return self._members[party].name if party in self._members else f"{self._called(party)}, which has not joined"

    def _tell_all(self, message: Answer | Failure | Alert | Notice | Beat) -> None:
        encoded = encode(message)
        for party in self._members:
            self._send(party, encoded)

    def _tell(self, party: int, message: Answer | Failure | Alert) -> None:
        self._send(party, encode(message))

    def _send(self, party: int, encoded: bytes) -> None:
        if party not in self._gone:
            self._router.send_multipart([self._members[party].address, encoded], copy=False)


class _Step:
    """A step that at least one party has answered."""

    def __init__(self, what: str, deadline: float) -> None:
        self.what, self.deadline = what, deadline
        self.outcomes: dict[int, Outcome] = {}
        self.verdicts: list[Answer] | list[Failure] = []  # one per party, or a failure of all
        self.failed = False

    def verdict_of(self, party: int) -> Answer | Failure:
        """The verdict for one party; the step must have ended."""
        return self.verdicts[party if len(self.verdicts) > 1 else 0]

    @property
    def causes(self) -> list[str]:
        """Why it fails, the earliest reason first; without those of parties that only saw another one fail."""
        return self._reasons(passed_on=False)

    @property
    def reasons(self) -> list[str]:
        """Its causes, or what parties saw of them if none is known."""
        return self.causes or self._reasons(passed_on=True)

    def _reasons(self, *, passed_on: bool) -> list[str]:
        found = [item.reason for item in self.outcomes.values() if item.passed_on is passed_on]
        return list(dict.fromkeys(reason for reason in found if reason is not None))

    def fail(self) -> None:
        """Marks the step as failed and shortens the wait for the other parties."""
        self.failed = True
        self.deadline = min(self.deadline, time.monotonic() + _AFTER_FAILURE_S)


def bind_free_port(server: zmq.Socket[bytes], host: str) -> int:
    """Listens on a free port of a local address, IPv4 or IPv6. Returns the port.

    Raises:
        PartyFailedError: if the address is not local.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        server.ipv6 = family is socket.AF_INET6
        server.bind(endpoint(str(address[0]), "*"))
    except (OSError, zmq.ZMQError) as error:
        raise PartyFailedError(
            f"cannot listen on {host} ({error.strerror or error}); host must be an address of this machine that "
            "engines reach"
        ) from error
    return int(server.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
