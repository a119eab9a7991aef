"""The watchdog knows what is overdue. That it ends the process is tested where peers really die."""

from __future__ import annotations

import pytest

from etp.collectives.driver import CudaDriver
from etp.collectives.watchdog import Watchdog
from etp.errors import EtpCommunicationError


class _Event:
    def __init__(self, happened: bool) -> None:
        self.happened = happened

    def query(self) -> bool:
        return self.happened


def test_what_has_happened_is_forgotten_in_order() -> None:
    watchdog = Watchdog(timeout_s=1000.0)
    first, second = _Event(happened=True), _Event(happened=False)
    watchdog.expect(first, "first")
    watchdog.expect(second, "second")
    assert watchdog.overdue() is None
    watchdog.timeout_s = 0.0
    assert watchdog.overdue() == "second"
    second.happened = True
    assert watchdog.overdue() is None


def test_no_driver_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    with pytest.raises(EtpCommunicationError, match="no CUDA driver"):
        CudaDriver()
