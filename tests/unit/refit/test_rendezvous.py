"""Parties as threads: a step succeeds for all or raises for all, with the reason, and nobody waits for ever."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
import zmq

from megatron_patches.refit.control import rendezvous
from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.control.rendezvous import Rendezvous
from megatron_patches.refit.errors import DigestError, PartyFailedError, RefitError, TransferError

TIMEOUT_S = 3.0


def all_parts(what: str, parts: list[bytes]) -> list[bytes]:
    """A registry that answers each party with the parts of all."""
    return [msgspec.msgpack.encode([msgspec.Raw(part) for part in parts])] * len(parts)


@contextmanager
def meeting(
    parties: int, timeout_s: float = TIMEOUT_S, answer: Callable[[str, list[bytes]], list[bytes]] = all_parts
) -> Iterator[tuple[Rendezvous, list[Assembly]]]:
    server = Rendezvous(parties, timeout_s, answer)
    members = [Assembly(server.invitation, party, f"party {party}") for party in range(parties)]
    for party in range(parties):  # who joins later misses what was posted before
        wait_for_join(server, party)
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
        on_all(members, lambda member: member.exchange("meet", list[int], lambda: 0))
        assert members[0].gone() == []
        members[2].close()
        deadline = time.monotonic() + 10
        while not members[0].gone() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert members[0].gone() == ["party 2 has ended or closed its connection, or said nothing for 30 s"]


@pytest.mark.parametrize("parties", [1, 2, 7])
def test_all_get_everybodys_part_in_order(parties: int) -> None:
    with meeting(parties) as (_, members):
        for round_ in range(5):
            found = on_all(members, lambda m, r=round_: m.exchange("add", list[int], lambda: m.party * 10 + r))  # type: ignore[misc]
            assert found == [[party * 10 + round_ for party in range(parties)]] * parties


@pytest.mark.parametrize("kind", [DigestError, TransferError])
def test_all_parties_know_whether_digests_differ_whatever_the_reason_says(kind: type[RefitError]) -> None:
    """Also those that only saw another one fail, and without reading the text of its reason."""

    def fail(member: Assembly) -> list[int]:
        def work() -> None:
            if member.party == 1:
                raise kind("DigestError is what this text says")
            work_until_failed(member, 10.0)

        return member.exchange("work", list[int], work)

    with meeting(3) as (_, members):
        for error in on_all(members, fail):
            assert isinstance(error, PartyFailedError)
            assert error.digests_differ is (kind is DigestError)
            assert str(error) == f"work failed: party 1: {kind.__name__}: DigestError is what this text says"


def test_a_failure_is_everybodys_with_its_reason_and_the_next_step_is_fresh() -> None:
    def fail(member: Assembly) -> list[int]:
        def work() -> int:
            if member.party in (1, 2):
                raise ValueError(f"broken {member.party}")
            return 0

        return member.exchange("work", list[int], work)

    with meeting(4) as (_, members):
        for error in on_all(members, fail):
            assert isinstance(error, PartyFailedError)
            assert "party 1: ValueError: broken 1" in str(error)
            assert "party 2: ValueError: broken 2" in str(error)
        assert on_all(members, lambda m: m.exchange("again", list[int], lambda: m.party)) == [[0, 1, 2, 3]] * 4


def test_who_waits_for_a_peer_inside_a_step_learns_of_its_failure_at_once() -> None:
    def work(member: Assembly) -> list[int]:
        def part() -> int:
            if member.party == 0:
                raise ValueError("the cause")
            work_until_failed(member, 60.0)
            return 0

        return member.exchange("work", list[int], part)

    with meeting(3, timeout_s=60) as (_, members):
        started = time.monotonic()
        errors = on_all(members, work)
        assert time.monotonic() - started < 10
        assert [str(error) for error in errors] == ["work failed: party 0: ValueError: the cause"] * 3


def test_who_only_saw_another_fail_is_no_reason_even_if_it_tells_first() -> None:
    """A killed process's links end before its connection here does."""

    def work(member: Assembly) -> list[int]:
        def part() -> int:
            if member.party == 2:
                time.sleep(0.3)
                member.close()
            raise PartyFailedError("lost the connection while waiting for destination rank 2")

        return member.exchange("work", list[int], part)

    with meeting(3, timeout_s=60) as (_, members):
        for error in on_all(members, work)[:2]:
            assert str(error).startswith("work failed: party 2 has ended or closed its connection")
            assert "party 0" not in str(error)
            assert "party 1" not in str(error)


