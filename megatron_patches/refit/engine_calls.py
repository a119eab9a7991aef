"""Calls engines in parallel with a step of all parties, and fails the step for all if one cannot be reached."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from megatron_patches.refit.assembly import Assembly
from megatron_patches.refit.engines import EngineClient
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.exchange import describe_error


class EngineCalls:
    """Calls of several engines, each in a thread.

    Args:
        assembly: the caller's place among the parties, which is about to take the step.
        what: name of the step.
    """

    def __init__(self, assembly: Assembly, what: str) -> None:
        self._assembly, self._step, self._what = assembly, assembly.next_step, what
        self._threads: list[threading.Thread] = []
        self._failures: list[str] = []

    def start(self, engine: EngineClient, call: Mapping[str, Any], check: Callable[[], None] | None = None) -> None:
        """Starts one.

        Args:
            engine: that is called.
            call: what it is told.
            check: raises where the engine has answered, and has not done its part.
        """

        def run() -> None:
            try:
                engine.call(dict(call))
                if check is not None:
                    check()
            except Exception as error:  # noqa: BLE001 - carried to all parties
                self._failures.append(f"{engine.name}: {describe_error(error)}")
                self._report(self._failures[-1])

        thread = threading.Thread(target=run, name=f"refit-{engine.name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def finish(self, timeout_s: float) -> None:
        """Waits for all.

        Raises:
            RefitError: if one failed or does not end.
        """
        for thread in self._threads:
            thread.join(timeout_s)
            if thread.is_alive():
                raise RefitError(f"{thread.name} did not end within {timeout_s:.0f} s")
        if self._failures:
            raise RefitError("; ".join(self._failures))

    def _report(self, reason: str) -> None:
        try:
            self._assembly.fail(self._step, self._what, reason)
        except PartyFailedError as error:
            self._failures.append(str(error))  # the rendezvous is gone, which the main thread notices too
