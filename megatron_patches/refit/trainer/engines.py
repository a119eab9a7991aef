"""The engines that this package can call: a vLLM server, and an ``LLM`` object in this process.

[Note: pausing] vLLM's route ``/pause`` takes 20 ms longer than the engine needs to come to rest. ``/sleep`` at level 0
pauses the scheduler in the same way, and keeps the caches of prefixes and of encoders, which are emptied while the
workers commit. ``/pause`` is used only for ``keep``: in that mode it empties the caches itself, after taking running
requests off them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_patches.refit.control import lease
from megatron_patches.refit.control.adapter_names import ADAPTER_ROUTE, version_name
from megatron_patches.refit.control.credentials import Credentials
from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.control.http_calls import HttpCalls, NotFoundError, NotShownError
from megatron_patches.refit.control.lease import EMPTY_CACHES, EMPTY_ENCODER_CACHES, RESUME, ServerLease
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.trainer.engine_client import AdapterEngine, EngineClient, Joined, PassedEngine, PauseMode

_EMPTYING_S = 10.0  # for users of the prefix cache, such as a KV connector's transfer, to end
_RETRY_S = 0.25
_UP_S = 10.0  # for a server to answer its health check
_HOW_TO_START = (
    "a server must be up before weights are pushed to it, with VLLM_SERVER_DEV_MODE=1 in its environment, "
    '--weight-transfer-config \'{"backend": "etp"}\' and --middleware megatron_patches.refit.vllm.guard.RefitGuard'
)


class HttpEngine:
    """A vLLM server that was started with ``VLLM_SERVER_DEV_MODE=1``, ``--weight-transfer-config`` and a guard.

    Args:
        url: its base URL, such as ``http://10.0.0.5:8000``.
        timeout_s: timeout of one call, in seconds.
        credentials: what to send the server; None for those in the environment.

    Raises:
        ValueError: if ``url`` is not an HTTP URL of a server.
    """

    def __init__(self, url: str, timeout_s: float = 600.0, *, credentials: Credentials | None = None) -> None:
        credentials = credentials or Credentials()
        self._http = HttpCalls(url, timeout_s, credentials)
        self.name = self._http.url
        self._joined = Joined()
        self._lease = ServerLease(self._http)
        self._lease_s = lease.DEFAULT_LEASE_S
        self._paused_by = ""  # token of the session that paused it last
        self._keeps_version = True  # until the server has answered that it does not

    @property
    def server(self) -> str:
        """Identity of the server as reported by its guard, whatever its URL; empty until it is known."""
        return self._http.server

    def world_size(self) -> int:
        """See :class:`EngineClient`."""
        try:
            answer = self._http.call("GET", "get_world_size")
        except NotShownError:
            raise
        except RefitError as error:
            raise RefitError(f"{error}; {_HOW_TO_START}") from error
        if not isinstance(answer.get("world_size"), int):
            raise RefitError(f"{self.name}/get_world_size answered {answer}, without world_size; is it a vLLM server?")
        return int(answer["world_size"])

    def check_up(self) -> None:
        """Calls the server's health check.

        Raises:
            RefitError: if it does not report within seconds that it is up.
        """
        self._http.call("GET", "health", timeout_s=_UP_S)

    def call(self, call: dict[str, Any]) -> None:
        """See :class:`EngineClient`."""
        if "adapter" not in call:  # a session about an adapter pauses nothing
            self._lease_s = float(call.get("lease_s", self._lease_s))
        try:
            self._http.call("POST", "init_weight_transfer_engine", {"init_info": self._joined.told(call)})
        except BaseException:
            if call["call"] == "abandon":
                self._lease.drop()  # the engine stays paused unless its lease runs out
            raise

    def commit(self, version: int, *, reset_cache: bool) -> None:
        """See :class:`EngineClient`. Empties the caches in parallel: a paused server does not fill them."""
        with ThreadPoolExecutor(1, f"refit-emptying-{self.name}") as meanwhile:
            emptied = meanwhile.submit(self._empty_caches) if reset_cache else None
            self.call({"call": "commit", "version": version})
        if emptied is not None:
            emptied.result()

    def set_weight_version(self, version: int) -> None:
        """See :class:`~megatron_patches.refit.trainer.engine_client.VersionKeeper`."""
        if self._keeps_version:
            try:
                self._http.call("POST", "update_weight_version", {"new_version": str(version)})
            except NotFoundError:  # vLLM 0.26
                self._keeps_version = False

    def pause(self, mode: PauseMode) -> None:
        """See :class:`EngineClient`, [Note: pausing] and [Note: leases]."""
        self._paused_by = self._joined.token
        self._lease.take(self._paused_by, self._lease_s)
        route = "pause?" if mode is PauseMode.KEEP else "sleep?level=0&"
        try:
            self._http.call("POST", f"{route}mode={mode.value}", headers={lease.LEASE_HEADER: self._paused_by})
        except BaseException:
            with suppress(RefitError):  # raise the reason why it could not be paused
                self.resume(reset_cache=False)
            raise

    def resume(self, *, reset_cache: bool) -> None:
        """See :class:`EngineClient`."""
        try:
            if reset_cache:
                self._empty_caches()
            self._http.call("POST", RESUME, headers={lease.RESUMES: self._paused_by})
        except BaseException:
            self._lease.drop()
            raise
        self._lease.give_back()

    def is_sleeping(self) -> bool:
        """See :class:`~megatron_patches.refit.trainer.engine_client.Sleeper`."""
        return bool(self._http.call("GET", "is_sleeping").get("is_sleeping"))

    def wake_up(self, tag: str) -> None:
        """See :class:`~megatron_patches.refit.trainer.engine_client.Sleeper`."""
        self._http.call("POST", f"wake_up?tags={tag}")

    def sleep(self) -> None:
        """See :class:`~megatron_patches.refit.trainer.engine_client.Sleeper`."""
        self._http.call("POST", f"sleep?level=1&mode={PauseMode.KEEP.value}")

    def add_adapter(self, adapter: str, version: int, folder: Path, keep: int) -> list[int]:
        """See :class:`megatron_patches.refit.trainer.engine_client.AdapterServer`."""
        asked = {"adapter": adapter, "version": version, "folder": str(folder), "keep": keep}
        try:
            answer = self._http.call("POST", ADAPTER_ROUTE, asked)
        except NotFoundError as error:
            raise RefitError(
                f"{self.name} has no guard, which adds adapters; start it with --middleware "
                "megatron_patches.refit.vllm.guard.RefitGuard"
            ) from error
        return [int(one) for one in answer.get("versions", ())]

    def close(self) -> None:
        """Gives up a pause that is still held, so that the server can resume by itself."""
        self._lease.drop()

    def _empty_caches(self) -> None:
        """Empties the prefix caches, including those of KV connectors, with retries, and then those of encoders.

        Raises:
            RefitError: if they are still in use at the deadline.
        """
        deadline = time.monotonic() + _EMPTYING_S
        while True:
            try:
                if self._http.call("POST", EMPTY_CACHES).get("success") is not False:
                    self._http.call("POST", EMPTY_ENCODER_CACHES)  # only now, as no request uses them any more
                    return
                reason = "something uses it"
            except RefitError as error:
                reason = describe_error(error)
            if time.monotonic() > deadline:
                raise RefitError(
                    f"{self.name} could not empty its prefix cache, which is of older weights ({reason}); "
                    f"POST {self.name}/{EMPTY_CACHES} and {self.name}/{EMPTY_ENCODER_CACHES}, and then "
                    f"{self.name}/{RESUME} if it stays paused"
                )
            time.sleep(_RETRY_S)


def http_engines(urls: Sequence[str], timeout_s: float, credentials: Credentials | None = None) -> list[HttpEngine]:
    """One :class:`HttpEngine` per server.

    Args:
        urls: of :class:`HttpEngine`.
        timeout_s: of :class:`HttpEngine`.
        credentials: of :class:`HttpEngine`.

    Raises:
        ValueError: if one is not an HTTP URL of a server, or is given twice: its workers would wait for each other.
    """
    engines = [HttpEngine(url, timeout_s, credentials=credentials) for url in urls]
    check_given_once(engines)
    return engines


def check_given_once(engines: Sequence[EngineClient]) -> None:
    """Refuses an engine that is given twice: its workers would wait for each other and answer nothing meanwhile.

    Also refuses two engines of one name: in reports, one would stand for both.

    Raises:
        ValueError: with its name.
    """
    names, ids = [engine.name for engine in engines], [_identity(engine) for engine in engines]
    for name, known in zip(names, ids, strict=True):
        if ids.count(known) > 1:
            raise ValueError(f"{known[0]} is given {ids.count(known)} times; give each server once")
        if names.count(name) > 1:
            raise ValueError(
                f"{names.count(name)} engines are named {name!r}, and reports tell engines apart by name; give each "
                "client a name of its own, as its attribute name"
            )


def engine_of(engine: EngineClient) -> EngineClient:
    """The engine that a client calls, which differs from the client if that is for versions of an adapter."""
    return engine.engine if isinstance(engine, AdapterEngine) else engine


def _identity(engine: EngineClient) -> tuple[str, int]:
    """An engine's name for messages, and a number that distinguishes it from engines of the same name."""
    engine = engine_of(engine)
    if isinstance(engine, HttpEngine):
        return f"engine URL {engine.name}", 0
    return engine.name, id(engine._llm if isinstance(engine, LocalEngine) else engine)


