"""The trainer's side of backend ``etp`` in vLLM's own weight transfer contract, for vLLM 0.32 and 0.33.

::

    engine = WeightTransferTrainerFactory.trainer_init(
        EtpTrainerInitInfo(world_size=1, rank=0), client=GuardedSyncClient(url), source=ModuleSource(model)
    )
    engine.send_weights()

It publishes with a :class:`megatron_patches.refit.trainer.publisher.WeightPublisher` of the first rank. Importing this
module registers the backend in the trainer's process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from vllm import __version__
from vllm.distributed.weight_transfer import (
    RayVLLMWeightSyncClient,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo

from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.errors import UnsupportedEngineError
from megatron_patches.refit.parties.terms import MemoryMode
from megatron_patches.refit.ray_engine import name_of
from megatron_patches.refit.trainer.contract_engine import ContractEngine, GuardedSyncClient
from megatron_patches.refit.trainer.engine_client import PauseMode, SleepMode
from megatron_patches.refit.trainer.push_options import RefitOptions
from megatron_patches.refit.trl import EtpWeightTransfer

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

    Each :meth:`send_weights` is one version. As vLLM has it, every rank iterates the source, and the first one copies
    its whole tensors and sends them. The engine joins with the first version. Each actor of a client of several is an
    engine of its own, which receives and commits versions without regard to the others.

    Args:
        init_info: what it needs to know.
        client: the client of the engine, or of Ray actors.
        source: the weights.
    """

    init_info_cls = EtpTrainerInitInfo

    def __init__(self, init_info: EtpTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._engines = _engines(client, init_info.world_size, init_info.options.timeout_s)
        self._transfer = EtpWeightTransfer(
            self._engines,
            config=init_info.config,
            options=replace(init_info.options, pause=PauseMode.KEEP),
            first_version=init_info.first_version,
        )

    @classmethod
    def trainer_init(
        cls, init_info: EtpTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Makes one, on every rank of the trainer.

        Raises:
            ValueError: if there is no source, its ranks hold parts of the model, or actors cannot have equally many
                workers.
        """
        if source is None:
            raise ValueError("source is None; pass a WeightSource, such as ModuleSource(model)")
        if not _is_whole(source):
            raise ValueError(
                "source does not yield whole tensors of all of the model on the first rank (held_names, or owners and "
                "iter_full since vLLM 0.33); use WeightPublisher, which sends each rank's part from that rank"
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
        """Number of the last version that was sent, on the first rank; ``first_version - 1`` before."""
        return self._transfer.version

    def send_weights(self) -> None:
        """Sends the source's weights as the next version, on every rank. The engine serves it when this returns.

        Raises:
            RefitError: on the first rank, if the engine does not serve it, with its reason. It serves what it served
                before, under the label of that version; the next call connects again.
        """
        if not self.is_sender:
            for _ in _whole_tensors(self.source):  # to gather a tensor may take all ranks
                pass
            return
        try:
            self._transfer.send_weights(_whole_tensors(self.source))
            self._transfer.resume()
        except BaseException:
            self._give_up()
            raise

    def shutdown(self) -> None:
        """Disconnects and frees the copies. The engine keeps what it serves."""
        self._transfer.destroy()

    def _give_up(self) -> None:
        """Ends the update and the connection after a failure, whose reason is what the caller is to learn."""
        ends = [(engine.name, engine.end_update) for engine in self._engines]
        for name, end in [*ends, ("the trainer", self._transfer.destroy)]:
            try:
                end()
            except Exception as error:  # noqa: BLE001 - whatever it is, the first failure is raised
                logger.warning("refit: %s: %s", name, describe_error(error))


def _is_whole(source: Any) -> bool:
    """Whether the first rank yields whole tensors of all of the model."""
    if not hasattr(WeightSource, "iter_full"):  # vLLM 0.32
        return source.held_names() is None
    return source.implements_iter_full() and len(source.owned_names(0)) == len(source.metadata)


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
