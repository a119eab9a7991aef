"""Parties as threads: a step succeeds for all or raises for all, with the reason, and nobody waits for ever."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from megatron_patches.refit import frames, rendezvous
from megatron_patches.refit.assembly import Assembly
from megatron_patches.refit.engine_calls import EngineCalls
from megatron_patches.refit.engines import PauseMode
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.frames import Patience
from megatron_patches.refit.rendezvous import Rendezvous

TIMEOUT_S = 3.0


class Deaf:
    """An engine that answers every call and does nothing."""

    name = "an engine"

    def world_size(self) -> int:
        return 2

    def call(self, call: dict[str, Any]) -> None:
        pass

    def commit(self, version: int, *, reset_cache: bool) -> None:
        pass

    def pause(self, mode: PauseMode) -> None:
        pass

    def resume(self, *, reset_cache: bool) -> None:
        pass


@contextmanager
def meeting(parties: int, timeout_s: float = TIMEOUT_S) -> Iterator[tuple[Rendezvous, list[Assembly]]]:
    server = Rendezvous(parties, timeout_s)
    members = [Assembly(server.invitation, party, f"party {party}") for party in range(parties)]
    try:
        yield server, members
    finally:
        for member in members:
            member.close()
        server.close()


def on_all[T](members: list[Assembly], work: Callable[[Assembly], T]) -> list[T | Exception]:
    def run(member: Assembly) -> T | Exception:
        try:
            return work(member)
        except PartyFailedError as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(run, members))


def wait_for_join(server: Rendezvous, party: int) -> None:
    """A party sends its introduction and goes on; the server notes it a little later, in another thread."""
    deadline = time.monotonic() + 30
    while True:
        try:
            server.check_joined([party], f"party {party}")
            return
        except RefitError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def work_until_failed(member: Assembly, seconds: float) -> None:
    """What a party does that looks for failures of others meanwhile; it gives up late."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        member.check()
        time.sleep(0.01)


def test_who_has_gone_is_known_outside_steps() -> None:
    with meeting(3) as (_, members):
        on_all(members, lambda member: member.gather("meet", int, lambda: 0))
        assert members[0].gone() == []
        members[2].close()
        deadline = time.monotonic() + 10
        while not members[0].gone() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert members[0].gone() == ["party 2 has ended or closed its connection"]


@pytest.mark.parametrize("parties", [1, 2, 7])
def test_all_get_everybodys_part_in_order(parties: int) -> None:
    with meeting(parties) as (_, members):
        for round_ in range(5):
            found = on_all(members, lambda m, r=round_: m.gather("add", int, lambda: m.party * 10 + r))  # type: ignore[misc]
            assert found == [[party * 10 + round_ for party in range(parties)]] * parties


def test_a_failure_is_everybodys_with_its_reason_and_the_next_step_is_fresh() -> None:
    def fail(member: Assembly) -> list[int]:
        def work() -> int:
            if member.party in (1, 2):
                raise ValueError(f"broken {member.party}")
            return 0

        return member.gather("work", int, work)

    with meeting(4) as (_, members):
        for error in on_all(members, fail):
            assert isinstance(error, PartyFailedError)
            assert "party 1: ValueError: broken 1" in str(error)
            assert "party 2: ValueError: broken 2" in str(error)
        assert on_all(members, lambda m: m.gather("again", int, lambda: m.party)) == [[0, 1, 2, 3]] * 4


def test_who_waits_for_a_peer_inside_a_step_learns_of_its_failure_at_once() -> None:
    def work(member: Assembly) -> list[int]:
        def part() -> int:
            if member.party == 0:
                raise ValueError("the cause")
            work_until_failed(member, 60.0)
            return 0

        return member.gather("work", int, part)

    with meeting(3, timeout_s=60) as (_, members):
        started = time.monotonic()
        errors = on_all(members, work)
        assert time.monotonic() - started < 10
        assert [str(error) for error in errors] == ["work failed: party 0: ValueError: the cause"] * 3


def test_a_party_that_leaves_fails_the_step_and_all_later_ones() -> None:
    with meeting(3) as (_, members):
        members[2].close()
        for _ in range(2):
            for error in on_all(members[:2], lambda m: m.gather("work", int, lambda: 0)):
                assert isinstance(error, PartyFailedError)
                assert "party 2 has ended or closed its connection" in str(error)


