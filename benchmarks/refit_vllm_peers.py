"""Other ways to push weights into a running vLLM, for comparison in ``benchmarks.refit_vllm``.

Both gather whole tensors on the trainer, and end in vLLM's ``load_weights``:

- :class:`NcclPeer`: vLLM's own engine (``vllm.distributed.weight_transfer``), packed broadcasts;
- :class:`CheckpointEnginePeer`: the package ``checkpoint-engine``: pinned host memory, then buckets broadcast to the
  GPUs and handed to the workers by CUDA IPC. Its processes sit on the engine's GPUs, so trainer and engine share them.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.refit_vllm_model import TrainerModel
from benchmarks.spawned import free_port
from benchmarks.vllm_server import VllmServer


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Trainer and engine, as one rank of the trainer sees them.

    Attributes:
        rank: of the trainer.
        size: number of its ranks.
        workers: number of the engine's.
        model: this rank's part.
        server: the engine.
        timeout_s: how long anything may take.
    """

    rank: int
    size: int
    workers: int
    model: TrainerModel
    server: VllmServer
    timeout_s: float

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor, in the order in which the model gathers them."""
        return sorted(self.model.family.shapes().items())

    def nbytes(self) -> int:
        """Bytes that are sent to all workers together."""
        return sum(2 * math.prod(shape) for _, shape in self.shapes()) * self.workers

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses the server meanwhile; afterwards, no request finds cache entries of the old weights."""
        if self.rank == 0:
            self.server.post("pause?mode=wait")
        yield
        if self.rank == 0:
            self.server.post("reset_prefix_cache")
            self.server.post("resume")


class Peer(Protocol):
    """One way; every method is collective over the trainer's ranks."""

    def push(self) -> dict[str, float]:
        """Makes the engine serve the current weights. Returns the seconds of each part, ``paused`` among them."""


class NcclPeer:
    """vLLM's own NCCL engine: every tensor gathered on the first rank, broadcast whole, cut by each worker."""

    def __init__(self, sides: Sides) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

        self._sides, self._engine = sides, NCCLWeightTransferEngine
        if sides.rank == 0:
            where = {"master_address": "127.0.0.1", "master_port": free_port()}
            info = {**where, "rank_offset": 1, "world_size": 1 + sides.workers}
            with _meanwhile(
                lambda: sides.server.post("init_weight_transfer_engine", {"init_info": info}), sides.timeout_s
            ):
                group = NCCLWeightTransferEngine.trainer_init({**where, "world_size": 1 + sides.workers})
            self._arguments = NCCLTrainerSendWeightsArgs(group=group, packed=True)

    def push(self) -> dict[str, float]:
        """See :class:`Peer`."""
        sides, started = self._sides, time.perf_counter()
        with sides.paused():
            if sides.rank != 0:
                for _ in sides.model.gathered():
                    pass
            else:
                shapes = sides.shapes()
                info = {
                    "names": [name for name, _ in shapes],
                    "dtype_names": ["bfloat16"] * len(shapes),
                    "shapes": [list(shape) for _, shape in shapes],
                    "packed": True,
                }
                sides.server.post("start_weight_update", {})
                with _meanwhile(lambda: sides.server.post("update_weights", {"update_info": info}), sides.timeout_s):
                    self._engine.trainer_send_weights(sides.model.gathered(), self._arguments)
                sides.server.post("finish_weight_update", {})
        return {"paused": time.perf_counter() - started}


class CheckpointEnginePeer:
    """``checkpoint-engine``: each rank keeps its part of the gathered tensors in pinned memory, which is reused."""

    def __init__(self, sides: Sides) -> None:
        from checkpoint_engine import ParameterServer

        self._sides, self._version = sides, 0
        port = [free_port()]
        dist.broadcast_object_list(port, 0)
        os.environ["RANK"] = str(sides.rank)  # it takes rank 0 for none
        self._server = ParameterServer(
            rank=sides.rank, world_size=sides.size, auto_pg=False, master_addr="127.0.0.1", master_port=port[0]
        )

    def push(self) -> dict[str, float]:
        """See :class:`Peer`."""
        sides = self._sides
        times = [time.perf_counter()]
        mine = {}
        for index, (name, whole) in enumerate(sides.model.gathered()):
            if index % sides.size == sides.rank:
                mine[name] = whole
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        self._version += 1
        checkpoint = str(self._version)
        self._server.register_checkpoint(checkpoint, named_tensors=mine, use_shared_memory_pool=True)
        del mine
        self._server.gather_metas(checkpoint)
        times.append(time.perf_counter())
        with sides.paused():
            self._server.update(checkpoint, self._ask_workers)
        times.append(time.perf_counter())
        self._server.unregister_checkpoint(checkpoint)
        gathered, registered, updated = (end - begin for begin, end in itertools.pairwise(times))
        return {"gather": gathered, "register": registered, "paused": updated}

    def _ask_workers(self, sockets: list[tuple[str, str]]) -> None:
        if self._sides.rank == 0:
            call = {"method": "update_weights_from_ipc", "args": [dict(sockets)], "timeout": self._sides.timeout_s}
            self._sides.server.post("collective_rpc", call)


@contextmanager
def _meanwhile(call: Callable[[], Any], timeout_s: float) -> Iterator[None]:
    """Runs ``call`` in a thread meanwhile. Waits for it at the end, and raises its error."""
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(call)
        yield
        called.result(timeout_s)


@dataclass(frozen=True)
class PeerKind:
    """How to measure a peer.

    Attributes:
        make: makes the peer, on every rank.
        backend: weight-transfer backend with which vLLM's server is started.
        arguments: further arguments of the server's command line.
        shares_gpus: whether trainer rank and worker must sit on one GPU, in order.
    """

    make: Callable[[Sides], Peer]
    backend: str = "nccl"
    arguments: tuple[str, ...] = ()
    shares_gpus: bool = False


PEERS = {
    "nccl": PeerKind(NcclPeer),
    "checkpoint_engine": PeerKind(
        CheckpointEnginePeer,
        arguments=("--worker-extension-cls", "checkpoint_engine.worker.VllmColocateWorkerExtension"),
        shares_gpus=True,
    ),
}
