"""What the trainer asks of an inference engine. Whatever has these methods is an engine, however it is reached.

[Note: sleeping] An engine in vLLM's sleep mode has released the memory of weights and KV cache; at level 1 it keeps the
weights in host memory, at level 2 nowhere. It answers no request until both are awake again. So a push does not pause
it: it wakes the weights first, and the KV cache once the workers serve the version. If the version fails, the cache
stays asleep, because the weights may be of no version. vLLM 0.26.0 can put an engine to sleep only if it is wholly
awake, and waking everything would map a second time what is awake already.

[Note: adapter versions] For vLLM, version 7 of the adapter ``math`` is a model of its own, ``math@7``: requests name
it, and it has its own cache entries. So adding a version disturbs nothing: no request waits, older versions answer
until they are dropped, and requests that run on a version when it is dropped finish on it. vLLM loads an adapter from
a folder, and may load it again at any later step if it had to evict it. So workers write each version that they have
verified into a folder of its own, and remove the folder once neither a name nor a request refers to the version.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from megatron_patches.refit.control.adapter_names import session_folder, version_name
from megatron_patches.refit.control.exchange import describe_error

logger = logging.getLogger(__name__)


class PauseMode(StrEnum):
    """What happens to running requests when new weights are committed."""

    WAIT = "wait"
    """They finish on the old weights first."""
    ABORT = "abort"
    """They are aborted."""
    KEEP = "keep"
    """They continue on the new weights; vLLM first recomputes their KV cache."""


class SleepMode(StrEnum):
    """What a push does with an engine that sleeps at level 1 or 2, as vLLM calls it; see [Note: sleeping]."""

    REFUSE = "refuse"
    """The push to it fails. It serves nothing until its owner wakes it."""
    WAKE = "wake"
    """Wakes its weights, and its KV cache once it serves the version."""
    RESTORE = "restore"
    """As ``WAKE``, and then puts it back to sleep at level 1, which keeps the version in host memory."""


class EngineClient(Protocol):
    """One engine. Calls block until all of its workers have done their part, and raise on timeout.

    Workers report results at the rendezvous; these methods raise if an engine could not be reached. Calls after a
    ``join`` must carry the token of that call, so that workers do nothing for a trainer that has been replaced;
    :class:`Joined` adds it. One method is called at a time, in any thread; only :meth:`check_up` may come while another
    call hangs. docs/publish.md has an example.
    """

    @property
    def name(self) -> str:
        """Name for messages and reports."""

    def world_size(self) -> int:
        """Number of its workers."""

    def check_up(self) -> None:
        """Raises unless it can be reached."""

    def call(self, call: dict[str, Any]) -> None:
        """Passes a call to all of its workers; see :class:`megatron_patches.refit.vllm.refit_call.RefitCall`."""

    def commit(self, version: int, *, reset_cache: bool) -> None:
        """Makes the workers of a paused engine commit a version.

        ``reset_cache`` also empties its caches: of prefixes, and of what encoders of images or sounds have computed.
        """

    def pause(self, mode: PauseMode) -> None:
        """Stops all requests. Returns once none is running; on an error, requests continue."""

    def resume(self, *, reset_cache: bool) -> None:
        """Ends a pause. With ``reset_cache``, empties these caches first; if that fails, the pause continues."""


def why_not_up(engine: EngineClient) -> str | None:
    """Why an engine cannot be reached; None if it can."""
    try:
        engine.check_up()
    except Exception as error:  # noqa: BLE001 - a program's own client raises what it likes
        reason = describe_error(error)
        logger.debug("refit: %s is not up: %s", engine.name, reason)
        return reason
    return None


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can sleep; with the methods of :class:`EngineClient`. See [Note: sleeping]."""

    def is_sleeping(self) -> bool:
        """Whether it sleeps or is paused."""

    def wake_up(self, tag: str) -> None:
        """Wakes its ``weights`` or its ``kv_cache``. Once both are awake, requests continue."""

    def sleep(self) -> None:
        """Puts it to sleep at level 1. Requests under way continue when it wakes up."""


@runtime_checkable
class VersionKeeper(Protocol):
    """An engine that keeps a version of its weights; with the methods of :class:`EngineClient`.

    vLLM has one from 0.32 on: ``/weight_info`` shows it, and each answer can name the versions of its tokens.
    """

    def set_weight_version(self, version: int) -> None:
        """Sets it after a commit, before the pause ends. Does nothing if the engine's release has none."""


