"""How the trainer calls an inference engine about a LoRA adapter: as about weights, but nothing is paused.

[Note: adapter versions] For vLLM, version 7 of the adapter ``math`` is a model of its own, ``math@7``: requests name
it, and it has its own cache entries. So adding a version disturbs nothing: no request waits, older versions answer
until they are dropped, and requests that run on a version when it is dropped finish on it. vLLM loads an adapter from
a folder, and may load it again at any later step if it had to evict it. So workers write each version that they have
verified into a folder of its own, and remove the folder once neither a name nor a request refers to the version.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from megatron_patches.refit.control.adapter_names import session_folder, version_name
from megatron_patches.refit.trainer.engine_client import EngineClient, PauseMode


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


class AdapterEngine:
    """One engine, for versions of one adapter; an :class:`megatron_patches.refit.EngineClient`.

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
        self.engine = engine
        self._server: AdapterServer = engine
        self._adapter, self._keep, self._folder, self._token = adapter, keep, folder, ""

    @property
    def name(self) -> str:
        """Name of the engine."""
        return self.engine.name

    def world_size(self) -> int:
        """See :class:`megatron_patches.refit.EngineClient`."""
        return self.engine.world_size()

    def check_up(self) -> None:
        """See :class:`megatron_patches.refit.EngineClient`."""
        self.engine.check_up()

    def call(self, call: Mapping[str, Any]) -> None:
        """See :class:`megatron_patches.refit.EngineClient`."""
        told = {**call, "adapter": self._adapter}
        if call["call"] == "join":
            self._token = call["token"]
            told["folder"] = self._folder
        self.engine.call(told)

    def commit(self, version: int, *, reset_cache: bool) -> None:  # noqa: ARG002 - cache entries are of a version
        """Makes the workers move a version's files to their final folder."""
        self.call({"call": "commit", "version": version})

    def add(self, version: int) -> None:
        """Makes the engine serve a version whose files are in their final folder, and drops older versions.

        Raises:
            RefitError: if the engine does not serve the version.
        """
        folder = session_folder(self._folder, self._token) / version_name(self._adapter, version)
        used = self._server.add_adapter(self._adapter, version, folder, self._keep)
        if used:
            self.call({"call": "keep", "versions": used})

    def pause(self, mode: PauseMode) -> None:
        """Does nothing; see [Note: adapter versions]."""

    def resume(self, *, reset_cache: bool) -> None:
        """Does nothing."""