def test_a_party_that_does_not_answer_is_named() -> None:
    with meeting(3, timeout_s=0.5) as (_, members):
        for error in on_all(members[:2], lambda m: m.gather("work", int, lambda: 0)):
            assert "party 2 gave no answer to 'work' in time" in str(error)
        late = on_all(members[2:], lambda m: m.gather("work", int, lambda: 0))
        assert "party 2 gave no answer" in str(late[0])
        assert on_all(members, lambda m: m.gather("next", int, lambda: 1)) == [[1, 1, 1]] * 3


def test_a_party_that_never_joined_is_named() -> None:
    server = Rendezvous(2, 0.5)
    member = Assembly(server.invitation, 0, "party 0")
    with pytest.raises(PartyFailedError, match=r"party 1, which never joined, gave no answer.* and its log says why"):
        member.gather("work", int, lambda: 0)
    member.close()
    server.close()


def test_the_end_of_the_server_ends_all_waits() -> None:
    with meeting(2, timeout_s=60) as (server, members):
        threading.Timer(0.3, server.close).start()
        started = time.monotonic()
        with pytest.raises(PartyFailedError, match="party 0 lost the rendezvous"):
            members[0].gather("work", int, lambda: 0)
        assert time.monotonic() - started < 10


def test_a_wrong_token_is_turned_away() -> None:
    server = Rendezvous(1, TIMEOUT_S)
    stranger = Assembly(replace(server.invitation, token=server.invitation.token[::-1]), 0, "a stranger")
    with pytest.raises(PartyFailedError, match=r"lost the (rendezvous|connection)"):
        stranger.gather("work", int, lambda: 0)
    member = Assembly(server.invitation, 0, "party 0")
    assert member.gather("work", int, lambda: 5) == [5]
    for party in (stranger, member):
        party.close()
    server.close()


def test_another_thread_can_fail_a_step_that_a_party_is_missing_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the call that makes an engine take part fails; the engine then takes part in the next step again."""
    monkeypatch.setattr(rendezvous, "_AFTER_FAILURE_S", 2.0)

    def work(member: Assembly) -> list[int]:
        if member.party == 0:
            threading.Timer(0.2, lambda: member.fail(0, "work", "the engine cannot be reached")).start()
        return member.gather("work", int, lambda: 0)

    with meeting(3, timeout_s=60) as (_, members):
        started = time.monotonic()
        for error in on_all(members[:2], work):
            assert str(error) == "work failed: the engine cannot be reached"
        assert time.monotonic() - started < 20
        members[2].next_step = members[0].next_step
        assert on_all(members, lambda m: m.gather("next", int, lambda: 1)) == [[1, 1, 1]] * 3


@pytest.mark.parametrize(("beat_s", "is_lost"), [(0.3, False), (60.0, True)])
def test_a_party_notices_that_the_first_one_hangs(
    beat_s: float, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped keeps its connections."""
    monkeypatch.setattr(rendezvous, "BEAT_S", beat_s)

    def work(member: Assembly) -> list[int]:
        def part() -> int:
            until = time.monotonic() + 4.0
            while time.monotonic() < until:
                member.check()
                time.sleep(0.05)
            return member.party

        return member.gather("work", int, part)

    with meeting(2, timeout_s=60) as (_, members):
        members[1].most_silence_s = 2.0
        found = on_all(members, work)
        if is_lost:
            assert all("party 1 has heard nothing of the trainer's first rank for 2 s" in str(error) for error in found)
        else:
            assert found == [[0, 1]] * 2


def test_parties_at_different_steps_are_told() -> None:
    with meeting(2) as (_, members):
        for error in on_all(members, lambda m: m.gather(f"step {m.party}", int, lambda: 0)):
            assert isinstance(error, PartyFailedError)
            assert "do all run the same version of this package?" in str(error)


def test_an_answer_of_another_version_of_the_package_is_named() -> None:
    with meeting(2) as (_, members):
        found = on_all(members, lambda m: m.gather("meet", int if m.party else str, lambda: "new"))
        assert found[0] == ["new", "new"]
        assert re.match(r"meet: party 1 cannot read .*Expected `int`.*do all run the same version", str(found[1]))