class LocalEngine(PassedEngine):
    """A vLLM ``LLM`` object in this process, made with ``weight_transfer_config={"backend": "etp"}``.

    Args:
        llm: the object.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__("the engine in this process")
        self._llm = llm
        self._adapters: dict[str, Any] = {}  # requests for versions of adapters, by name, in the order of their adding

    def world_size(self) -> int:
        """See :class:`EngineClient`."""
        parallel = self._llm.llm_engine.vllm_config.parallel_config
        if parallel.distributed_executor_backend == "external_launcher":
            raise RefitError(
                f"calls of {self.name} reach its own worker alone, as it was made with distributed_executor_backend="
                "'external_launcher'; make it with 'mp', or start a server"
            )
        return int(parallel.world_size_across_dp)

    def call(self, call: dict[str, Any]) -> None:
        """See :class:`EngineClient`. The owner of the object may do anything with it, so ``join`` is admitted first."""
        if call["call"] == "join":
            self._tell({"call": "admit"})
        super().call(call)

    def set_weight_version(self, version: int) -> None:
        """See :class:`~megatron_patches.refit.trainer.engine_client.VersionKeeper`."""
        if hasattr(self._llm, "update_weight_version"):  # not in vLLM 0.26
            self._llm.update_weight_version(str(version))

    def add_adapter(self, adapter: str, version: int, folder: Path, keep: int) -> list[int]:
        """See :class:`megatron_patches.refit.trainer.engine_client.AdapterServer`."""
        from vllm.lora.request import LoRARequest

        name, engine = version_name(adapter, version), self._llm.llm_engine
        # vLLM knows adapters by number. Paths are unique, unlike what several clients of one object would count.
        number = 1 + int.from_bytes(hashlib.sha256(str(folder).encode()).digest()[:4]) % (1 << 30)
        request = LoRARequest(name, number, str(folder))
        try:
            engine.add_lora(request)
        except Exception as error:
            raise RefitError(f"{self.name} does not load {name}: {describe_error(error)}") from error
        self._adapters[name] = request
        served = [known for known in self._adapters if known.rpartition("@")[0] == adapter]
        for old in served[:-keep]:
            engine.remove_lora(self._adapters.pop(old).lora_int_id)
        return [int(kept.rpartition("@")[2]) for kept in served[-keep:]]  # nothing runs between two calls of generate

    def adapter(self, name: str) -> Any:
        """The ``lora_request`` of ``generate`` for a version of an adapter, such as ``math@7``.

        Raises:
            RefitError: if it is not served.
        """
        if name not in self._adapters:
            raise RefitError(f"{self.name} serves no adapter {name}; it serves {', '.join(self._adapters) or 'none'}")
        return self._adapters[name]

    def pause(self, mode: PauseMode) -> None:
        """See :class:`EngineClient`. Nothing runs between two calls of ``generate``, so nothing needs to pause."""
        if mode is PauseMode.KEEP:  # as a server's /pause does in this mode
            self._empty_caches()

    def is_sleeping(self) -> bool:
        """See :class:`~megatron_patches.refit.trainer.engine_client.Sleeper`."""
        return bool(self._llm.llm_engine.is_sleeping())

    def wake_up(self, tag: str) -> None:
        """See :class:`~megatron_patches.refit.trainer.engine_client.Sleeper`."""
        self._llm.wake_up([tag])

    def sleep(self) -> None:
        """See :class:`~megatron_patches.refit.trainer.engine_client.Sleeper`."""
        self._llm.sleep(1, mode=PauseMode.KEEP.value)

    def _tell(self, call: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": call})

    def _empty_caches(self) -> None:
        """Empties the prefix caches, including those of KV connectors, and those of encoders.

        Raises:
            RefitError: if they are still in use.
        """
        if not self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RefitError(f"{self.name} could not empty its prefix cache, which is of older weights")
        self._llm.llm_engine.reset_encoder_cache()