def test_who_keeps_silent_is_the_reason_where_others_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_AFTER_FAILURE_S", 0.3)

    def work(member: Assembly) -> list[int]:
        def part() -> int:
            raise PartyFailedError("waited 1 s for destination rank 2")

        return member.exchange("work", list[int], part)

    with meeting(3, timeout_s=60) as (_, members):
        for error in on_all(members[:2], work):
            assert str(error) == "work failed: party 2 gave no answer to 'work' in time"


def test_what_all_saw_of_a_failure_is_told_where_no_cause_is_known() -> None:
    def work(member: Assembly) -> list[int]:
        def part() -> int:
            raise PartyFailedError(f"cannot reach {member.party}")

        return member.exchange("work", list[int], part)

    with meeting(1) as (_, members):
        (error,) = on_all(members, work)
        assert str(error) == "work failed: party 0: PartyFailedError: cannot reach 0"


def test_a_party_that_leaves_fails_the_step_and_all_later_ones() -> None:
    with meeting(3) as (_, members):
        members[2].close()
        for _ in range(2):
            for error in on_all(members[:2], lambda m: m.exchange("work", list[int], lambda: 0)):
                assert isinstance(error, PartyFailedError)
                assert "party 2 has ended or closed its connection" in str(error)


def test_a_party_that_does_not_answer_is_named() -> None:
    with meeting(3, timeout_s=0.5) as (_, members):
        for error in on_all(members[:2], lambda m: m.exchange("work", list[int], lambda: 0)):
            assert "party 2 gave no answer to 'work' in time" in str(error)
        late = on_all(members[2:], lambda m: m.exchange("work", list[int], lambda: 0))
        assert "party 2 gave no answer" in str(late[0])
        assert on_all(members, lambda m: m.exchange("next", list[int], lambda: 1)) == [[1, 1, 1]] * 3


def test_all_parties_that_do_not_answer_are_named() -> None:
    silent = [f"party {party} gave no answer to 'work' in time" for party in range(1, 5)]
    for parties, told in ((3, "; ".join(silent[:2])), (6, "; ".join(silent[:3]) + "; and 2 more")):
        with meeting(parties, timeout_s=0.5) as (_, members):
            (error,) = on_all(members[:1], lambda m: m.exchange("work", list[int], lambda: 0))
            assert str(error) == f"work failed: {told}"


def test_a_party_that_never_joined_is_named() -> None:
    server = Rendezvous(2, 0.5, all_parts, called="http://server:{}".format)
    member = Assembly(server.invitation, 0, "party 0")
    reason = r"http://server:1, which never joined, gave no answer.* and its log says why"
    with pytest.raises(PartyFailedError, match=reason):
        member.exchange("work", list[int], lambda: 0)
    member.close()
    server.close()


def test_the_end_of_the_server_ends_all_waits() -> None:
    with meeting(2, timeout_s=60) as (server, members):
        threading.Timer(0.3, server.close).start()
        started = time.monotonic()
        with pytest.raises(PartyFailedError, match="party 0 lost the rendezvous"):
            members[0].exchange("work", list[int], lambda: 0)
        assert time.monotonic() - started < 10


def test_a_server_that_waits_for_messages_can_be_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "TICK_S", 30.0)
    started = time.monotonic()
    with meeting(1) as (server, _):
        time.sleep(0.1)  # for its thread to wait
        server.close()
        server.close()
    assert time.monotonic() - started < 15


def test_what_went_wrong_here_is_not_lost_where_nobody_is_left_to_be_told() -> None:
    with meeting(1) as (server, (member,)):

        def work() -> None:
            server.close()
            raise MemoryError("no room for 7 GB")

        with pytest.raises(PartyFailedError, match="party 0 lost the rendezvous") as raised:
            member.exchange("work", list[int], work)
        assert str(raised.value.__cause__) == "no room for 7 GB"


