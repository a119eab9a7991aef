"""What the trainer asks of an inference engine. Whatever has these methods is an engine, however it is reached.

[Note: sleeping] An engine in vLLM's sleep mode has released the memory of weights and KV cache; at level 1 it keeps the
weights in host memory, at level 2 nowhere. It answers no request until both are awake again. So a push does not pause
it: it wakes the weights first, and the KV cache once the workers serve the version. If the version fails, the cache
stays asleep, because the weights may be of no version. vLLM 0.26.0 can put an engine to sleep only if it is wholly
awake, and waking everything would map a second time what is awake already.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable


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
        """Makes the workers of a paused engine commit a version. ``reset_cache`` also empties its prefix caches."""

    def pause(self, mode: PauseMode) -> None:
        """Stops all requests. Returns once none is running; on an error, requests continue."""

    def resume(self, *, reset_cache: bool) -> None:
        """Ends a pause. With ``reset_cache``, empties the prefix caches first; if that fails, the pause continues."""


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

    Attributes:
        token: the token of that session.
    """

    def __init__(self) -> None:
        self.token = ""

    def told(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The call with the session's token added."""
        self.token = call.get("token", self.token)
        return {**call, "token": self.token}
