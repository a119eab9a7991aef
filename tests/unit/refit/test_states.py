"""Each change of a subscription's state is logged once, and anyone may ask what it is at."""

from __future__ import annotations

import logging
import re

import pytest

from megatron_patches.refit.control.messages import NEXT, State, StateLog


def test_each_change_is_logged_once_with_engine_version_and_seconds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log = StateLog("http://a", logging.INFO)
        log.enter(State.READY)
        log.enter(State.SENDING, 7)
        log.enter(State.COMMITTING)
        log.enter(State.FAILED, reason="worker 0 has ended")
    said = [re.sub(r"\d\.\d{3} s", "T", record.getMessage()) for record in caplog.records]
    assert said == [
        "refit: http://a: joining for T, now ready",
        "refit: http://a version 7: ready for T, now sending",
        "refit: http://a version 7: sending for T, now committing",
        "refit: http://a version 7: committing for T, now failed: worker 0 has ended",
    ]
    assert list(log.lasted) == [State.SENDING, State.COMMITTING]  # since the version was begun


def test_whoever_asks_learns_the_state_and_whom_it_waits_for() -> None:
    log = StateLog("http://a", logging.DEBUG)
    log.enter(State.READY)
    log.enter(State.SENDING, 7)
    standing = log.standing(lambda state: ["worker 0"] if state is State.SENDING else [])
    assert (standing.state, standing.version, standing.waits_for) == (State.SENDING, 7, ("worker 0",))
    assert 0 <= standing.seconds < 5


def test_a_state_that_cannot_follow_is_refused_and_not_entered() -> None:
    log = StateLog("http://a", logging.DEBUG)
    with pytest.raises(RuntimeError) as raised:
        log.enter(State.COMMITTING, 7)
    assert str(raised.value) == (
        "internal error: the refit with http://a was joining and cannot be committing next (version 7); please report "
        "this"
    )
    for state in (State.READY, State.SENDING, State.COMMITTING, State.CLOSED):
        log.enter(state)
    for state in set(State) - {State.CLOSED}:  # nothing follows the end
        with pytest.raises(RuntimeError, match="was closed and cannot be"):
            log.enter(state, reason="left")
    assert log.standing(lambda _: []).state is State.CLOSED
    assert NEXT.keys() == set(State)
