"""Publishes versions of a model's weights to running engines that come and go.

It is a :class:`megatron_patches.refit.trainer.session.RefitSession` for programs: engines by their URL, a session that
prepares itself, and a handle on the commits that continue after a version was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from megatron_patches.refit.control.kv_scales import KVScalesOfLayers
from megatron_patches.refit.control.messages import Standing
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.trainer.engine_client import EngineClient
from megatron_patches.refit.trainer.engines import HttpEngine
from megatron_patches.refit.trainer.push_options import EngineReport, OnEngineFailure, PushReport, RefitOptions
from megatron_patches.refit.trainer.session import RefitSession

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from megatron_patches.refit.source.weight_source import WeightSource


class WeightPublisher:
    """Publishes a model's weights to engines, from all of its ranks. Also a context manager.

    Every rank makes one. :meth:`publish` is collective over the ranks, in the same order on all; the other methods wait
    for no other rank. Only torch.distributed must be initialized, and not even that in a single process.

    Args:
        model: this rank's part of the model. A module with Hugging Face names: plain (the same on every rank), under
            :func:`etp.shard_module`, or under ``fully_shard`` (FSDP2); see
            :class:`megatron_patches.refit.source.modules.ModuleSource`. Or, with ``vocab_size``, a model of Megatron:
            one GPTModel per virtual pipeline stage, wrapped or not.
        vocab_size: for a Megatron model, number of tokens; embedding rows beyond it are padding. None for others.
        config: for other models, content of ``config.json``, with which engines compare their own. None for the
            module's ``config``, as models of transformers have it; empty to compare only names, shapes and dtypes.
        options: how to push; the same on all ranks. None for the defaults with :attr:`OnEngineFailure.DROP`.
        group: ranks that hold the model, replicas included; None for all processes.
        tp_group: for a Megatron model, tensor-parallel group; None for Megatron's own.

    Raises:
        UnsupportedModelError: if a module has no configuration and none is given, or is in FSDP1.
        ValueError: if the arguments are of different kinds of models.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module] | WeightSource,
        *,
        vocab_size: int | None = None,
        config: Mapping[str, Any] | None = None,
        options: RefitOptions | None = None,
        group: ProcessGroup | None = None,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        self._options = options or RefitOptions(on_engine_failure=OnEngineFailure.DROP)
        self._session = RefitSession(
            model, [], vocab_size=vocab_size, config=config, options=self._options, group=group, tp_group=tp_group
        )
        self._is_prepared = self._is_closed = False
        self._last: PublishHandle | None = None

    def attach(self, engine: str | EngineClient) -> str:
        """Attaches an engine, at any time. Call it on the first rank; on other ranks it does nothing.

        An engine that is attached before the first :meth:`publish` receives that version. A later one begins to join at
        once, without delaying the others, and receives the first version after it has joined. With ``options.fan_out``,
        it meanwhile takes the current version from the engines that serve it.

        Args:
            engine: URL of a vLLM server, or any :class:`megatron_patches.refit.EngineClient`.

        Returns:
            Its name in reports: for a server, its URL.

        Raises:
            ValueError: if it is no URL of a server, is attached already, or has the name of another engine.
            PartyFailedError: if its rendezvous cannot listen.
        """
        client = HttpEngine(engine, self._options.timeout_s) if isinstance(engine, str) else engine
        if self._is_first:
            self._session.attach(client)
        return client.name

    def detach(self, name: str) -> None:
        """Detaches an engine, at any time. It keeps what it serves. On other ranks than the first it does nothing.

        Args:
            name: what :meth:`attach` returned.

        Raises:
            ValueError: if there is no engine of this name.
        """
        if self._is_first:
            self._session.detach(name)

    def publish(self, version: int, *, kv_scales: KVScalesOfLayers | None = None) -> PublishHandle:
        """Sends the current weights to all engines that have joined. Collective.

        The weights may change when it returns: each engine has then received and verified every byte of its own, or has
        failed. Engines commit the version meanwhile, each on its own; the handle tells when they serve it. If an engine
        still commits the version before, this waits up to ``options.lag_s`` for it, once.

        Args:
            version: number of the weights, at least 0 and greater than any published before.
            kv_scales: on the first rank, scales of the engines' KV caches in FP8; see :meth:`RefitSession.push`.

        Raises:
            PartyFailedError: on every rank; old weights keep serving. At the first call, and at one with scales of
                other layers than before: if an engine serves another model or cannot take the scales, or none can be
                reached. At any call: if a scale is not positive and finite. At any call with
                :attr:`OnEngineFailure.RAISE`: if an engine fails, or did not commit the version before; the next call
                connects to all engines again.
            ValueError: if ``version`` is negative or not later than the last one.
            RefitError: if the publisher was closed.
        """
        if self._is_closed:
            raise RefitError("the publisher was closed; make another one")
        try:
            if not self._is_prepared:
                self._session.prepare(kv_scales=kv_scales)
                self._is_prepared = True
            report = self._session.push(version, wait=False, kv_scales=kv_scales)
        except PartyFailedError:
            self._is_prepared = False
            raise
        self._last = PublishHandle(report, self._session.commits())
        return self._last

    def candidates(self) -> str:
        """On the first rank, who can send the newest version that an engine serves, as JSON; see docs/refit.md.

        Raises:
            RefitError: on other ranks, before the first :meth:`publish`, or without :attr:`RefitOptions.fan_out`.
        """
        return self._session.candidates()

    def state(self) -> Mapping[str, Standing]:
        """The state of each engine by name, and on the first rank whom it waits for. Any thread may ask."""
        return self._session.state()

    def close(self) -> None:
        """Waits until the engines serve the last version, or have failed, and disconnects. They keep what they serve.

        The wait ends by itself, at the latest at the time-outs of its steps.
        """
        if self._last is not None and not self._is_closed:
            self._last.result()
        self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:  # the engines commit by themselves what they have received
            self._disconnect()

    @property
    def _is_first(self) -> bool:
        return self._session.exchange.rank == 0

    def _disconnect(self) -> None:
        self._is_closed, self._last = True, None
        self._session.close()


class PublishHandle:
    """A version that was sent, and that engines commit. Its methods wait for no other rank.

    Args:
        report: the report of sending it.
        commits: by engine that received it, a future of what becomes of it there.
    """

    def __init__(self, report: PushReport, commits: Mapping[str, Future[EngineReport]]) -> None:
        self._report, self._commits = report, dict(commits)

    @property
    def version(self) -> int:
        """Number of the weights."""
        return self._report.version

    def done(self) -> bool:
        """Whether every engine that received the version serves it, or has failed."""
        return all(future.done() for future in self._commits.values())

    def result(self, timeout_s: float | None = None) -> PushReport:
        """Waits until every engine that received the version serves it, or has failed.

        Args:
            timeout_s: seconds to wait; None until the time-outs of the commits themselves end it.

        Returns:
            The report. Its ``engines`` say for each engine what became of it (``fate``: ``SERVES``, ``FAILED``,
            ``JOINING``, ``LAGS``, ...), how long each state lasted on this rank (``seconds``), how many bytes it was
            sent (``nbytes``), and why it failed (``reason``).

        Raises:
            TimeoutError: naming the engines that neither serve the version nor have failed in time.
        """
        late = wait(self._commits.values(), timeout_s).not_done
        if late:
            names = [name for name, future in self._commits.items() if future in late]
            raise TimeoutError(f"{', '.join(names)} did not serve version {self.version} within {timeout_s} s")
        return replace(
            self._report,
            engines=dict(self._report.engines) | {name: one.result() for name, one in self._commits.items()},
        )
