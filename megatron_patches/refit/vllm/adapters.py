"""Passes the trainer's calls about LoRA adapters to their sessions, one for each adapter."""

from __future__ import annotations

import logging
from collections.abc import Callable

from megatron_patches.refit.control.messages import StateLog
from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.vllm.adapter_files import AdapterFiles
from megatron_patches.refit.vllm.adapter_session import AdapterSession
from megatron_patches.refit.vllm.all_or_none import VOTE_S, AllOrNone
from megatron_patches.refit.vllm.refit_call import RefitCall
from megatron_patches.refit.vllm.worker_session import ServingModel

logger = logging.getLogger(__name__)


class Adapters:
    """The adapters of one worker. See [Note: calls]; ``record`` does nothing, because a model's loader takes no part.

    Args:
        serving: the model that serves.
    """

    def __init__(self, serving: ServingModel) -> None:
        self._serving = serving
        self._sessions: dict[str, tuple[str, AdapterSession]] = {}  # with their tokens, by adapter
        self._files = AdapterFiles()

    def carry_out(self, call: RefitCall) -> None:
        """Carries out one call.

        Raises:
            RefitError: if it fails, or is of a session that has ended.
            ValueError: if it is unknown.
        """
        calls: dict[str, Callable[[RefitCall, AdapterSession], None]] = {
            "record": lambda *_: None,
            "receive": lambda call, session: session.receive(call),
            "commit": self._commit,
            "abandon": lambda _, session: session.abandon(),
            "keep": lambda call, _: self._files.keep(call.adapter, call.versions),
        }
        if call.call == "join":
            self._join(call)
        elif call.call in calls:
            token, session = self._sessions.get(call.adapter, ("", None))
            if session is None or token != call.token:
                if call.call == "commit":  # other workers may vote on it
                    AllOrNone(call.version, -1, VOTE_S).decline()
                raise TransferError(
                    f"asked to {call.call} for the adapter {call.adapter} by another session than the one that this "
                    "engine has joined since; let one trainer at a time push an adapter"
                )
            calls[call.call](call, session)
        else:
            raise ValueError(f"call is {call.call!r}; about an adapter it must be join or one of {', '.join(calls)}")

    def close(self) -> None:
        """Leaves all sessions, and removes the files."""
        for _, session in self._sessions.values():
            session.end()
        self._sessions.clear()
        self._files.close()

    def _join(self, call: RefitCall) -> None:
        _, earlier = self._sessions.pop(call.adapter, ("", None))
        if earlier is not None:
            earlier.end()
        who = f"the trainer of adapter {call.adapter} at {call.host}:{call.port}"
        session = AdapterSession(call, self._serving, self._files, StateLog(who, self._serving.level))
        self._sessions[call.adapter] = call.token, session
        logger.log(self._serving.level, "refit: %s pushes into this engine from now on", who)

    def _commit(self, call: RefitCall, session: AdapterSession) -> None:
        session.commit(call.version)
        logger.log(self._serving.level, "refit: version %d of adapter %s is written", call.version, call.adapter)
