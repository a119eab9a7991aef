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
from megatron_patches.refit.trainer.engine_client import Joined, PauseMode
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


class ContractEngine:
    """An :class:`megatron_patches.refit.EngineClient` behind a client; see [Note: phases].

    It neither pauses the engine nor empties caches, for which the contract has no calls: its user does.

    Args:
        client: the client of one engine.
        workers: number of the engine's workers, which the contract has no call to ask for.
        actor: name of the Ray actor that the client calls, if it calls one. Anyone who can call an actor can do
            anything with it, so it is made to admit the trainer first. A server's guard does that itself.
        timeout_s: seconds for one call. vLLM's client of Ray actors has no time-out of its own.

    Attributes:
        name: that of the actor, the client's ``base_url``, or the name of its class.
    """

    def __init__(
        self, client: WeightSyncClient, workers: int, actor: str | None = None, timeout_s: float = 600.0
    ) -> None:
        self.name = actor or str(getattr(client, "base_url", type(client).__name__))
        self._client, self._workers, self._admits = client, workers, actor is not None
        self._timeout_s = timeout_s
        self._joined = Joined()
        self._late: Future[None] | None = None  # a call without an answer in time
        self._is_open = False  # whether an update was started and not finished

    def world_size(self) -> int:
        """See :class:`megatron_patches.refit.EngineClient`.

        Raises:
            RefitError: if the actor is dead, before anybody waits for its workers.
        """
        if self._admits:
            self._init({"call": "admit"})
        return self._workers

    def check_up(self) -> None:
        """Does nothing: the contract has no call for it."""

    def call(self, call: dict[str, Any]) -> None:
        """See :class:`megatron_patches.refit.EngineClient`.

        Raises:
            RefitError: if the client gives no answer in time, or has given none to an earlier call.
        """
        told = self._joined.told(call)
        if call["call"] != "receive":
            self._init(told)
            return
        self._ask("start_weight_update", self._client.start_weight_update)
        self._is_open = True
        del told["call"]
        self._ask("update_weights", lambda: self._client.update_weights(told))

    def commit(self, version: int, *, reset_cache: bool) -> None:  # noqa: ARG002 - see the class
        """See :class:`megatron_patches.refit.EngineClient`."""
        self.call({"call": "commit", "version": version})

    def set_weight_version(self, version: int) -> None:
        """Finishes the update of a version that serves, with its label.

        See :class:`megatron_patches.refit.trainer.engine_client.VersionKeeper`.
        """
        self._finish(str(version))

    def end_update(self) -> None:
        """Finishes an update whose version does not serve, without a label. Does nothing if none is open."""
        if self._is_open:
            self._finish(None)

    def pause(self, mode: PauseMode) -> None:
        """Does nothing; see the class."""

    def resume(self, *, reset_cache: bool) -> None:
        """Does nothing; see the class."""

    def _finish(self, label: str | None) -> None:
        self._is_open = False  # first: a worker raises if it is told twice, as its answer may be lost
        self._ask("finish_weight_update", lambda: self._client.finish_weight_update(label))

    def _init(self, told: dict[str, Any]) -> None:
        what = f"init_weight_transfer_engine ({told['call']})"
        self._ask(what, lambda: self._client.init_weight_transfer_engine(told))

    def _ask(self, what: str, ask: Callable[[], None]) -> None:
        """Calls the client in a thread of its own. No call begins before the one before it has its answer."""
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