class Joined:
    """Adds to later calls the token of the session that an engine joined last.

    A call about an adapter brings the token of the adapter's own session, passes unchanged, and changes nothing here.

    Attributes:
        token: the token of that session.
    """

    def __init__(self) -> None:
        self.token = ""

    def told(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The call with the session's token added, unless it has one."""
        if call["call"] == "join" and "adapter" not in call:
            self.token = call["token"]
        return {"token": self.token, **call}


class PassedEngine(ABC):
    """An engine whose calls are passed on in a way of their own, and which is paused by whoever made it, if at all.

    Args:
        name: name for messages and reports.
        workers: number of its workers, unless a subclass asks the engine for it.
        admits: whether nobody else makes its workers admit the trainer. Anyone who can call it can do anything with it.
    """

    def __init__(self, name: str, workers: int = 0, *, admits: bool = True) -> None:
        self.name, self._workers, self._admits = name, workers, admits
        self._joined = Joined()

    def world_size(self) -> int:
        """See :class:`EngineClient`.

        Raises:
            RefitError: if it cannot be called, before anybody waits for its workers.
        """
        if self._admits:
            self._tell({"call": "admit"})
        return self._workers

    def check_up(self) -> None:  # noqa: B027 - not all have a call for it
        """Does nothing, where there is no call for it."""

    def call(self, call: dict[str, Any]) -> None:
        """See :class:`EngineClient`."""
        self._tell(self._joined.told(call))

    def commit(self, version: int, *, reset_cache: bool) -> None:
        """See :class:`EngineClient`."""
        self.call({"call": "commit", "version": version})
        if reset_cache:
            self._empty_caches()

    def pause(self, mode: PauseMode) -> None:  # noqa: B027 - as above
        """Does nothing; see the class."""

    def resume(self, *, reset_cache: bool) -> None:
        """Empties the caches if asked to."""
        if reset_cache:
            self._empty_caches()

    @abstractmethod
    def _tell(self, call: dict[str, Any]) -> None:
        """Passes a call on."""

    def _empty_caches(self) -> None:  # noqa: B027 - as above
        """Empties the prefix caches, where there is a call for it."""


@runtime_checkable
class AdapterServer(Protocol):
    """An engine that serves adapters: a :class:`~megatron_patches.refit.EngineClient` with more."""

    def add_adapter(self, adapter: str, version: int, folder: Path, keep: int) -> list[int]:
        """Makes vLLM serve a version, and drops the oldest ones beyond ``keep``.

        Args:
            adapter: name of the adapter.
            version: number of the version, whose files all workers have written.
            folder: where they are.
            keep: how many versions requests may name.

        Returns:
            The versions of the adapter to which a name or a request still refers; empty if that is unknown.

        Raises:
            RefitError: if vLLM does not serve the version; nothing was dropped then.
        """


class AdapterEngine(PassedEngine):
    """One engine, for versions of one adapter. It is never paused; see [Note: adapter versions].

    Args:
        engine: the engine, with the methods of :class:`AdapterServer`.
        adapter: name of the adapter.
        keep: how many versions requests may name.
        folder: folder on the engine's hosts for the versions' files.

    Attributes:
        engine: the engine.
    """

    def __init__(self, engine: EngineClient, adapter: str, keep: int, folder: str) -> None:
        if not isinstance(engine, AdapterServer):
            raise TypeError(f"{engine.name} is a {type(engine).__name__}, which has no method add_adapter")
        super().__init__(engine.name)
        self.engine = engine
        self._server: AdapterServer = engine
        self._adapter, self._keep, self._folder = adapter, keep, folder

    def world_size(self) -> int:
        """See :class:`megatron_patches.refit.EngineClient`."""
        return self.engine.world_size()

    def check_up(self) -> None:
        """See :class:`megatron_patches.refit.EngineClient`."""
        self.engine.check_up()

    def add(self, version: int) -> None:
        """Makes the engine serve a version whose files are in their final folder, and drops older versions.

        Raises:
            RefitError: if the engine does not serve the version.
        """
        folder = session_folder(self._folder, self._joined.token) / version_name(self._adapter, version)
        used = self._server.add_adapter(self._adapter, version, folder, self._keep)
        if used:
            self.call({"call": "keep", "versions": used})

    def _tell(self, call: dict[str, Any]) -> None:
        folder = {"folder": self._folder} if call["call"] == "join" else {}
        self.engine.call({**call, **folder, "adapter": self._adapter})
