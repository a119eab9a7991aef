"""The watchdog knows what is overdue. That it ends the process is tested where peers really die."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from etp.collectives import c10d
from etp.collectives import watchdog as watchdog_file
from etp.collectives.driver import CudaDriver
from etp.collectives.watchdog import Watchdog
from etp.config import EtpConfig
from etp.errors import EtpCommunicationError


class _Event:
    def __init__(self, happened: bool) -> None:
        self.happened = happened

    def query(self) -> bool:
        return self.happened


def test_what_has_happened_is_forgotten_in_order() -> None:
    watchdog = Watchdog(1000.0, "on rank 1")
    first, second = _Event(happened=True), _Event(happened=False)
    watchdog.expect(first, "first")
    watchdog.expect(second, "second")
    assert watchdog.overdue() is None
    watchdog.timeout_s = 0.0
    assert watchdog.overdue() == "second on rank 1"
    second.happened = True
    assert watchdog.overdue() is None


def test_what_is_stuck_is_watched_however_much_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_file, "_KEEP_AT_MOST", 3)
    watchdog = Watchdog(1000.0, "on rank 1")
    events = [_Event(happened=index != 1) for index in range(6)]
    for index, event in enumerate(events):
        watchdog.expect(event, f"number {index}")
    assert watchdog.overdue() is None
    watchdog.timeout_s = 0.0
    assert watchdog.overdue() == "number 1 on rank 1"
    events[1].happened = events[5].happened = True
    assert watchdog.overdue() is None


@pytest.mark.parametrize(("timeout_s", "limit"), [(None, 77.0), (5.0, 5.0)])
def test_replays_are_watched_where_nobody_has_set_a_time_out(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, limit: float
) -> None:
    """By the process group's then. NCCL's own watchdog, which has its time-out, sees no collective of a replay."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    watched: list[tuple[float, str]] = []
    monkeypatch.setattr(c10d, "sibling_group", lambda group, *_: group)
    monkeypatch.setattr(CudaDriver, "__init__", lambda _: None)
    monkeypatch.setattr(CudaDriver, "allow_calls_during_capture", lambda _: None)
    monkeypatch.setattr(Watchdog, "expect_stream", lambda self, what: watched.append((self.timeout_s, what)))
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=77)))
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda *_: backend)
    try:
        transport = c10d.C10dTransport(dist.group.WORLD, EtpConfig(timeout_s=timeout_s), device=torch.device("cuda", 0))
        transport.watch_replays()
        assert watched == []
        transport.change_mode(capturing=True)
        transport.change_mode(capturing=False)
        transport.watch_replays()
    finally:
        dist.destroy_process_group()
    assert watched == [(limit, "the replay of a CUDA graph")]


def test_no_driver_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    with pytest.raises(EtpCommunicationError, match="no CUDA driver"):
        CudaDriver()
