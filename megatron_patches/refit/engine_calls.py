"""Calls engines in parallel with a step of all parties; if an engine cannot be reached, the step fails for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron_patches.refit.assembly import Assembly
from megatron_patches.refit.engines import EngineClient
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.exchange import describe_error


class EngineCalls:
    """Calls to several engines, each in its own thread.

    Args:
        assembly: the caller's connection to the other parties. The caller must be about to take the step.
        what: name of the step.
        after: earlier calls. An engine is called only once it has returned from these, because an engine's methods need
            not be thread-safe.

    Attributes:
        culprits: names of the engines whose calls failed or did not end in time.
    """

    def __init__(self, assembly: Assembly, what: str, after: EngineCalls | None = None) -> None:
        self._assembly, self._step, self._what = assembly, assembly.next_step, what
        self._threads: list[tuple[EngineClient, threading.Thread]] = []
        self._earlier = [] if after is None else after._threads
        self._failures: list[str] = []
        self.culprits: set[str] = set()

    def start(self, engine: EngineClient, call: Mapping[str, Any], check: Callable[[], None] | None = None) -> None:
        """Starts a call.

        Args:
            engine: the engine to call.
            call: fields of the call.
            check: raises if the engine has answered without doing its part.
        """

        def run() -> None:
            for other, thread in self._earlier:
                if other is engine:
                    thread.join()  # ends, because every call of an engine has a timeout
            try:
                engine.call(dict(call))
                if check is not None:
                    check()
            except Exception as error:  # noqa: BLE001 - carried to all parties
                self.culprits.add(engine.name)
                self._failures.append(f"{engine.name}: {describe_error(error)}")
                self._report(self._failures[-1])

        thread = threading.Thread(target=run, name=f"refit-{engine.name}", daemon=True)
        self._threads.append((engine, thread))
        thread.start()

    def finish(self, timeout_s: float) -> None:
        """Waits for all calls.

        Raises:
            PartyFailedError: if a call failed or did not end in time.
        """
        deadline = time.monotonic() + timeout_s
        for engine, thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self.culprits.add(engine.name)
                raise PartyFailedError(f"{engine.name} did not answer a call within {timeout_s:.0f} s", self.culprits)
        if self._failures:
            raise PartyFailedError("; ".join(self._failures), self.culprits)

    def _report(self, reason: str) -> None:
        try:
            self._assembly.fail(self._step, self._what, reason)
        except PartyFailedError as error:
            self._failures.append(str(error))  # the rendezvous is gone; the main thread notices this too
