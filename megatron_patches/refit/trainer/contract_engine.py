"""An engine behind a client of vLLM's own weight transfer contract, which has four calls: init, start, update, finish.

[Note: phases] A version takes the calls ``start``, ``update`` (the workers begin to receive), ``init`` with ``commit``
(they vote and commit), and ``finish`` with the version's label. ``finish`` cannot commit: vLLM labels the weights after
it unless a worker raises, and workers must not raise (see [Note: calls] in ``refit/vllm/engine.py``). So it comes once
the workers have reported what they serve, with the label if they committed, and without one otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from megatron_patches.refit.control.credentials import Credentials
from megatron_patches.refit.control.http_calls import HttpCalls
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.trainer.engine_client import PassedEngine
from megatron_patches.refit.transports.worker import Worker


class WeightSyncClient(Protocol):
    """vLLM's ``VLLMWeightSyncClient``. Calls block until all workers have answered."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """As ``/init_weight_transfer_engine``."""

    def start_weight_update(self) -> None:
        """As ``/start_weight_update``."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As ``/update_weights``."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """As ``/finish_weight_update``."""


class GuardedSyncClient:
    """A :class:`WeightSyncClient` for a server with a guard: unlike vLLM's HTTP client, it shows the server's secret.

    Args:
        base_url: base URL of the server, such as ``http://10.0.0.5:8000``.
        timeout: timeout of one call, in seconds.
        credentials: what to send the server; None for those in the environment.

    Attributes:
        base_url: as given, without a trailing slash.

    Raises:
        ValueError: if ``base_url`` is not an HTTP URL of a server.
    """

    def __init__(self, base_url: str, timeout: float = 300.0, *, credentials: Credentials | None = None) -> None:
        self._http = HttpCalls(base_url, timeout, credentials or Credentials())
        self.base_url = self._http.url

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See :class:`WeightSyncClient`."""
        self._http.call("POST", "init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """See :class:`WeightSyncClient`."""
        self._http.call("POST", "start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See :class:`WeightSyncClient`."""
        self._http.call("POST", "update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See :class:`WeightSyncClient`."""
        body = None if weight_version is None else {"weight_version": weight_version}
        self._http.call("POST", "finish_weight_update", body)


class ContractEngine(PassedEngine):
    """An :class:`megatron_patches.refit.EngineClient` behind a client; see [Note: phases].

    It neither pauses the engine nor empties caches, for which the contract has no calls: its user does.

    Args:
        client: the client of one engine.
        workers: number of the engine's workers, which the contract has no call to ask for.
        actor: name of the Ray actor that the client calls, if it calls one. It is made to admit the trainer, which a
            server's guard does itself.
        timeout_s: seconds for one call. vLLM's client of Ray actors has no time-out of its own.

    Attributes:
        name: that of the actor, the client's ``base_url``, or the name of its class.
    """

    def __init__(
        self, client: WeightSyncClient, workers: int, actor: str | None = None, timeout_s: float = 600.0
    ) -> None:
        name = actor or str(getattr(client, "base_url", type(client).__name__))
        super().__init__(name, workers, admits=actor is not None)
        self._client, self._timeout_s = client, timeout_s
        self._late: Future[None] | None = None  # a call without an answer in time
        self._is_open = False  # whether an update was started and not finished

    def set_weight_version(self, version: int) -> None:
        """Finishes the update of a version that serves, with its label.

        See :class:`megatron_patches.refit.trainer.engine_client.VersionKeeper`.
        """
        self._finish(str(version))

    def end_update(self) -> None:
        """Finishes an update whose version does not serve, without a label. Does nothing if none is open."""
        if self._is_open:
            self._finish(None)

    def _finish(self, label: str | None) -> None:
        self._is_open = False  # first: a worker raises if it is told twice, as its answer may be lost
        self._ask("finish_weight_update", lambda: self._client.finish_weight_update(label))

    def _tell(self, call: dict[str, Any]) -> None:
        what = call["call"]
        if what != "receive":
            told = f"init_weight_transfer_engine ({what})"
            self._ask(told, lambda: self._client.init_weight_transfer_engine(call))
            return
        self._ask("start_weight_update", self._client.start_weight_update)
        self._is_open = True
        info = {name: value for name, value in call.items() if name != "call"}
        self._ask("update_weights", lambda: self._client.update_weights(info))

    def _ask(self, what: str, ask: Callable[[], None]) -> None:
        """Calls the client in a thread of its own. No call begins before the one before it has its answer.

        Raises:
            RefitError: if the client gives no answer in time, or has given none to an earlier call.
        """
        if self._late is not None and not self._late.done():
            raise RefitError(f"{self.name} has not answered an earlier call yet, so {what} is not called")
        caller = Worker(f"refit-contract-{self.name}")
        called = caller.submit(ask)
        caller.close(0.0)
        try:
            called.result(self._timeout_s)
        except TimeoutError as error:
            if called.done():  # the client's own
                raise
            self._late = called
            raise RefitError(
                f"{self.name} gave no answer to {what} within {self._timeout_s:g} s; its log says what it is at. If it "
                "only needs longer, raise timeout_s of RefitOptions"
            ) from error
