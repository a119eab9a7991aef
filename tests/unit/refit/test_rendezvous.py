"""Parties as threads: a step succeeds for all or raises for all, with the reason, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.rendezvous import Assembly, Rendezvous

TIMEOUT_S = 3.0


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
            started = time.monotonic()
            while time.monotonic() - started < 60:
                member.check()
                time.sleep(0.01)
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
    with pytest.raises(PartyFailedError, match="party 1, which never joined, gave no answer"):
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


def test_another_thread_can_fail_a_step_that_a_party_is_missing_from() -> None:
    """As when the call that makes an engine take part fails; the engine then takes part in the next step again."""

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


def test_parties_at_different_steps_are_told() -> None:
    with meeting(2) as (_, members):
        for error in on_all(members, lambda m: m.gather(f"step {m.party}", int, lambda: 0)):
            assert isinstance(error, PartyFailedError)
            assert "do all run the same version of this package?" in str(error)


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


def test_a_step_can_be_failed_before_it_is_begun() -> None:
    with meeting(2, timeout_s=60) as (_, members):
        members[0].fail(members[0].next_step, "work", "the engine cannot be reached")
        started = time.monotonic()
        with pytest.raises(PartyFailedError, match=r"^work failed: the engine cannot be reached$"):
            members[0].gather("work", int, lambda: 0)
        assert time.monotonic() - started < 20
