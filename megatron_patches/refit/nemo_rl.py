"""Publishes weights from NeMo-RL: a checkpoint engine for its ``refit_transport: "module:Class"``.

[Note: NeMo-RL] NeMo-RL passes a checkpoint engine a generator of whole tensors, which it gathers one by one, and loads
what comes out in vLLM's workers. Neither happens here. The generator of a DTensor policy is called with the policy's
module, and nothing is gathered before it is iterated: its arguments tell the module, whose ranks send their own shards.
The plugin of ``megatron_patches`` in vLLM's workers receives and commits them. NeMo-RL's actors that own vLLM's engines
pass calls on to their workers, whatever their method; they are found by their names. The object that NeMo-RL makes in
each of vLLM's workers yields nothing, so NeMo-RL loads nothing there.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine
from torch import distributed, nn

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.framework import FrameworkEngine, VersionSender, checked_options

if TYPE_CHECKING:
    import torch

_WHERE = "refit_cfg"
_NEMO_RLS_OWN = {
    "pause": "NeMo-RL itself decides what requests do during an update",
    "on_engine_failure": "NeMo-RL uses all of its engines after an update, even one that misses it",
    "lag_s": "no engine misses an update",
}
_OWNER = re.compile(r"vllm_policy-(?:grp(?P<group>\d+)-(?P<rank>\d+)|\d+-\d+)")
"""Name of an actor of NeMo-RL for vLLM: one of a group of which the first owns an engine, or one that owns a worker."""


class EtpNemoRlCheckpointEngine(CheckpointEngine):
    """Sends the weights of a DTensor policy, shard by shard, into NeMo-RL's vLLM engines; see [Note: NeMo-RL].

    NeMo-RL makes one in each rank of the policy and in each worker of vLLM.

    Args:
        bucket_size: bytes, from ``update_weights_bucket_memory_ratio``: the memory for packets in one process.
        release_after_refit: whether NeMo-RL calls :meth:`finalize` after each update.
        timeout_s: of :class:`megatron_patches.refit.trainer.push_options.RefitOptions`, and seconds for a call of an
            actor.
        options: further options of :class:`megatron_patches.refit.trainer.push_options.RefitOptions`, from
            ``refit_cfg``.

    Raises:
        ValueError: if an option is unknown, or is one that NeMo-RL determines.
    """

    def __init__(
        self, bucket_size: int, *, release_after_refit: bool = False, timeout_s: float = 300.0, **options: Any
    ) -> None:
        del release_after_refit
        taken = checked_options(_WHERE, bucket_size, {"timeout_s": timeout_s, **options}, _NEMO_RLS_OWN)
        self._sender, self._timeout_s = VersionSender(taken), timeout_s

    @property
    def version(self) -> int:
        """Number of the last version that was sent; -1 before. The first one is 0."""
        return self._sender.version

    def prepare(self) -> dict[str, Any]:
        """The address of this process's machine, and the number of processes in its ``torch.distributed``."""
        import ray

        return {"host": ray.util.get_node_ip_address().strip("[]"), "processes": distributed.get_world_size()}

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Mapping[str, Any]],
    ) -> None:
        """On the policy's ranks, notes who is to receive the next version.

        Args:
            worker_rank: of this process in the policy.
            train_world_size: number of the policy's ranks.
            rollout_world_size: number of vLLM's workers.
            metadata: what :meth:`prepare` returned, in the policy's ranks and then in vLLM's workers.

        Raises:
            RefitError: on the first rank, if the actors that own vLLM's engines are not found, or vLLM runs data
                parallel.
        """
        engines = []
        if worker_rank == 0:
            import ray

            processes = [one["processes"] for one in metadata[train_world_size:]]
            sizes = engine_sizes(ray.util.list_named_actors(), rollout_world_size, processes)
            engines = [NemoRlEngine(name, size, self._timeout_s) for name, size in sizes.items()]
        self._sender.connect(metadata[0]["host"], engines)

    def init_rollout_process_group(self, **_: Any) -> None:
        """Does nothing: vLLM's workers connect when a trainer tells them to join."""

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Sends a version, and waits until the engines serve it. On all ranks of the policy.

        Args:
            weights: the generator of a DTensor policy. It is not iterated.

        Raises:
            RefitError: if it is the generator of another policy, or the module's parameters are not what it yields.
            PartyFailedError: if an engine does not serve the version, with its reason.
        """
        self._sender.send(module_behind(weights))

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yields nothing: the plugin receives; see [Note: NeMo-RL]."""
        return
        yield

    def finalize(self) -> None:
        """Disconnects; see :meth:`init_policy_process_group`."""
        self._sender.close()


