"""The trainer's side of backend ``etp`` in vLLM's own weight transfer contract, for vLLM 0.32 and 0.33.

::

    engine = WeightTransferTrainerFactory.trainer_init(
        EtpTrainerInitInfo(world_size=1, rank=0), client=GuardedSyncClient(url), source=ModuleSource(model)
    )
    engine.send_weights()

It publishes with a :class:`megatron_patches.refit.trainer.publisher.WeightPublisher`: of all ranks, each of which sends
what it holds, if the source can tell (``iter_local``, since vLLM 0.33), otherwise of the first rank, which sends whole
tensors. Importing this module registers the backend in the trainer's process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.distributed as dist
from vllm import __version__
from vllm.distributed.weight_transfer import (
    RayVLLMWeightSyncClient,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo

from megatron_patches.refit.control.exchange import default_exchange, describe_error, on_first
from megatron_patches.refit.control.messages import Held
from megatron_patches.refit.errors import RefitError, UnsupportedEngineError
from megatron_patches.refit.parties.terms import MemoryMode
from megatron_patches.refit.ray_engine import name_of
from megatron_patches.refit.source.live_memory import LiveTensor
from megatron_patches.refit.source.modules import HeldBlock, ModuleSource, cut_out
from megatron_patches.refit.trainer.contract_engine import ContractEngine, GuardedSyncClient
from megatron_patches.refit.trainer.engine_client import PauseMode, SleepMode
from megatron_patches.refit.trainer.publisher import WeightPublisher
from megatron_patches.refit.trainer.push_options import OnEngineFailure, RefitOptions
from megatron_patches.refit.trl import EtpWeightTransfer, StayingCopies, module_of

__all__ = ["EtpTrainerEngine", "EtpTrainerInitInfo", "GuardedSyncClient"]

logger = logging.getLogger(__name__)

_RELEASES = ("0.32.", "0.33.")
if not __version__.startswith(_RELEASES):
    raise UnsupportedEngineError(
        f"vLLM's contract of trainers is served with vLLM 0.32.0 and 0.33.0, and this is {__version__}, where it "
        "differs; use WeightPublisher, which pushes into servers of all"
    )


@dataclass
class EtpTrainerInitInfo(TrainerInitInfo):
    """What the trainer's side needs to know. ``rank``, of this process among the trainer's, is a keyword.

    Attributes:
        backend: vLLM's name of the backend.
        world_size: number of workers behind the client (TP x PP x DP); actors of one client have equally many.
        config: content of ``config.json``, with which the engine compares its own; None to compare only names, shapes
            and dtypes.
        options: how to push. ``pause`` has no effect: pause the server yourself.
        first_version: number of the first version, at least 0. ``/weight_info`` shows the version that serves.

    Raises:
        ValueError: if ``world_size`` is not positive, or an option needs calls that the contract does not have.
    """

    backend: ClassVar[str] = "etp"

    world_size: int
    config: Mapping[str, Any] | None = None
    options: RefitOptions = field(default_factory=RefitOptions)
    first_version: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size is {self.world_size}; it is the number of the engine's workers, at least 1")
        if self.options.memory is MemoryMode.IN_PLACE:
            raise ValueError(
                "options.memory is in_place, for which the engine must pause, and vLLM's contract has no call for "
                "that; use beside, or WeightPublisher"
            )
        if self.options.sleeping is not SleepMode.REFUSE:
            raise ValueError(
                f"options.sleeping is {self.options.sleeping.value}, and vLLM's contract has no call to wake an "
                "engine; wake it yourself, or use WeightPublisher"
            )


class EtpTrainerEngine(TrainerWeightTransferEngine):
    """vLLM's trainer engine of the backend ``etp``; made by ``WeightTransferTrainerFactory.trainer_init``.

    Each :meth:`send_weights` is one version. Every rank copies what it holds, if the source tells which that is, and
    sends it. Otherwise, as vLLM has it, every rank iterates whole tensors, and the first one copies and sends them. The
    engine joins with the first version. Each actor of a client of several is an engine of its own, which receives and
    commits versions without regard to the others.

    Args:
        init_info: what it needs to know.
        client: the client of the engine, or of Ray actors.
        source: the weights.
    """

    init_info_cls = EtpTrainerInitInfo

    def __init__(self, init_info: EtpTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._engines = _engines(client, init_info.world_size, init_info.options.timeout_s)
        way = _OfAllRanks if _tells_pieces(source) else _OfTheFirstRank
        self._way = way(source, self._engines, init_info)

    @classmethod
    def trainer_init(
        cls, init_info: EtpTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Makes one, on every rank of the trainer.

        Raises:
            ValueError: if there is no source, it yields neither pieces nor all whole tensors, ``rank`` is not that of
                the default process group, or actors cannot have equally many workers.
        """
        if source is None:
            raise ValueError("source is None; pass a WeightSource, such as ModuleSource(model)")
        if not _tells_pieces(source) and not _is_whole(source):
            raise ValueError(
                "source does not yield whole tensors of all of the model on the first rank (held_names, or since vLLM "
                "0.33 owners); implement iter_local, or use WeightPublisher: with both, each rank sends its own part"
            )
        rank = dist.get_rank() if dist.is_initialized() else 0
        if _tells_pieces(source) and init_info.rank != rank:
            raise ValueError(
                f"rank is {init_info.rank}, and {rank} in the default process group; they must be equal, because all "
                "ranks of that group send what they hold"
            )
        if isinstance(client, RayVLLMWeightSyncClient):
            actors = len(client.handles)
            if not actors or init_info.world_size % actors:
                raise ValueError(
                    f"world_size is {init_info.world_size}, and client has {actors} actors; it is the number of all "
                    "their workers, of which each actor has equally many. Actors of several sizes each need a client "
                    "of their own"
                )
        return cls(init_info, client=client, source=source)

    @property
    def version(self) -> int:
        """Number of the last version that was sent, on ranks that send; ``first_version - 1`` before."""
        return self._way.version

    def send_weights(self) -> None:
        """Sends the source's weights as the next version, on every rank. The engine serves it when this returns.

        Raises:
            RefitError: on ranks that send, if the engine does not serve it, with its reason. It serves what it served
                before, under the label of that version; the next call connects again.
        """
        try:
            self._way.send()
        except BaseException:
            self._give_up()
            raise

    def shutdown(self) -> None:
        """Disconnects and frees the copies. The engine keeps what it serves."""
        self._way.destroy()

    def _give_up(self) -> None:
        """Ends the update and the connection after a failure, whose reason is what the caller is to learn."""
        ends = [(engine.name, engine.end_update) for engine in self._engines]
        for name, end in [*ends, ("the trainer", self._way.destroy)]:
            try:
                end()
            except Exception as error:  # noqa: BLE001 - whatever it is, the first failure is raised
                logger.warning("refit: %s: %s", name, describe_error(error))