def test_what_is_posted_outside_of_steps_reaches_all_who_collect_it() -> None:
    with meeting(3) as (_, members):
        members[1].post("commit 7", None)
        members[2].post("commit 7", "no room")
        members[2].post("commit 8", None)
        assert members[0].collect("commit 7", [1, 2], TIMEOUT_S) == {1: None, 2: "no room"}
        assert members[0].collect("commit 8", [2], TIMEOUT_S) == {2: None}


def test_a_party_that_ends_or_keeps_silent_has_failed() -> None:
    with meeting(3) as (_, members):
        members[1].close()
        found = members[0].collect("commit 7", [1], 20.0)
        assert found == {1: "party 1 has ended or closed its connection"}
        assert members[0].collect("commit 7", [2], 0.3) == {2: "no answer within 0.3 s"}


def test_a_step_can_be_failed_before_it_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_AFTER_FAILURE_S", 2.0)
    with meeting(2, timeout_s=60) as (_, members):
        members[0].fail(members[0].next_step, "work", "the engine cannot be reached")
        started = time.monotonic()
        with pytest.raises(PartyFailedError, match=r"^work failed: the engine cannot be reached$"):
            members[0].gather("work", int, lambda: 0)
        assert time.monotonic() - started < 20


@pytest.mark.parametrize("begun", [False, True])
def test_a_failure_is_told_by_whatever_name_the_step_goes(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an engine cannot be asked to receive a version before which links are made."""
    monkeypatch.setattr(rendezvous, "_AFTER_FAILURE_S", 2.0)

    def work(member: Assembly) -> list[int]:
        def part() -> int:
            if member.party == 0:
                time.sleep(0.5 * begun)  # the other party has done its part
                member.fail(0, "sending version 1", "the engine cannot be reached")
            else:
                time.sleep(0.5 * (not begun))
            return 0

        return member.gather("linking", int, part)

    with meeting(2, timeout_s=60) as (_, members):
        for error in on_all(members, work):
            assert str(error) == "linking failed: the engine cannot be reached"


def connected(server: Rendezvous) -> socket.socket:
    """To a server, without an introduction."""
    invitation = server.invitation
    return frames.prepare(socket.create_connection((invitation.host, invitation.port), timeout=5.0))


def introduce(connection: socket.socket, server: Rendezvous, party: int) -> None:
    join = {"type": "Join", "token": server.invitation.token, "party": party, "name": f"party {party}"}
    frames.send(connection, msgspec.msgpack.encode(join), Patience(5, "the server"))


def ended(connection: socket.socket, within_s: float) -> bool:
    """Whether the other side closes a connection soon."""
    connection.settimeout(within_s)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def test_who_introduces_himself_after_the_end_is_turned_away() -> None:
    server = Rendezvous(2, 60.0)
    with connected(server) as late:
        time.sleep(0.5)  # accepted by now
        server.close()
        introduce(late, server, 0)
        assert ended(late, 5.0)


@pytest.mark.parametrize("content", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x00\x01\x00\x00\x00"])
def test_a_stranger_cannot_take_memory(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """His first eight bytes would be the length of a message: of 6 EB, or of 4 GiB."""
    server = Rendezvous(1, TIMEOUT_S)
    with caplog.at_level(logging.WARNING), connected(server) as stranger:
        stranger.sendall(content)
        assert ended(stranger, 5.0)
        assert "did not show the token" in caplog.text
    server.close()


def test_a_token_may_be_anything() -> None:
    server = Rendezvous(1, TIMEOUT_S)
    stranger = Assembly(replace(server.invitation, token="ключ"), 0, "a stranger")  # noqa: S106 - none
    with pytest.raises(PartyFailedError, match=r"lost the (rendezvous|connection)"):
        stranger.gather("work", int, lambda: 0)
    stranger.close()
    server.close()


class NoRoom:
    """A listener that fails once, as where too many files are open."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self.failed = listener, threading.Event()

    def accept(self) -> tuple[socket.socket, object]:
        if not self.failed.is_set():
            self.failed.set()
            raise OSError(24, "Too many open files")
        return self._listener.accept()

    def shutdown(self, how: int) -> None:
        self._listener.shutdown(how)

    def close(self) -> None:
        self._listener.close()


def test_a_connection_that_cannot_be_accepted_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    server = Rendezvous(1, 5.0)
    broken = NoRoom(server._listener)
    server._listener = broken  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        assert broken.failed.wait(30)
        member = Assembly(server.invitation, 0, "party 0")
        assert member.gather("work", int, lambda: 3) == [3]
    assert "cannot accept a connection: [Errno 24] Too many open files" in caplog.text
    member.close()
    server.close()


def test_a_party_that_takes_no_messages_is_cut_off_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that hangs. What it missed a part of, it could make no sense of later."""
    monkeypatch.setattr(rendezvous, "_TELLING_S", 2.0)
    server = Rendezvous(3, 30.0)
    with connected(server) as deaf:
        introduce(deaf, server, 2)
        members = [Assembly(server.invitation, party, f"party {party}") for party in range(2)]
        time.sleep(0.5)

        def say(member: Assembly) -> list[bytes]:
            if member.party == 0:
                frames.send(deaf, outcome(0, b"x"), Patience(5, "the server"))
            return member.gather("work", bytes, lambda: bytes(8 << 20))

        assert all(len(parts) == 3 for parts in on_all(members, say) if isinstance(parts, list))
        started = time.monotonic()
        for error in on_all(members, lambda m: m.gather("more", int, lambda: 0)):
            assert "party 2 has ended or closed its connection" in str(error)
        assert time.monotonic() - started < 20
        assert ended(deaf, 5.0)
    for member in members:
        member.close()
    server.close()


@pytest.mark.slow
def test_a_party_that_reads_slowly_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hundreds of parties do, to which one machine sends everybody's manifest."""
    monkeypatch.setattr(rendezvous, "_TELLING_S", 4.0)
    server = Rendezvous(2, 60.0)
    with connected(server) as slow:
        introduce(slow, server, 1)
        member = Assembly(server.invitation, 0, "party 0")
        frames.send(slow, outcome(0, b"x"), Patience(5, "the server"))
        assert len(member.gather("work", bytes, lambda: bytes(32 << 20))) == 2
        slow.settimeout(30.0)
        taken = 0
        while taken < 32 << 20:
            part = slow.recv(1 << 20, socket.MSG_WAITALL)
            assert part, f"cut off after {taken} bytes"
            taken += len(part)
            time.sleep(0.2)
        frames.send(slow, outcome(1, b"x"), Patience(5, "the server"))
        assert len(member.gather("work", bytes, lambda: b"y")) == 2
        member.close()
    server.close()


@pytest.mark.slow
def test_a_party_that_takes_no_messages_delays_no_other() -> None:
    """Until it is cut off, that is until the time-out of a message, far beyond this test's end."""
    server = Rendezvous(3, 30.0)
    with connected(server) as deaf:
        introduce(deaf, server, 2)
        members = [Assembly(server.invitation, party, f"party {party}") for party in range(2)]
        frames.send(deaf, outcome(0, b"x"), Patience(5, "the server"))
        frames.send(deaf, outcome(1, b"x"), Patience(5, "the server"))
        started = time.monotonic()
        for _ in range(2):
            found = on_all(members, lambda member: member.gather("work", bytes, lambda: bytes(8 << 20)))
            assert [len(parts) for parts in found if isinstance(parts, list)] == [3, 3]
        assert time.monotonic() - started < 10
        for member in members:
            member.close()
        server.close()
        assert time.monotonic() - started < 20


def test_what_was_told_before_the_end_arrives() -> None:
    """However long it is, and however late a party reads."""
    for _ in range(3):
        server = Rendezvous(2, TIMEOUT_S)
        with connected(server) as late:
            introduce(late, server, 1)
            member = Assembly(server.invitation, 0, "party 0")
            frames.send(late, outcome(0, b"x"), Patience(5, "the server"))
            assert len(member.gather("work", bytes, lambda: bytes(4 << 20))) == 2
            member.close()
            closing = threading.Thread(target=server.close)
            closing.start()
            time.sleep(0.3)
            while True:
                message = frames.receive(late, Patience(5, "the results"))
                if len(message) > 4 << 20:
                    break
            closing.join(10)
            assert not closing.is_alive()


def outcome(step: int, payload: bytes) -> bytes:
    content = {"type": "Outcome", "step": step, "what": "work", "payload": msgspec.msgpack.encode(payload)}
    return msgspec.msgpack.encode(content)


def test_a_party_that_takes_too_long_learns_of_it_in_its_work() -> None:
    def work(member: Assembly) -> list[int]:
        def part() -> int:
            if member.party == 1:
                work_until_failed(member, 15.0)
            return 0

        return member.gather("work", int, part)

    with meeting(2, timeout_s=0.5) as (_, members):
        started = time.monotonic()
        for error in on_all(members, work):
            assert str(error) == "work failed: party 1 gave no answer to 'work' in time"
        assert time.monotonic() - started < 10
        assert on_all(members, lambda m: m.gather("next", int, lambda: 1)) == [[1, 1]] * 2


def test_what_nobody_collects_is_not_kept_for_ever() -> None:
    with meeting(3) as (_, members):
        on_all(members, lambda m: m.gather("meet", int, lambda: 0))  # who joins later misses what was posted before
        for version in range(100):
            members[1].post(f"commit {version}", None)
        members[2].close()
        assert members[0].collect("commit 99", [1, 2], 20.0)[1] is None
        members[0].fail(1, "missed", "party 1 was not called")
        on_all([members[0]], lambda m: m.gather("missed", int, lambda: 0))
        members[1].next_step = 2
        on_all(members[:2], lambda m: m.gather("work", int, lambda: 0))
        for member in members[:2]:
            assert len(member._notices) < 20
            assert "" in member._notices
            assert not member._answers
            assert not member._alerts


def test_a_rendezvous_that_cannot_be_reached_names_the_way_out() -> None:
    server = Rendezvous(1, 0.3)
    server.close()
    here = f"127.0.0.1:{server.invitation.port}"
    with pytest.raises(PartyFailedError, match=rf"{here} within 0 s \(Connection refused\); .* option host must be"):
        Assembly(server.invitation, 0, "party 0")
    with pytest.raises(PartyFailedError, match=r"cannot listen on 192\.0\.2\.1 \(.*\); host must be an address"):
        Rendezvous(1, 1.0, host="192.0.2.1")


def test_a_party_invited_by_somebody_who_has_given_up_does_not_wait_for_him() -> None:
    """An engine answers no request meanwhile, nor the next invitation."""
    server = Rendezvous(1, 300.0)
    server.close()
    began = time.monotonic()
    with pytest.raises(PartyFailedError, match=r"within 2 s \(Connection refused\); .* must not have given up"):
        Assembly(server.invitation, 0, "party 0")
    assert time.monotonic() - began < 30


def test_a_party_whose_rendezvous_can_be_reached_only_a_little_later_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    original, refusals = socket.create_connection, [ConnectionRefusedError(), ConnectionRefusedError()]

    def connect(*args: Any, **kwargs: Any) -> socket.socket:
        if refusals:
            raise refusals.pop()
        return original(*args, **kwargs)

    monkeypatch.setattr(socket, "create_connection", connect)
    with meeting(1) as (_, members):
        assert members[0].gather("meet", int, lambda: 7) == [7]
    assert not refusals


@pytest.mark.slow
def test_an_engine_that_answers_without_having_joined_fails_the_step_at_once() -> None:
    with meeting(2, 60.0) as (joined, members):
        on_all(members, lambda member: member.gather("meet", int, lambda: 0))
        joined.check_joined(range(2), "the engine")
    server = Rendezvous(3, 60.0)
    members = [Assembly(server.invitation, party, f"party {party}") for party in range(2)]
    wait_for_join(server, 1)
    calls = EngineCalls(members[0], "meet")

    def work(member: Assembly) -> list[int]:
        def wait() -> int:
            work_until_failed(member, 40)
            return 0

        return member.gather("meet", int, wait)

    began = time.monotonic()
    calls.start(Deaf(), {}, partial(server.check_joined, range(1, 3), Deaf.name))
    here = f"127.0.0.1:{server.invitation.port}"
    reason = f"1 of the workers of an engine did not join; they must reach {here}, .*option host must be an address"
    for found in on_all(members, work):
        assert isinstance(found, PartyFailedError)
        assert re.search(reason, str(found))
    assert time.monotonic() - began < 30
    with pytest.raises(RefitError, match=reason):
        calls.finish(10.0)
    for member in members:
        member.close()
    server.close()


def test_a_party_that_never_joined_is_told_where_to() -> None:
    server = Rendezvous(2, 0.3)
    member = Assembly(server.invitation, 0, "party 0")
    with pytest.raises(PartyFailedError, match=rf"it must reach 127\.0\.0\.1:{server.invitation.port}"):
        member.gather("work", int, lambda: 0)
    member.close()
    server.close()