def test_a_wrong_token_is_turned_away() -> None:
    server = Rendezvous(1, TIMEOUT_S, all_parts)
    stranger = Assembly(replace(server.invitation, token=server.invitation.token[::-1]), 0, "a stranger")
    with pytest.raises(PartyFailedError, match="lost the rendezvous: the connection has ended, or was refused"):
        stranger.exchange("work", list[int], lambda: 0)
    member = Assembly(server.invitation, 0, "party 0")
    assert member.exchange("work", list[int], lambda: 5) == [5]
    for party in (stranger, member):
        party.close()
    server.close()


def test_a_second_party_of_a_number_is_told_so_and_the_first_goes_on() -> None:
    with meeting(1) as (server, members):
        assert members[0].exchange("work", list[int], lambda: 5) == [5]
        for party in (0, 1, -1):
            second = Assembly(server.invitation, party, "a second")
            with pytest.raises(PartyFailedError, match=f"a second lost the rendezvous: there is no free place {party}"):
                second.exchange("work", list[int], lambda: 0)
            second.close()
        assert members[0].exchange("work", list[int], lambda: 6) == [6]


def test_another_thread_can_fail_a_step_that_a_party_is_missing_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the call that makes an engine take part fails; the engine then takes part in the next step again."""
    monkeypatch.setattr(rendezvous, "_AFTER_FAILURE_S", 0.5)

    def work(member: Assembly) -> list[int]:
        if member.party == 0:
            threading.Timer(0.2, lambda: member.fail(0, "work", "the engine cannot be reached")).start()
        return member.exchange("work", list[int], lambda: 0)

    with meeting(3, timeout_s=60) as (_, members):
        started = time.monotonic()
        for error in on_all(members[:2], work):
            assert str(error) == "work failed: the engine cannot be reached"
        assert time.monotonic() - started < 20
        members[2].next_step = members[0].next_step
        assert on_all(members, lambda m: m.exchange("next", list[int], lambda: 1)) == [[1, 1, 1]] * 3


@pytest.mark.parametrize(("beat_s", "is_lost"), [(0.3, False), (60.0, True)])
def test_a_party_notices_that_the_first_one_hangs(
    beat_s: float, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped keeps its connections."""
    monkeypatch.setattr(rendezvous, "BEAT_S", beat_s)

    def work(member: Assembly) -> list[int]:
        def part() -> int:
            until = time.monotonic() + 3.0
            while time.monotonic() < until:
                member.check()
                time.sleep(0.05)
            return member.party

        return member.exchange("work", list[int], part)

    with meeting(2, timeout_s=60) as (_, members):
        members[1].most_silence_s = 2.0
        found = on_all(members, work)
        if is_lost:
            assert all("party 1 has heard nothing of the trainer's first rank for 2 s" in str(error) for error in found)
        else:
            assert found == [[0, 1]] * 2


def test_parties_at_different_steps_are_told() -> None:
    with meeting(2) as (_, members):
        for error in on_all(members, lambda m: m.exchange(f"step {m.party}", list[int], lambda: 0)):
            assert isinstance(error, PartyFailedError)
            assert "do all run the same version of this package?" in str(error)


def test_an_answer_of_another_version_of_the_package_is_named() -> None:
    with meeting(2) as (_, members):
        found = on_all(members, lambda m: m.exchange("meet", list[int] if m.party else list[str], lambda: "new"))
        assert found[0] == ["new", "new"]
        assert re.match(r"meet: party 1 cannot read .*Expected `int`.*do all run the same version", str(found[1]))


def test_whatever_goes_wrong_while_parts_are_put_together_fails_the_step_alone() -> None:
    """It does not end the server, which would leave parties with a lost connection in place of the reason."""

    def answer(what: str, parts: list[bytes]) -> list[bytes]:
        if what == "fail":
            raise KeyError("w")
        return all_parts(what, parts)

    with meeting(2, answer=answer) as (_, members):
        for error in on_all(members, lambda m: m.exchange("fail", list[int], lambda: 0)):
            assert "the registry: KeyError: 'w'" in str(error)
        assert on_all(members, lambda m: m.exchange("meet", list[int], lambda: m.party)) == [[0, 1]] * 2


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
        assert found == {1: "party 1 has ended or closed its connection, or said nothing for 30 s"}
        assert members[0].collect("commit 7", [2], 0.3) == {2: "no answer within 0.3 s"}


