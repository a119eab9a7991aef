"""Engines that are Ray actors. Ray itself is needed only by a program that uses them."""

from __future__ import annotations

from typing import Any

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.trainer.engine_client import PauseMode
from megatron_patches.refit.trainer.engines import LocalEngine

METHOD = "refit"
"""Name of the actor's method through which the trainer calls its engine."""


class RefitActor:
    """Base of an actor's class that has a vLLM ``LLM`` object; :class:`RayEngine` is the trainer's side.

    By default, an actor runs one call at a time. So a refit waits for a call of ``generate`` that is under way, and
    nothing runs while a version is committed. An actor that runs several calls at a time must keep ``generate`` from
    running between a ``pause`` and the ``resume`` after it.

    Args:
        llm: the object, made with ``weight_transfer_config={"backend": "etp"}``.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._engine = LocalEngine(llm)

    def refit(self, method: str, *args: Any, **named: Any) -> Any:
        """Calls a method of :class:`megatron_patches.refit.EngineClient` in the actor's process."""
        return getattr(self._engine, method)(*args, **named)


class RayEngine:
    """An engine that is a Ray actor; with the methods of :class:`megatron_patches.refit.EngineClient`.

    Args:
        actor: handle of an actor whose class derives from :class:`RefitActor`.
        name: name for messages and reports; None for the actor's id.
        timeout_s: seconds for one call, the calls before it in the actor's queue included.

    Raises:
        TypeError: if the actor has no method ``refit``.
    """

    def __init__(self, actor: Any, name: str | None = None, timeout_s: float = 600.0) -> None:
        if not hasattr(actor, METHOD):
            raise TypeError(f"{actor} has no method {METHOD}; derive its class from RefitActor")
        self.actor, self._timeout_s = actor, timeout_s
        self.name = name or name_of(actor)

    def world_size(self) -> int:
        """See :class:`megatron_patches.refit.EngineClient`."""
        return int(self._call("world_size"))

    def check_up(self) -> None:
        """See :class:`megatron_patches.refit.EngineClient`."""
        self._call("check_up")

    def call(self, call: dict[str, Any]) -> None:
        """See :class:`megatron_patches.refit.EngineClient`."""
        self._call("call", dict(call))

    def commit(self, version: int, *, reset_cache: bool) -> None:
        """See :class:`megatron_patches.refit.EngineClient`."""
        self._call("commit", version, reset_cache=reset_cache)

    def set_weight_version(self, version: int) -> None:
        """See :class:`megatron_patches.refit.trainer.engine_client.VersionKeeper`."""
        self._call("set_weight_version", version)

    def pause(self, mode: PauseMode) -> None:
        """See :class:`megatron_patches.refit.EngineClient`."""
        self._call("pause", mode)

    def resume(self, *, reset_cache: bool) -> None:
        """See :class:`megatron_patches.refit.EngineClient`."""
        self._call("resume", reset_cache=reset_cache)

    def is_sleeping(self) -> bool:
        """See :class:`megatron_patches.refit.trainer.engine_client.Sleeper`."""
        return bool(self._call("is_sleeping"))

    def wake_up(self, tag: str) -> None:
        """See :class:`megatron_patches.refit.trainer.engine_client.Sleeper`."""
        self._call("wake_up", tag)

    def sleep(self) -> None:
        """See :class:`megatron_patches.refit.trainer.engine_client.Sleeper`."""
        self._call("sleep")

    def _call(self, method: str, *args: Any, **named: Any) -> Any:
        called = getattr(self.actor, METHOD).remote(method, *args, **named)
        return answer_of(self.name, method, called, self._timeout_s)


def name_of(actor: Any) -> str:
    """What to call an actor, by its handle, in messages and reports."""
    return f"Ray actor {actor._actor_id.hex()}"


def answer_of(name: str, method: str, called: Any, timeout_s: float) -> Any:
    """What an actor's method returns.

    Args:
        name: name of the engine, for messages.
        method: name of the method, for messages.
        called: the reference that the call returned.
        timeout_s: seconds to wait, the calls before it in the actor's queue included.

    Raises:
        RefitError: with the actor's reason; or if it has ended, or gives no answer in time.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

    try:
        return ray.get(called, timeout=timeout_s)
    except GetTimeoutError as error:
        raise RefitError(f"{name} gave no answer to {method} within {timeout_s:.0f} s") from error
    except RayTaskError as error:
        raise RefitError(f"{name}: {error.cause}") from error
    except RayError as error:
        raise RefitError(f"{name} cannot be called: {str(error).splitlines()[0]}") from error