class _OfTheFirstRank:
    """Sends whole tensors from the first rank."""

    def __init__(self, source: WeightSource, engines: Sequence[ContractEngine], init_info: EtpTrainerInitInfo) -> None:
        self._source, self._sends = source, init_info.is_sender
        self._transfer = EtpWeightTransfer(
            engines, config=init_info.config, options=_options(init_info), first_version=init_info.first_version
        )

    @property
    def version(self) -> int:
        return self._transfer.version

    def send(self) -> None:
        if not self._sends:
            for _ in _whole_tensors(self._source):  # to gather a tensor may take all ranks
                pass
            return
        self._transfer.send_weights(_whole_tensors(self._source))
        self._transfer.resume()

    def destroy(self) -> None:
        self._transfer.destroy()


class _OfAllRanks:
    """Sends from each rank what it holds. What fails on one fails on all, with the same reason."""

    def __init__(self, source: Any, engines: Sequence[ContractEngine], init_info: EtpTrainerInitInfo) -> None:
        self._source = _Pieces(source, init_info.rank, init_info.config)
        self._engines, self._options, self._exchange = engines, _options(init_info), default_exchange()
        self.version = init_info.first_version - 1
        self._publisher: WeightPublisher | None = None

    def send(self) -> None:
        self._source.copy()
        if self._publisher is None:
            publisher = self._publisher = WeightPublisher(self._source, options=self._options)
            on_first(self._exchange, lambda: self._attach_to(publisher))
        self.version += 1
        handle = self._publisher.publish(self.version)  # raises on all ranks or on none
        all_must = self._options.on_engine_failure is OnEngineFailure.RAISE
        on_first(self._exchange, lambda: handle.result().check_served(all_must=all_must))

    def _attach_to(self, publisher: WeightPublisher) -> None:
        for engine in self._engines:
            publisher.attach(engine)

    def destroy(self) -> None:
        publisher, self._publisher = self._publisher, None
        self._source.free()
        if publisher is not None:
            publisher.close()


