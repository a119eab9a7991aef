"""Work beside the engine's own thread: one at a time, waited for, and what it raises stops nobody."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.vllm.aside import Aside


def test_work_goes_on_by_itself_until_somebody_waits_for_it() -> None:
    aside, may_end, done = Aside(torch.device("cpu")), threading.Event(), list[str]()

    def work() -> None:
        may_end.wait(30)
        done.append(threading.current_thread().name)

    aside.finish(0.0)
    aside.start("one", work)
    with pytest.raises(RefitError, match="refit-one did not end within 0 s"):
        aside.start("two", work)
    assert done == []
    may_end.set()
    aside.finish(30)
    assert done == ["refit-one"]
    aside.start("two", work)
    aside.finish(30)
    assert done == ["refit-one", "refit-two"]


def test_what_work_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    aside = Aside(torch.device("cpu"))

    def work() -> None:
        raise RefitError("no such thing")

    with caplog.at_level(logging.ERROR):
        aside.start("one", work)
        aside.finish(30)
    assert "one failed" in caplog.text
    assert "no such thing" in caplog.text


def test_work_that_could_not_be_begun_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError(f"can't start new thread {thread.name}")

    aside, done = Aside(torch.device("cpu")), list[str]()
    monkeypatch.setattr(threading.Thread, "start", no_more)
    with pytest.raises(RuntimeError, match="refit-one"):
        aside.start("one", lambda: done.append("one"))
    monkeypatch.undo()
    aside.finish(30)
    aside.start("two", lambda: done.append("two"))
    aside.finish(30)
    assert done == ["two"]