def test_a_step_can_be_failed_before_it_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_AFTER_FAILURE_S", 0.5)
    with meeting(2, timeout_s=60) as (_, members):
        members[0].fail(members[0].next_step, "work", "the engine cannot be reached")
        started = time.monotonic()
        with pytest.raises(PartyFailedError, match=r"^work failed: the engine cannot be reached$"):
            members[0].exchange("work", list[int], lambda: 0)
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

        return member.exchange("linking", list[int], part)

    with meeting(2, timeout_s=60) as (_, members):
        for error in on_all(members, work):
            assert str(error) == "linking failed: the engine cannot be reached"


class Quiet:
    """A party that joins, and takes what it is told when asked to."""

    def __init__(self, server: Rendezvous, party: int) -> None:
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.rcvhwm = 1
        self._dealer.curve_serverkey = bytes.fromhex(server.invitation.token)
        self._dealer.curve_publickey, self._dealer.curve_secretkey = zmq.curve_keypair()
        self._dealer.connect(f"tcp://127.0.0.1:{server.invitation.port}")
        self.say({"type": "Join", "party": party, "name": f"party {party}"})

    def say(self, message: dict[str, Any]) -> None:
        self._dealer.send(msgspec.msgpack.encode(message))

    def answer(self, step: int, payload: bytes) -> None:
        self.say({"type": "Outcome", "step": step, "what": "work", "payload": msgspec.msgpack.encode(payload)})

    def hear(self, timeout_s: float = 10.0) -> bytes:
        assert self._dealer.poll(round(timeout_s * 1000)), "nothing came"
        return self._dealer.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    "content",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x00\x01\x00\x00\x00", b"\xff" * 4096],
    ids=["nothing", "http", "a_size", "ones"],
)
def test_strangers_take_neither_threads_nor_memory_and_their_connections_end(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they say something or nothing."""
    monkeypatch.setattr(rendezvous, "_HANDSHAKE_S", 1.0)
    server = Rendezvous(1, TIMEOUT_S, all_parts)
    files = open_files()
    with ExitStack() as strangers:
        for _ in range(100):
            here = ("127.0.0.1", server.invitation.port)
            stranger = strangers.enter_context(socket.create_connection(here, timeout=5.0))
            stranger.sendall(content)
        threads = threading.active_count()
        member = Assembly(server.invitation, 0, "party 0")
        assert member.exchange("work", list[int], lambda: 3) == [3]
        member.close()
        assert threading.active_count() == threads
        deadline = time.monotonic() + 20
        while open_files() > files + 100 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert open_files() <= files + 100  # the server's ends are closed; those of this test are still open
    server.close()


def test_what_is_said_is_encrypted() -> None:
    """A party behind a proxy that keeps all that passes."""
    passed: list[bytes] = []

    def pass_on(source: socket.socket, drain: socket.socket) -> None:
        with suppress(OSError):  # the other side has ended
            while content := source.recv(1 << 16):
                passed.append(content)
                drain.sendall(content)
            drain.shutdown(socket.SHUT_WR)

    server = Rendezvous(1, TIMEOUT_S, all_parts)
    with ExitStack() as ends, socket.create_server(("127.0.0.1", 0)) as proxy, ThreadPoolExecutor(4) as pool:

        def serve() -> None:
            for _ in range(2):  # to see whether it can be reached, and to speak
                inside = ends.enter_context(proxy.accept()[0])
                outside = ends.enter_context(socket.create_connection(("127.0.0.1", server.invitation.port)))
                pool.submit(pass_on, outside, inside)
                pass_on(inside, outside)

        pool.submit(serve)
        member = Assembly(replace(server.invitation, port=proxy.getsockname()[1]), 0, "a party that is named")
        said = "a word that nobody else reads"
        assert member.exchange("work", list[str], lambda: said) == [said]
        member.close()
    server.close()
    content = b"".join(passed)
    assert len(content) > 500
    for word in (said, "a party that is named", "work", server.invitation.token):
        assert word.encode() not in content
    assert bytes.fromhex(server.invitation.token) not in content


def test_a_party_that_says_what_is_no_message_has_failed() -> None:
    server = Rendezvous(2, 30.0, all_parts)
    member = Assembly(server.invitation, 0, "party 0")
    with Quiet(server, 1) as other:
        other.say({"type": "Outcome", "step": "first"})
        with pytest.raises(PartyFailedError, match=r"party 1 said what is no message .*same version of this package"):
            member.exchange("work", list[int], lambda: 0)
    member.close()
    server.close()


def test_a_party_speaks_for_itself_alone() -> None:
    server = Rendezvous(2, 30.0, all_parts)
    member = Assembly(server.invitation, 0, "party 0")
    wait_for_join(server, 0)
    with Quiet(server, 1) as other:
        other.say({"type": "Notice", "topic": "commit 7", "party": 0, "reason": None})
        assert member.collect("commit 7", [0, 1], 1.0) == {0: "no answer within 1 s", 1: None}
    member.close()
    server.close()


def test_a_party_that_takes_no_messages_delays_no_other_and_is_named() -> None:
    server = Rendezvous(3, 5.0, all_parts)
    with Quiet(server, 2) as deaf:
        members = [Assembly(server.invitation, party, f"party {party}") for party in range(2)]
        deaf.answer(0, b"x")
        deaf.answer(1, b"x")
        for _ in range(2):
            found = on_all(members, lambda member: member.exchange("work", list[bytes], lambda: bytes(8 << 20)))
            assert [len(parts) for parts in found if isinstance(parts, list)] == [3, 3]
        for error in on_all(members, lambda member: member.exchange("work", list[int], lambda: 0)):
            assert "party 2 gave no answer to 'work' in time" in str(error)
        for member in members:
            member.close()
        started = time.monotonic()
        server.close()
        assert time.monotonic() - started < 10


def test_what_a_party_said_last_reaches_the_others() -> None:
    """Although it leaves and the server ends at once, as when a trainer's first rank closes after a commit."""
    for _ in range(10):
        server = Rendezvous(2, TIMEOUT_S, all_parts)
        members = [Assembly(server.invitation, party, f"party {party}") for party in range(2)]
        for party in range(2):
            wait_for_join(server, party)
        members[0].post("serves", None)
        members[0].close()
        server.close(after=0)
        assert members[1].collect("serves", [0], TIMEOUT_S) == {0: None}
        members[1].close()


def test_what_was_told_before_the_end_arrives() -> None:
    """However long it is, and however late a party reads."""
    for _ in range(3):
        server = Rendezvous(2, TIMEOUT_S, all_parts)
        with Quiet(server, 1) as late:
            member = Assembly(server.invitation, 0, "party 0")
            late.answer(0, b"x")
            assert len(member.exchange("work", list[bytes], lambda: bytes(4 << 20))) == 2
            member.close()
            closing = threading.Thread(target=server.close)
            closing.start()
            time.sleep(0.3)
            while len(late.hear()) < 4 << 20:
                pass
            closing.join(10)
            assert not closing.is_alive()


def test_a_party_that_takes_too_long_learns_of_it_in_its_work() -> None:
    def work(member: Assembly) -> list[int]:
        def part() -> int:
            if member.party == 1:
                work_until_failed(member, 15.0)
            return 0

        return member.exchange("work", list[int], part)

    with meeting(2, timeout_s=0.5) as (_, members):
        started = time.monotonic()
        for error in on_all(members, work):
            assert str(error) == "work failed: party 1 gave no answer to 'work' in time"
        assert time.monotonic() - started < 10
        assert on_all(members, lambda m: m.exchange("next", list[int], lambda: 1)) == [[1, 1]] * 2


def test_what_nobody_collects_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_AFTER_FAILURE_S", 0.5)
    with meeting(3) as (_, members):
        on_all(
            members, lambda m: m.exchange("meet", list[int], lambda: 0)
        )  # who joins later misses what was posted before
        for version in range(100):
            members[1].post(f"commit {version}", None)
        members[2].close()
        assert members[0].collect("commit 99", [1, 2], 20.0)[1] is None
        members[0].fail(1, "missed", "party 1 was not called")
        on_all([members[0]], lambda m: m.exchange("missed", list[int], lambda: 0))
        members[1].next_step = 2
        on_all(members[:2], lambda m: m.exchange("work", list[int], lambda: 0))
        for member in members[:2]:
            assert len(member._notices) < 20
            assert "" in member._notices
            assert not member._answers
            assert not member._alerts


def test_a_rendezvous_that_cannot_be_reached_names_the_way_out() -> None:
    server = Rendezvous(1, 0.3, all_parts)
    server.close()
    here = f"127.0.0.1:{server.invitation.port}"
    with pytest.raises(PartyFailedError, match=rf"{here} within 0 s \(Connection refused\); .* option host must be"):
        Assembly(server.invitation, 0, "party 0")
    with pytest.raises(PartyFailedError, match=r"cannot listen on 192\.0\.2\.1 \(.*\); host must be an address"):
        Rendezvous(1, 1.0, all_parts, host="192.0.2.1")


def test_a_party_invited_by_somebody_who_has_given_up_does_not_wait_for_him() -> None:
    """An engine answers no request meanwhile, nor the next invitation."""
    server = Rendezvous(1, 300.0, all_parts)
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
        assert members[0].exchange("meet", list[int], lambda: 7) == [7]
    assert not refusals


def test_the_end_of_a_former_connection_does_not_count_against_a_party(monkeypatch: pytest.MonkeyPatch) -> None:
    """A party's connection may take the file descriptor of the plain one with which the party tried the address.

    Here, the end of that one is told right after the server has asked, and before it reads who joins.
    """
    look = Rendezvous._closed_connections
    asked: list[str] = []

    def late(server: Rendezvous) -> set[int]:
        found = look(server)
        if len(asked) == 1:
            asked.append("since")
            return set(server._open)
        if not asked and server._router.poll(0):
            asked.append("before")
        return found

    monkeypatch.setattr(Rendezvous, "_closed_connections", late)
    with meeting(1) as (server, (member,)):
        assert member.exchange("a step", list[int], lambda: 7) == [7]
        assert server._gone == {}
    assert asked == ["before", "since"]


def test_no_step_succeeds_without_a_late_party_because_another_has_left_after_its_own_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_AFTER_FAILURE_S", 0.0)
    ended = threading.Event()

    def part(member: Assembly) -> int:
        if member.party == 2:
            ended.wait(20)
        return 0

    with meeting(3, timeout_s=2.0) as (server, members), ThreadPoolExecutor(3) as pool:
        pool.submit(members[0].exchange, "work", list[int], lambda: 0)
        deadline = time.monotonic() + 10
        while server.awaited != ["party 1", "party 2"] and time.monotonic() < deadline:
            time.sleep(0.01)
        members[0].close()
        while not members[1].gone() and time.monotonic() < deadline:
            time.sleep(0.01)
        late = pool.submit(members[2].exchange, "work", list[int], lambda: part(members[2]))
        try:
            with pytest.raises(PartyFailedError, match="work failed: party 2 gave no answer to 'work' in time"):
                members[1].exchange("work", list[int], lambda: 0)
        finally:
            ended.set()
        with pytest.raises(PartyFailedError, match="party 2 gave no answer"):
            late.result(20)


def test_who_joins_after_another_has_left_during_a_step_takes_part_in_it() -> None:
    with ExitStack() as closing:
        server = Rendezvous(3, 20.0, all_parts)
        closing.callback(server.close)
        first, second = (Assembly(server.invitation, party, f"party {party}") for party in range(2))
        closing.callback(second.close)
        pool = closing.enter_context(ThreadPoolExecutor(2))
        pool.submit(first.exchange, "work", list[int], lambda: 0)
        deadline = time.monotonic() + 10
        while len(server.awaited) != 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        wait_for_join(server, 1)
        first.close()
        while not second.gone() and time.monotonic() < deadline:
            time.sleep(0.01)
        found = pool.submit(second.exchange, "work", list[int], lambda: 1)
        while "party 1" in server.awaited and time.monotonic() < deadline:
            time.sleep(0.01)
        third = Assembly(server.invitation, 2, "party 2")
        closing.callback(third.close)
        assert third.exchange("work", list[int], lambda: 2) == [0, 1, 2]
        assert found.result(20) == [0, 1, 2]


def test_a_party_that_never_joined_is_told_where_to() -> None:
    server = Rendezvous(2, 0.3, all_parts)
    member = Assembly(server.invitation, 0, "party 0")
    with pytest.raises(PartyFailedError, match=rf"it must reach 127\.0\.0\.1:{server.invitation.port}"):
        member.exchange("work", list[int], lambda: 0)
    member.close()
    server.close()
