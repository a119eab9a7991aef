"""The handle of a published version, and what is exported."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from megatron_patches import refit
from megatron_patches.refit.trainer.publisher import PublishHandle
from megatron_patches.refit.trainer.push_options import EngineReport, Fate, PushReport

SENT = PushReport(
    version=5,
    nbytes=9,
    staged_bytes=8,
    beside_bytes=7,
    backup_bytes=6,
    seconds={"send": 1.0},
    engines={
        "one": EngineReport(Fate.SENT, nbytes=9),
        "two": EngineReport(Fate.SENT),
        "new": EngineReport(Fate.JOINING),
    },
)


def test_a_handle_tells_what_became_of_each_engine() -> None:
    one, two = Future[EngineReport](), Future[EngineReport]()
    handle = PublishHandle(SENT, {"one": one, "two": two})
    one.set_result(EngineReport(Fate.SERVES, {"committing": 2.0}, 9))
    assert (handle.version, handle.done()) == (5, False)
    with pytest.raises(TimeoutError, match=r"^two did not serve version 5 within 0.01 s$"):
        handle.result(0.01)
    two.set_result(EngineReport(Fate.FAILED, reason="it died"))
    assert handle.done()
    report = handle.result()
    assert report.engines == {
        "one": EngineReport(Fate.SERVES, {"committing": 2.0}, 9),
        "two": EngineReport(Fate.FAILED, reason="it died"),
        "new": EngineReport(Fate.JOINING),
    }
    assert (report.nbytes, SENT.engines["one"].fate) == (9, Fate.SENT)


def test_a_handle_without_engines_is_done() -> None:
    handle = PublishHandle(SENT, {})
    assert handle.done()
    assert handle.result(0.0) == SENT


def test_what_is_exported_is_there_and_nothing_else() -> None:
    for name in refit.__all__:
        assert getattr(refit, name).__name__ == name
    with pytest.raises(AttributeError, match=r"module 'megatron_patches.refit' has no attribute 'Publisher'"):
        _ = refit.Publisher  # type: ignore[attr-defined]
