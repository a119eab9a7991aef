"""The server at which trainer ranks and engine workers meet; all parties proceed in common steps.

In a step every party does its part and reports the outcome; when all have, each gets everybody's. If any part fails,
the step fails for all, with every reason; a party whose part depends on another's is told at once
(:meth:`megatron_patches.refit.assembly.Assembly.check`). A party that ends, or does not answer in time, has failed. So
a step either succeeds for all or raises for all, and none waits for ever.

A common token keeps out who was not invited; it is not encryption.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from megatron_patches.refit import frames
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.frames import Patience
from megatron_patches.refit.outbox import Outbox
from megatron_patches.refit.rendezvous_messages import (
    BEAT_S,
    FOREVER_S,
    TICK_S,
    Alert,
    Beat,
    Failure,
    Invitation,
    Join,
    Notice,
    Outcome,
    Results,
    decode_of_party,
    encode,
)

logger = logging.getLogger(__name__)

_AFTER_FAILURE_S = 10.0  # for parties that have not answered yet once a step has failed
_REMEMBERED = 4  # steps that are kept for a party that is late
_TELLING_S = 30.0  # for a party to take a mebibyte of what it is told
_CLOSING_S = 5.0  # for all parties to take what they have been told before the end
_INTRODUCTION_BYTES = 1 << 16  # the most that somebody may send who has not shown the token


class Rendezvous:
    """Serves the steps of ``parties`` parties, in threads of its own, until :meth:`close`.

    Args:
        parties: how many will join, numbered from 0.
        timeout_s: seconds that a step may take after its first party has finished.
        host: address to listen on; other machines must reach it if parties run there.
        answer: gives, for the name of a step and all parts, what each party is told; None where all are told all.

    Raises:
        PartyFailedError: if the address is none of this machine.
    """

    def __init__(
        self,
        parties: int,
        timeout_s: float,
        host: str = "127.0.0.1",
        answer: Callable[[str, list[bytes]], list[bytes] | None] = lambda _what, _parts: None,
    ) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._gone: dict[int, str] = {}
        self._culprits: set[int] = set()
        self._steps: dict[int, _Step] = {}
        self._closed = False
        try:
            self._listener = frames.listen(host)
        except OSError as error:
            raise PartyFailedError(
                f"cannot listen on {host} ({error.strerror or error}); host must be an address of this machine that "
                "engines reach"
            ) from error
        self._listener.settimeout(TICK_S)
        self.invitation = Invitation(host, self._listener.getsockname()[1], secrets.token_hex(16), parties, timeout_s)
        for target in (self._accept, self._watch):
            threading.Thread(target=target, name=f"refit-rendezvous-{target.__name__}", daemon=True).start()

    @property
    def culprits(self) -> frozenset[int]:
        """Parties of which something has failed, that have ended or kept silent; not those that passed that on."""
        with self._lock:
            return frozenset(self._culprits)

    def check_joined(self, parties: Iterable[int], who: str) -> None:
        """Raises unless all of ``parties`` have joined, whatever has become of them since.

        Args:
            parties: their numbers.
            who: they are, for the message.

        Raises:
            RefitError: naming the address that they must reach.
        """
        with self._lock:
            absent = [party for party in parties if party not in self._names]
        if absent:
            raise RefitError(
                f"{len(absent)} of the workers of {who} did not join; they must reach {self.invitation.host}:"
                f"{self.invitation.port}, so the option host must be an address of this machine that engines reach; "
                "the log there says what went wrong"
            )

    def close(self) -> None:
        """Ends it, once parties have what they were told, or have had time to; those that still wait are told so."""
        with self._lock:
            self._closed = True
            outboxes = list(self._outboxes.values())
        for outbox in outboxes:
            outbox.finish()
        deadline = time.monotonic() + _CLOSING_S
        for outbox in outboxes:
            outbox.close(deadline)
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
                    time.sleep(TICK_S)
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
                if joined.party in self._outboxes or not 0 <= joined.party < self.invitation.parties:
                    logger.warning("refit: refused %s: there is no free place %d", joined.name, joined.party)
                    return
                party = joined.party
                self._names[party] = joined.name
                self._outboxes[party] = Outbox(connection, joined.name, _TELLING_S)
                self._catch_up(party)
            while True:
                message = decode_of_party(frames.receive(connection, Patience(FOREVER_S, "a step")))
                with self._lock:
                    if isinstance(message, Outcome):
                        self._report(party, message)
                    elif isinstance(message, Notice):
                        self._tell_all(message)
        except Exception as error:  # noqa: BLE001 - whatever it was, nobody listens to this party any more
            if party is not None:
                with self._lock:
                    self._leave(party, error)
        finally:
            if party is not None:
                self._outboxes[party].finish()
            connection.close()

    def _introduced(self, connection: socket.socket) -> Join | None:
        """The party's introduction; None if it does not know the token."""
        patience = Patience(30, "a party's introduction")
        try:
            joined = decode_of_party(frames.receive(connection, patience, most_bytes=_INTRODUCTION_BYTES))
        except (PartyFailedError, msgspec.MsgspecError):
            return None
        if not isinstance(joined, Join):
            return None
        known = hmac.compare_digest(joined.token.encode(), self.invitation.token.encode())
        return joined if known else None

    def _catch_up(self, party: int) -> None:
        """Sends a new party the verdicts and alerts from before it joined."""
        for number, step in self._steps.items():
            if step.verdicts:
                self._outboxes[party].put(encode(step.verdict_of(party)))
            elif step.failed:
                reason = next(item.reason for item in step.outcomes.values() if item.reason is not None)
                self._outboxes[party].put(encode(Alert(number, reason)))

    def _leave(self, party: int, error: Exception) -> None:
        if self._closed:
            return
        self._gone[party] = f"{self._names[party]} has ended or closed its connection"
        self._culprits.add(party)
        logger.debug("refit: %s (%s)", self._gone[party], error)
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
            step.outcomes.setdefault(gone, Outcome(outcome.step, step.what, reason=reason))
            step.fail()
        # Who fails a step by another name, such as an engine that could not be asked to take part, says why it fails.
        if step.what != outcome.what and outcome.reason is None and not step.failed:
            outcome.reason = (
                f"{self._names[party]} is at step {outcome.what!r} while others are at {step.what!r}; "
                "do all run the same version of this package?"
            )
        before = step.outcomes.get(party)
        if before is None or before.reason is None:  # a failure that was reported for it already stands
            step.outcomes[party] = outcome
        if outcome.reason is not None and not step.verdicts:
            if all(item.reason != outcome.reason for other, item in step.outcomes.items() if other != party):
                self._culprits.add(party)
            step.fail()
            self._tell_all(Alert(outcome.step, outcome.reason))
        self._settle(outcome.step)

    def _settle(self, number: int) -> None:
        step = self._steps[number]
        if step.verdicts or len(step.outcomes) < self.invitation.parties:
            return
        reasons = list(dict.fromkeys(item.reason for item in step.outcomes.values() if item.reason is not None))
        if not reasons:
            parts = [step.outcomes[party].payload for party in sorted(step.outcomes)]
            try:
                answers = self._answer(step.what, parts)
            except (RefitError, msgspec.MsgspecError) as error:
                reasons = [f"the registry: {type(error).__name__}: {error}"]
            else:
                step.verdicts = [Results(number, parts)] if answers is None else [Results(number, [a]) for a in answers]
        if reasons:
            step.verdicts = [Failure(number, reasons)]
        if len(step.verdicts) == 1:
            self._tell_all(step.verdicts[0])
        else:
            for party, outbox in self._outboxes.items():
                if party not in self._gone:
                    outbox.put(encode(step.verdict_of(party)))
        self._steps.pop(number - _REMEMBERED, None)

    def _watch(self) -> None:
        """Ends steps that some party never answered, and lets all know that this process is there."""
        said = time.monotonic()
        while not self._closed:
            time.sleep(TICK_S)
            with self._lock:
                if time.monotonic() - said > BEAT_S:
                    said = time.monotonic()
                    self._tell_all(Beat())
                for number, step in list(self._steps.items()):
                    if not step.verdicts and time.monotonic() > step.deadline:
                        for party in set(range(self.invitation.parties)) - set(step.outcomes):
                            reason = self._silence(party, step.what)
                            # After a failure elsewhere, a party that is still working is not a cause.
                            known = reason if not step.failed else None
                            self._culprits |= {party} if known is not None else set()
                            step.outcomes[party] = Outcome(number, step.what, reason=known)
                        self._settle(number)

    def _silence(self, party: int, what: str) -> str:
        if party in self._names:
            return f"{self._names[party]} gave no answer to {what!r} in time"
        here = f"{self.invitation.host}:{self.invitation.port}"
        return (
            f"party {party}, which never joined, gave no answer to {what!r} in time; it must reach {here}, and its log "
            "says why it did not join if it did"
        )

    def _tell_all(self, message: Results | Failure | Alert | Notice | Beat) -> None:
        encoded = encode(message)
        for party, outbox in self._outboxes.items():
            if party not in self._gone:
                outbox.put(encoded)


class _Step:
    """A step that some party has answered."""

    def __init__(self, what: str, deadline: float) -> None:
        self.what, self.deadline = what, deadline
        self.outcomes: dict[int, Outcome] = {}
        self.verdicts: list[Results | Failure] = []  # one for all, or one a party
        self.failed = False

    def verdict_of(self, party: int) -> Results | Failure:
        """What a party is told of the step, which has ended."""
        return self.verdicts[party if len(self.verdicts) > 1 else 0]

    def fail(self) -> None:
        """Marks the step as failed and shortens the wait for the other parties."""
        self.failed = True
        self.deadline = min(self.deadline, time.monotonic() + _AFTER_FAILURE_S)
