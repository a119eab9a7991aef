"""A worker process of the launcher: imports torch once, then runs the bodies it is told to.

Started by :mod:`tests.support.launch`, from a template or as ``worker.py SOCKET_FD STACKS_FILE PARENT_PID``.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.protocol import Done, Failed, Job


def answer_jobs(descriptor: int, stacks: str, parent: int | None = None) -> None:
    """Answer jobs until the session closes the connection; a copy of a template ends with a body that fails.

    Args:
        descriptor: of the connection's socket.
        stacks: the file to say in where the process stands when it gets SIGUSR1, or where it crashed.
        parent: the process to end with; the one that this process is a copy of if None.
    """
    threading.Thread(target=_end_with, args=(os.getppid() if parent is None else parent,), daemon=True).start()
    connection = Connection(descriptor)
    sys.path[:] = connection.recv()  # the session's, so that imports mean the same here

    import torch

    from tests.support.protocol import Failed

    torch.set_num_threads(1)
    with Path(stacks).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        faulthandler.enable(file)
        connection.send("ready")
        while True:
            try:
                job = connection.recv()
            except EOFError:
                return
            answer = _answer(job)
            if isinstance(answer, Failed):
                # First of all, because to leave a group may take until a time-out: a collective that waits for a peer
                # keeps the group, and the peer may be waiting for this rank.
                connection.send(answer)
                if parent is None:
                    return  # as a training process ends, which closes its connections
                _leave_group()
                continue
            _leave_group()
            connection.send(answer)


def _end_with(parent: int) -> None:
    """End this process, and what it has started, when the session's is gone, even in the middle of a body."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def _answer(job: Job) -> Done | Failed:
    from tests.support.protocol import Done, Failed

    try:
        _join_group(job)
        body = job.body.load()
        _set_default_transport()
        arguments = pickle.loads(job.arguments)
        return Done(pickle.dumps(body(job.rank, job.world_size, *arguments)))
    except BaseException as error:  # noqa: BLE001 - what a body raises, SystemExit too, belongs to its test
        return Failed(type(error).__name__, traceback.format_exc(), time.monotonic())


def _join_group(job: Job) -> None:
    import torch
    import torch.distributed as dist

    from benchmarks.shared_gpus import sharing_gpus

    torch.manual_seed(1234)
    if job.backend is None:
        return
    if "nccl" in job.backend or "cuda" in job.backend:
        torch.cuda.set_device(job.rank % torch.cuda.device_count())
        if job.world_size > torch.cuda.device_count():
            os.environ.update(sharing_gpus(job.rank, torch.cuda.device_count()))
    limit = timedelta(seconds=0.8 * job.timeout_s)
    # A TCPStore asks for the name of each address that it connects: 5 s where a name server does not answer.
    store = dist.FileStore(job.store)
    store.set_timeout(limit)
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.world_size, timeout=limit)
    # A body may end, and with it its rank's part of the group, while another rank still connects to it.
    if store.add("joined", 1) == job.world_size:
        store.set("all", "joined")
    store.wait(["all"], limit)


def _set_default_transport() -> None:
    transport = os.environ.get("ETP_TESTS_TRANSPORT", "auto")
    config = sys.modules.get("etp.config")
    if config is not None:
        config.EtpConfig.__init__.__kwdefaults__["transport"] = config.TransportName(transport)


def _leave_group() -> None:
    import torch.distributed as dist

    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is not None:
        megatron.destroy_model_parallel()  # a thread of each group's would go on, waking a hundred times a second
    gc.collect()  # what the body left may hold on to the group
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    answer_jobs(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