class NemoRlEngine(FrameworkEngine):
    """An actor of NeMo-RL that owns an engine of vLLM, synchronous or asynchronous.

    Args:
        name: see :class:`megatron_patches.refit.framework.FrameworkEngine`.
        world_size: likewise.
        timeout_s: likewise.
    """

    absent = "it has ended; NeMo-RL must start it again"

    def __init__(self, name: str, world_size: int, timeout_s: float) -> None:
        super().__init__(name, world_size, timeout_s)
        self._suffix = "_async" if hasattr(self._actor, "checkpoint_engine_rpc_async") else ""

    def check_up(self) -> None:
        """See :class:`megatron_patches.refit.EngineClient`."""
        self._call("is_alive")

    def _tell(self, call: dict[str, Any]) -> None:
        self._call(
            f"checkpoint_engine_rpc{self._suffix}",
            checkpoint_method="init_weight_transfer_engine",
            method_args=(call,),
        )

    def _empty_caches(self) -> None:
        self._call(f"reset_prefix_cache{self._suffix}")


def engine_sizes(names: Iterable[str], rollout_world_size: int, processes: Sequence[int]) -> dict[str, int]:
    """The actors that own vLLM's engines, each with the number of the engine's workers.

    Args:
        names: of all actors.
        rollout_world_size: number of vLLM's workers.
        processes: for each of them, the number of processes in its ``torch.distributed``.

    Raises:
        RefitError: if the actors do not account for all workers, or engines share a ``torch.distributed``.
    """
    owners = [match for match in map(_OWNER.fullmatch, names) if match]
    groups = Counter(match["group"] for match in owners if match["group"])
    sizes = {match[0]: groups.get(match["group"], 1) for match in owners if match["rank"] in {None, "0"}}
    if sum(sizes.values()) != rollout_world_size:
        raise RefitError(
            f"actors named vllm_policy-... own {sum(sizes.values())} workers of vLLM and NeMo-RL has "
            f"{rollout_world_size}; this release of NeMo-RL names its actors otherwise"
        )
    if set(processes) != set(sizes.values()):
        raise RefitError(
            f"workers of vLLM are in groups of {sorted(set(processes))} processes and its engines have "
            f"{sorted(set(sizes.values()))} workers; set vllm_cfg.expert_parallel_size to at most "
            "tensor_parallel_size, so that vLLM does not run data parallel"
        )
    return sizes


def module_behind(weights: object) -> nn.Module:
    """The module whose tensors NeMo-RL's generator would gather.

    Args:
        weights: the generator, not started yet.

    Raises:
        RefitError: if it is of another policy, or yields other tensors than the module's own.
    """
    module = inspect.getgeneratorlocals(weights).get("model") if inspect.isgenerator(weights) else None
    if not isinstance(module, nn.Module):
        raise RefitError(
            "the checkpoint engine sends the shards of a DTensor policy of NeMo-RL; set "
            "policy.megatron_cfg.enabled=false and enabled=true in policy.dtensor_cfg (or automodel_cfg)"
        )
    if any(name.endswith(("lora_A.weight", "lora_B.weight")) for name, _ in module.named_parameters()):
        raise RefitError("the checkpoint engine does not merge LoRA; set lora_cfg.enabled=false in the policy")
    if getattr(module, "state_dict_adapter", None):
        raise RefitError(
            f"{type(module).__name__} is Automodel's own implementation, whose tensors differ from those of "
            "checkpoints; set automodel_kwargs.force_hf=true in the policy"
        )
    return module