class _Pieces(ModuleSource):
    """What this rank holds of a model, as a source of vLLM's contract declares it, in memory that stays."""

    def __init__(self, source: Any, rank: int, config: Mapping[str, Any] | None) -> None:
        super().__init__(torch.nn.Module(), config or {})
        self._source, self._copies = source, StayingCopies()
        self._failure: Exception | None = None
        self._shapes = {meta.name: tuple(meta.shape) for meta in source.metadata}
        self._extents = {
            meta.name: _extent_of(meta, rank) for meta in source.metadata if meta.owners is None or rank in meta.owners
        }

    def copy(self) -> None:
        """Copies what the rank holds now. Owners of a tensor may wait for each other; what fails is raised later."""
        try:
            self._copies.take(self._source.iter_local())
            self._check(self._copies.tensors)
        except Exception as error:  # noqa: BLE001 - raised where all ranks learn of it
            self._failure = error
        else:
            self._failure = None
            self._module = module_of(self._copies.tensors)

    def free(self) -> None:
        """Lets go of the copies."""
        self._copies.free()
        self._module = torch.nn.Module()

    def settle(self) -> None:
        """See :class:`megatron_patches.refit.source.weight_source.WeightSource`."""
        if self._failure is not None:
            raise self._failure

    def describe(self, rank: int) -> Held:
        """See :class:`megatron_patches.refit.source.weight_source.WeightSource`."""
        return replace(super().describe(rank), shapes=self._shapes)

    def _check(self, pieces: Mapping[str, torch.Tensor]) -> None:
        for name in {*pieces, *self._extents}:
            piece = tuple(pieces[name].shape) if name in pieces else None
            told = self._extents[name][1] if name in self._extents else None
            if piece != told:
                raise RefitError(f"iter_local yields {name} in shape {piece}; metadata says that this rank has {told}")

    def _described(self) -> list[LiveTensor[HeldBlock]]:
        described = []
        for name, piece in self._named():
            start, extent = self._extents[name]
            dtype = str(piece.dtype).removeprefix("torch.")
            block = HeldBlock(name, self._shapes[name], start, extent, extent, dtype)
            described.append(LiveTensor(block, piece, piece.dtype))
        return described


def _extent_of(meta: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First index and shape of the block of a tensor that one of its owners holds, from vLLM's ``ParamMeta``."""
    if meta.placements is None:
        return cut_out(meta.shape, ())
    coordinate = np.unravel_index(meta.owners.index(rank), meta.mesh_shape)
    axes = zip(meta.placements, meta.mesh_shape, coordinate, strict=True)
    # vLLM has Shard, with a dim, and Replicate.
    cuts = [(placement.dim, size, int(at)) for placement, size, at in axes if hasattr(placement, "dim")]
    return cut_out(meta.shape, cuts)


def _options(init_info: EtpTrainerInitInfo) -> RefitOptions:
    return replace(init_info.options, pause=PauseMode.KEEP)


def _tells_pieces(source: Any) -> bool:
    """Whether each rank yields what it holds, and all know which that is."""
    return hasattr(WeightSource, "iter_local") and bool(source.implements_iter_local())


def _is_whole(source: Any) -> bool:
    """Whether the first rank yields whole tensors of all of the model."""
    if not hasattr(WeightSource, "iter_full"):  # vLLM 0.32
        return source.held_names() is None
    return bool(source.implements_iter_full()) and len(source.owned_names(0)) == len(source.metadata)


def _whole_tensors(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return source.iter_full() if hasattr(WeightSource, "iter_full") else iter(source)  # since vLLM 0.33; in 0.32


def _engines(client: VLLMWeightSyncClient, workers: int, timeout_s: float) -> list[ContractEngine]:
    """The engine behind a client, or one for each Ray actor."""
    if not isinstance(client, RayVLLMWeightSyncClient):
        return [ContractEngine(client, workers, timeout_s=timeout_s)]
    return [
        ContractEngine(RayVLLMWeightSyncClient(actor), workers // len(client.handles), name_of(actor), timeout_s)
        for actor in client.handles
    ]


WeightTransferTrainerFactory.register_engine(EtpTrainerInitInfo.backend, EtpTrainerEngine)
