"""Ends the process groups of a run that went well, before the interpreter ends.

gloo's worker threads free the tensors of a collective after they have woken its waiter, and need the interpreter's
lock for it. One that asks for the lock while the interpreter is ending takes the process down with status -6, after a
training that went well. Megatron leaves its process groups to the end of the process. NCCL does not end a group that
a CUDA graph has captured work of before the graph is gone, and Megatron keeps its graphs.
"""

from __future__ import annotations

import gc
import sys
import time

import torch
import torch.distributed as dist

# Threads of groups that something still refers to cannot be joined. They are idle, but for the last free.
_SETTLE_S = 0.1


class ProcessGroupsAtExit:
    """To be registered with :mod:`atexit` before a script runs, so that it is called after the script's own handlers.

    Attributes:
        went_well: set once the script has ended as it should. After an exception nothing is done: a peer may wait in
            a collective that will never end, and torchrun ends the processes.
    """

    def __init__(self) -> None:
        self.went_well = False

    def __call__(self) -> None:
        """End all process groups, if the script has ended as it should."""
        if self.went_well:
            leave_process_groups()


def drop_graphs() -> None:
    """Free all CUDA graphs of this process, for NCCL's process groups to end."""
    if not torch.cuda.is_available():
        return
    # Their owners are many: Megatron's wrapper of whole iterations, and a runner for each layer and microbatch.
    graphs = [found for found in gc.get_objects() if issubclass(type(found), torch.cuda.CUDAGraph)]
    if graphs:
        torch.cuda.synchronize()
    for graph in graphs:
        graph.reset()


def leave_process_groups() -> None:
    """End all process groups that are left. Not collective: peers that are gone are not waited for."""
    if dist.is_initialized():
        drop_graphs()
        parallel_state = sys.modules.get("megatron.core.parallel_state")
        if parallel_state is not None:
            parallel_state.destroy_model_parallel()
        gc.collect()
        dist.destroy_process_group()
    time.sleep(_SETTLE_S)
