"""How the trainer calls an inference engine, so that its workers take part in a refit.

[Note: pausing] vLLM's route ``/pause`` answers 20 ms after the engine has come to rest, and has the workers empty
caches of encoders, which no model has that can be refitted. ``/sleep`` at level 0 is the same pause of the scheduler
without either, and leaves the prefix cache, which is emptied while the workers commit. Only for ``keep`` it is not
taken: there ``/pause`` itself empties the cache, and takes requests under way off it.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from typing import Any, Protocol

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.exchange import describe_error
from megatron_patches.refit.resumer import EMPTY_CACHES, RESUME, Resumer

_EMPTYING_S = 10.0  # for what still uses a prefix cache, such as a transfer of a KV connector, to end
_RETRY_S = 0.25
_HOW_TO_START = (
    "a server must be up before weights are pushed to it, with VLLM_SERVER_DEV_MODE=1 in its environment and "
    '--weight-transfer-config \'{"backend": "etp"}\''
)
# Whatever http_proxy says: weights take no proxy either, and one that gives up early would hide how a commit went.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class PauseMode(StrEnum):
    """What becomes of requests that are under way when new weights are committed."""

    WAIT = "wait"
    """They end on the old weights first."""
    ABORT = "abort"
    """They are ended at once."""
    KEEP = "keep"
    """They go on, on the new weights; vLLM first computes anew what they had in the KV cache."""


class EngineClient(Protocol):
    """One engine. Calls block until all of its workers have done their part, and raise where that takes too long.

    How that went is told at the rendezvous; what is raised here is that an engine could not be reached.
    """

    @property
    def name(self) -> str:
        """For messages."""

    def world_size(self) -> int:
        """Number of its workers."""

    def call(self, call: dict[str, Any]) -> None:
        """Makes its workers join the rendezvous, receive a version, or give it up."""

    def commit(self, version: int, *, reset_cache: bool) -> None:
        """Makes the workers of a paused engine commit a version; with ``reset_cache`` it empties its prefix caches."""

    def pause(self, mode: PauseMode) -> None:
        """Lets no request go on, and returns when none does; after an error they do."""

    def resume(self, *, reset_cache: bool) -> None:
        """Ends a pause; with ``reset_cache`` once the prefix caches are empty, and not where they cannot be emptied."""


class Joined:
    """Which session an engine was made to join last: what is asked of it later, it is told, is of that one."""

    def __init__(self) -> None:
        self._token = ""

    def told(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The call with the session's token."""
        self._token = call.get("token", self._token)
        return {**call, "token": self._token}


