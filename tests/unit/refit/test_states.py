"""Each change of a subscription's state is logged once, and anyone may ask what it is at."""

from __future__ import annotations

import logging
import re

import pytest

from megatron_patches.refit.control.messages import State, StateLog


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
    log.enter(State.SENDING, 7)
    standing = log.standing(lambda state: ["worker 0"] if state is State.SENDING else [])
    assert (standing.state, standing.version, standing.waits_for) == (State.SENDING, 7, ("worker 0",))
    assert 0 <= standing.seconds < 5
