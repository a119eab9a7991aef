"""Publishes weights from verl: its checkpoint engine ``etp``, for ``checkpoint_engine.custom_backend_module``.

[Note: verl] verl passes a checkpoint engine whole tensors, gathered one by one, and has its own workers, which run
beside vLLM's, load what comes out at the other end. Neither happens here. An actor of :class:`EtpFSDPEngine` passes its
module along with the tensors. The actor's ranks send their own shards, and vLLM's workers, in which the plugin of
``megatron_patches`` runs, receive and commit them. verl's workers get an empty update of the kind ``delta_flush``,
which means "no weight has changed": they leave vLLM alone, and record the step. verl pauses the servers before the
update and resumes them after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Any, Self

import ray
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.framework import FrameworkEngine, VersionSender, checked_options
from megatron_patches.refit.ray_engine import answer_of

if TYPE_CHECKING:
    import torch
    from ray.actor import ActorHandle
    from torch import nn

_MODULE = __name__
_ROLLOUT = "vllm"
_WHERE = "engine_kwargs.etp"
_VERLS_OWN = {
    "pause": "verl pauses its servers itself for every update",
    "on_engine_failure": "verl resumes all of its servers after an update, even one that misses it",
    "lag_s": "no server misses an update",
}


class ModelWeights:
    """An actor's weights: whole tensors one by one, as verl asks for them, and the module that they are gathered from.

    Args:
        tensors: names and whole tensors.
        module: the module, under FSDP2.
        change: what verl does to the tensors, as in "LoRA"; empty if they are the module's own.

    Attributes:
        module: as given.
        change: as given.
    """

    def __init__(self, tensors: Iterator[tuple[str, torch.Tensor]], module: nn.Module, change: str = "") -> None:
        self._tensors, self.module, self.change = tensors, module, change

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._tensors)


# verl takes an engine of a vendor before the one of any vendor, which is its own.
@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cuda", vendor="nvidia")
class EtpFSDPEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine. Its weights come with its module, for :class:`EtpCheckpointEngine`."""

    def get_per_tensor_param(self, **named: Any) -> tuple[ModelWeights, dict[str, Any] | None]:
        """See verl's ``BaseEngine``. Nothing is gathered before the result is iterated."""
        tensors, adapter = super().get_per_tensor_param(**named)
        change = "LoRA" if hasattr(self.module, "peft_config") else ""
        if self._qat_enabled:
            change = "quantization-aware training"
        return ModelWeights(iter(tensors), self.module, change), adapter