class HttpEngine:
    """A vLLM server that was started with ``VLLM_SERVER_DEV_MODE=1`` and ``--weight-transfer-config``.

    Args:
        url: its base, such as ``http://10.0.0.5:8000``.
        timeout_s: seconds that one call may take.

    Raises:
        ValueError: if it is no HTTP URL of a server.
    """

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        _check_url(url)
        self.name = url.rstrip("/")
        self._timeout_s = timeout_s
        self._joined = Joined()
        self._resumer = Resumer(self.name)

    def world_size(self) -> int:
        """See :class:`EngineClient`."""
        try:
            answer = self._call("GET", "get_world_size")
        except RefitError as error:
            raise RefitError(f"{error}; {_HOW_TO_START}") from error
        if not isinstance(answer.get("world_size"), int):
            raise RefitError(f"{self.name}/get_world_size answered {answer}, without world_size; is it a vLLM server?")
        return int(answer["world_size"])

    def call(self, call: dict[str, Any]) -> None:
        """See :class:`EngineClient`."""
        self._call("POST", "init_weight_transfer_engine", {"init_info": self._joined.told(call)})

    def commit(self, version: int, *, reset_cache: bool) -> None:
        """See :class:`EngineClient`. Both at once: nothing fills a cache as long as the server is paused."""
        with ThreadPoolExecutor(1, f"refit-emptying-{self.name}") as meanwhile:
            emptied = meanwhile.submit(self._empty_caches) if reset_cache else None
            self.call({"call": "commit", "version": version})
        if emptied is not None:
            emptied.result()

    def pause(self, mode: PauseMode) -> None:
        """See :class:`EngineClient`, and [Note: pausing]."""
        self._resumer.pausing(keep_cache=mode is PauseMode.KEEP)
        keeps = mode is PauseMode.KEEP
        try:
            self._call("POST", f"{'pause?' if keeps else 'sleep?level=0&'}mode={mode.value}")
        except BaseException:
            with suppress(RefitError):  # what counts is why it could not be paused
                self.resume(reset_cache=False)
            raise

    def resume(self, *, reset_cache: bool) -> None:
        """See :class:`EngineClient`."""
        if reset_cache:
            self._empty_caches()
        self._call("POST", RESUME)
        self._resumer.resumed()

    def close(self) -> None:
        """Resumes the server if it is still paused."""
        self._resumer.close()

    def _empty_caches(self) -> None:
        """Empties the prefix caches, those of KV connectors too, which may take some tries.

        Raises:
            RefitError: if something still uses them.
        """
        deadline = time.monotonic() + _EMPTYING_S
        while True:
            try:
                if self._call("POST", EMPTY_CACHES).get("success") is not False:
                    return
                reason = "something uses it"
            except RefitError as error:
                reason = describe_error(error)
            if time.monotonic() > deadline:
                raise RefitError(
                    f"{self.name} could not empty its prefix cache, which is of older weights ({reason}); "
                    f"POST {self.name}/{EMPTY_CACHES}, and then {self.name}/{RESUME} if it stays paused"
                )
            time.sleep(_RETRY_S)

    def _call(self, method: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            f"{self.name}/{route}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with _open(request, timeout=self._timeout_s) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            raise RefitError(f"{self.name}/{route} answered {error.code}: {_shown(error.read())}") from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError):  # once it was reached: before that urllib's own error holds it
                raise RefitError(
                    f"{self.name}/{route} gave no answer within {self._timeout_s:g} s; where it waits for requests to "
                    "end, a longer time-out, or another pause than 'wait', is an option"
                ) from error
            raise RefitError(f"cannot reach {self.name}/{route}: {error}") from error
        try:
            found = json.loads(content) if content else {}
        except ValueError as error:
            raise RefitError(f"{self.name}/{route} answered no JSON but {_shown(content)}") from error
        return found if isinstance(found, dict) else {}


def http_engines(urls: Sequence[str], timeout_s: float) -> list[HttpEngine]:
    """One for each server.

    Args:
        urls: of :class:`HttpEngine`.
        timeout_s: of :class:`HttpEngine`.

    Raises:
        ValueError: if one is no HTTP URL of a server, or given twice: its workers would wait for each other.
    """
    engines = [HttpEngine(url, timeout_s) for url in urls]
    check_given_once(engines)
    return engines


def check_given_once(engines: Sequence[EngineClient]) -> None:
    """Refuses an engine that is given twice: its workers would wait for each other, and answer nothing meanwhile.

    Raises:
        ValueError: naming it.
    """
    ids = [_identity(engine) for engine in engines]
    for known in ids:
        if ids.count(known) > 1:
            raise ValueError(f"{known[0]} is given {ids.count(known)} times; give each server once")


def _identity(engine: EngineClient) -> tuple[str, int]:
    """What it is called in messages, and what tells it from others of that name."""
    if isinstance(engine, HttpEngine):
        return f"engine URL {engine.name}", 0
    return engine.name, id(engine._llm if isinstance(engine, LocalEngine) else engine)


class LocalEngine:
    """A vLLM ``LLM`` object in this process, made with ``weight_transfer_config={"backend": "etp"}``.

    Args:
        llm: the object.
    """

    name = "the engine in this process"

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._joined = Joined()

    def world_size(self) -> int:
        """See :class:`EngineClient`."""
        parallel = self._llm.llm_engine.vllm_config.parallel_config
        if parallel.distributed_executor_backend == "external_launcher":
            raise RefitError(
                f"calls of {self.name} reach its own worker alone, as it was made with distributed_executor_backend="
                "'external_launcher'; make it with 'mp', or start a server"
            )
        return int(parallel.world_size_across_dp)

    def commit(self, version: int, *, reset_cache: bool) -> None:
        """See :class:`EngineClient`."""
        self.call({"call": "commit", "version": version})
        if reset_cache:
            self._empty_caches()

    def call(self, call: dict[str, Any]) -> None:
        """See :class:`EngineClient`."""
        self._llm.init_weight_transfer_engine({"init_info": self._joined.told(call)})

    def pause(self, mode: PauseMode) -> None:
        """See :class:`EngineClient`. Between two calls of ``generate`` nothing is under way, so nothing is paused."""
        if mode is PauseMode.KEEP:  # what a server's pause does in this mode
            self._empty_caches()

    def resume(self, *, reset_cache: bool) -> None:
        """See :class:`EngineClient`."""
        if reset_cache:
            self._empty_caches()

    def _empty_caches(self) -> None:
        """Empties the prefix caches, those of KV connectors too.

        Raises:
            RefitError: if something still uses them.
        """
        if not self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RefitError(f"{self.name} could not empty its prefix cache, which is of older weights")


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # such as a port that is no number
        usable = False
    if not usable or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"engine URL {url!r} must be like http://10.0.0.5:8000 or https://host/path")


def _shown(content: bytes) -> str:
    text = " ".join(content.decode(errors="replace").split())
    return text[:500] or "no reason given"
