"""Says which test fails when it fails, and which tests were in progress when a run was ended.

pytest names failures at the end. A run on GPUs may have no end: time there is limited, and ``timeout`` ends it.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

import pytest

LINES = 60
"""How much of a failure is shown at once; enough for what one rank says, the one that failed first."""


def report_at_once(config: pytest.Config) -> None:
    """Let this run report at once, and sum up when it gets SIGTERM. Called when pytest is configured."""
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist, whose controller reports
        return
    config.pluginmanager.register(_AtOnce(config.pluginmanager), "report-at-once")
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


class _AtOnce:
    """Hooks of pytest; those of tests in workers of pytest-xdist come here, too."""

    def __init__(self, plugins: pytest.PytestPluginManager) -> None:
        self._plugins = plugins
        self._began: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._began.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = report.longreprtext if crash is None else crash.message
            self._say(f"FAILED AT ONCE {report.nodeid} ({report.when}, {report.duration:.1f} s)", reason)

    def pytest_keyboard_interrupt(self) -> None:
        for nodeid, began in self._began.items():
            self._say(f"UNDER WAY {nodeid} for {time.monotonic() - began:.1f} s", "")

    def _say(self, line: str, reason: str) -> None:
        terminal: Any = self._plugins.get_plugin("terminalreporter")
        terminal.write("\n")  # behind the dots
        for text in [line, *reason.splitlines()[:LINES]]:
            terminal.write_line(text)
        terminal.flush()