@CheckpointEngineRegistry.register("etp")
class EtpCheckpointEngine(CheckpointEngine):
    """Sends the weights of an FSDP2 actor, shard by shard, into verl's vLLM servers; see [Note: verl].

    verl makes one in each rank of the actor and in each worker beside vLLM's.

    Args:
        bucket_size: bytes of verl's ``update_weights_bucket_megabytes``: the memory for packets in one process.
        is_master: whether it is in the actor's first rank; verl says so.
        timeout_s: of :class:`megatron_patches.refit.trainer.push_options.RefitOptions`, and seconds for a call of a
            server.
        options: further options of :class:`megatron_patches.refit.trainer.push_options.RefitOptions`, from
            ``checkpoint_engine.engine_kwargs.etp``.

    Raises:
        ValueError: if an option is unknown, or is one that verl determines.
    """

    wire_format = "delta_flush"

    def __init__(self, bucket_size: int, is_master: bool = False, *, timeout_s: float = 300.0, **options: Any) -> None:
        taken = checked_options(_WHERE, bucket_size, {"timeout_s": timeout_s, **options}, _VERLS_OWN)
        self._sender, self._is_first, self._timeout_s = VersionSender(taken), is_master, timeout_s
        self._host = ""
        self._workers: list[ActorHandle] = []

    @property
    def version(self) -> int:
        """Number of the last version that was sent; -1 before. It is verl's step, unless that was sent before."""
        return self._sender.version

    def prepare(self) -> dict[str, Any]:
        """This process's actor, and the address of its machine."""
        context = ray.get_runtime_context()
        return {"actor": context.current_actor, "host": ray.util.get_node_ip_address().strip("[]")}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tells the actor's ranks the address of their first machine, and which workers there are beside vLLM's.

        Args:
            actor_wg_world_size: number of the actor's ranks.
            rollout_world_size: number of the workers beside vLLM's.
            metadata: what :meth:`prepare` returned in each of them, in this order.
        """
        workers, host = [one["actor"] for one in metadata[actor_wg_world_size:]], metadata[0]["host"]

        def same(number: int) -> dict[str, list[Any]]:
            return {"workers": [workers] * number, "host": [host] * number}

        return same(actor_wg_world_size), same(rollout_world_size)

    def init_process_group(self, workers: list[ActorHandle], host: str) -> None:
        """On the actor's ranks, notes who is to receive the next version. If others did before, all join again.

        Args:
            workers: those beside vLLM's.
            host: address of the actor's first machine.

        Raises:
            RefitError: on the first rank, if a worker or its server cannot be called, or a server has settings with
                which it cannot receive.
        """
        if (host, *(one._actor_id for one in workers)) == (self._host, *(one._actor_id for one in self._workers)):
            return
        self._workers, self._host = [], ""  # so that another attempt does not return above if this one fails
        self._sender.connect(host, self._find_servers(workers) if self._is_first else [])
        self._workers, self._host = workers, host

    async def send_weights(self, weights: ModelWeights, global_steps: int | None = None) -> dict[str, float]:
        """Sends a version, and waits until the servers serve it. On all ranks of the actor.

        Args:
            weights: of :class:`EtpFSDPEngine`.
            global_steps: verl's number of this version.

        Returns:
            Metrics for verl's log.

        Raises:
            RefitError: if the weights are of another engine, or with LoRA or quantization-aware training.
            PartyFailedError: if a server does not serve the version, with its reason.
        """
        report = self._sender.send(_module_of(weights), global_steps or 0)
        return {"refit/bytes": report.nbytes, **{f"refit/{phase}_s": value for phase, value in report.seconds.items()}}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[Any, None]:
        """Yields nothing: vLLM's workers receive; see [Note: verl]."""
        del global_steps
        return
        yield

    def finalize(self) -> None:
        """Does nothing: connections stay open."""

    def _find_servers(self, workers: list[ActorHandle]) -> list[VerlServer]:
        replicas: Counter[int] = Counter()
        for worker in workers:
            name = f"a worker of {_ROLLOUT}"
            replicas[answer_of(name, "get_replica_rank", worker.get_replica_rank.remote(), self._timeout_s)] += 1
        servers = [VerlServer(f"{_ROLLOUT}_server_{rank}_0", size, self._timeout_s) for rank, size in replicas.items()]
        for server in servers:
            check_settings(server.name, server.settings())
        return servers


class VerlServer(FrameworkEngine):
    """A vLLM server of verl."""

    absent = "with the engine 'etp', rollout.name is vllm"

    def settings(self) -> Any:
        """Its ``verl.workers.config.RolloutConfig``."""
        return self._call("get_rollout_config")

    def check_up(self) -> None:
        """See :class:`megatron_patches.refit.EngineClient`."""
        self._call("get_server_address")

    def _tell(self, call: dict[str, Any]) -> None:
        self._call("collective_rpc", "init_weight_transfer_engine", timeout=self._timeout_s, kwargs={"init_info": call})

    def _empty_caches(self) -> None:
        self._call("clear_kv_cache")


def check_settings(name: str, settings: Any) -> None:
    """Refuses settings of a server with which it cannot receive.

    Args:
        name: of the server.
        settings: its ``verl.workers.config.RolloutConfig``.

    Raises:
        RefitError: naming the setting to change.
    """
    if settings.disaggregation.enabled:
        raise RefitError(f"{name} only prefills or decodes; set rollout.disaggregation.enabled=False")
    if settings.free_cache_engine:
        raise RefitError(
            f"{name} gives up its weights before each update; set actor_rollout_ref.rollout.free_cache_engine=False"
        )
    transfer = (settings.engine_kwargs.get(_ROLLOUT) or {}).get("weight_transfer_config") or {}
    if transfer.get("backend") != "etp":
        raise RefitError(
            f"{name} cannot receive from the checkpoint engine 'etp'; set "
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.weight_transfer_config.backend=etp"
        )


def _module_of(weights: Any) -> nn.Module:
    """The module that an actor's weights are gathered from.

    Raises:
        RefitError: if it has no module, or sends other tensors than the module's parameters.
    """
    if not isinstance(weights, ModelWeights):
        raise RefitError(
            "the checkpoint engine 'etp' sends the shards of an FSDP2 actor on NVIDIA GPUs: set "
            f"actor_rollout_ref.actor.strategy=fsdp2 and actor_rollout_ref.model.external_lib={_MODULE}"
        )
    if weights.change:
        raise RefitError(f"the checkpoint engine 'etp' does not send the weights of {weights.change}; train without it")
    return weights.module
