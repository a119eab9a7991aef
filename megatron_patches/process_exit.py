"""Destroys the process groups of a successful run before the interpreter exits.

gloo's worker threads free the tensors of a collective after they have woken its waiter, and need the GIL for that. A
thread that requests the GIL while the interpreter is exiting aborts the process with status -6, after a successful
training run. Megatron does not destroy its process groups before the process exits. NCCL does not destroy a group while
a CUDA graph holds captured work of it, and Megatron keeps its graphs.
"""

from __future__ import annotations

import gc
import sys
import time

import torch
import torch.distributed as dist

# Threads of groups that are still referenced cannot be joined. They are idle, except for the last free.
_SETTLE_S = 0.1


class ProcessGroupsAtExit:
    """Register it with :mod:`atexit` before a script runs, so that it is called after the script's own handlers.

    Attributes:
        went_well: set once the script has succeeded. After an exception nothing is done: a peer may be waiting in a
            collective that will never complete, and torchrun ends the processes.
    """

    def __init__(self) -> None:
        self.went_well = False

    def __call__(self) -> None:
        """Destroy all process groups if the script has succeeded."""
        if self.went_well:
            leave_process_groups()


def drop_graphs() -> None:
    """Free all CUDA graphs of this process, so that NCCL's process groups can be destroyed."""
    if not torch.cuda.is_available():
        return
    # They have many owners: Megatron's wrapper of whole iterations, and a runner for each layer and microbatch.
    graphs = [found for found in gc.get_objects() if issubclass(type(found), torch.cuda.CUDAGraph)]
    if graphs:
        torch.cuda.synchronize()
    for graph in graphs:
        graph.reset()


def leave_process_groups() -> None:
    """Destroy all remaining process groups. Not collective: does not wait for peers that have exited."""
    if dist.is_initialized():
        drop_graphs()
        parallel_state = sys.modules.get("megatron.core.parallel_state")
        if parallel_state is not None:
            parallel_state.destroy_model_parallel()
        gc.collect()
        dist.destroy_process_group()
    time.sleep(_SETTLE_S)
