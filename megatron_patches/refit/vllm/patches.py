"""Changes that vLLM needs so that weights can be replaced: some on CPUs alone, and one everywhere.

[Note: open updates] vLLM's worker notes that an update of its own contract was started. Until it is finished, the
worker refuses to start another one and to release the trainer. A trainer that dies in between never finishes it. By
then the old weights serve; only the note is left.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

logger = logging.getLogger(__name__)

# Where Linux keeps shared memory made by shm_open.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked up by name

_APPLIED = "_etp_applied"  # attribute of a changed function; others may have wrapped the same function before
_REFUSED = ("start_weight_update", "shutdown_weight_transfer_engine")  # the latter is not in vLLM 0.26


def adapt_to_cpu() -> None:
    """Keeps linear weights in place, and keeps the shared memory of one engine's workers apart from another's."""
    from vllm import _custom_ops
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.model_executor.layers import utils

    # On Arm, oneDNN packs experts into its own memory too.
    _custom_ops._supports_onednn = False
    _change(utils, "dispatch_cpu_unquantized_gemm", _with_linear_weights_in_place)
    _change(_CPUSHMDistributed, "_init_cpu_shm", _with_a_name_of_its_own)


def end_open_updates() -> None:
    """Lets this process's worker end an open update, without effect, before what it would refuse.

    See [Note: open updates].
    """
    from vllm.v1.worker.gpu_worker import Worker

    for name in _REFUSED:
        if hasattr(Worker, name):
            _change(Worker, name, _after_ending_an_update)


def _change(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Replaces a function by what ``change`` makes of it, once."""
    function = getattr(owner, name)
    if not hasattr(function, _APPLIED):
        changed = change(function)
        setattr(changed, _APPLIED, True)
        setattr(owner, name, changed)


def _with_linear_weights_in_place(prepare: Callable[..., None]) -> Callable[..., None]:
    """Makes linear layers compute with their parameter.

    Otherwise vLLM packs it, with oneDNN or for AMX, into memory that only a closure of the layer refers to, and empties
    the parameter, so that new weights could not reach it.
    """
    import torch

    @functools.wraps(prepare)
    def prepared(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            prepare(layer, remove_weight)

    return prepared


def _with_a_name_of_its_own(start: Callable[[_CPUSHMDistributed], int]) -> Callable[[_CPUSHMDistributed], int]:
    """Gives the workers' shared memory a unique name, and unlinks it once all workers have opened it.

    Otherwise vLLM names it after a free TCP port and leaves it behind when a worker ends. Every start then leaks 4 MiB,
    and a start that gets a port of an earlier one fails with "create shm in SHMManager failed. errno: 17".
    """
    import torch.distributed as dist

    @functools.wraps(start)
    def started(shared: _CPUSHMDistributed) -> int:
        communicator = shared.communicator
        once = [uuid.uuid4().hex]
        dist.broadcast_object_list(once, src=communicator.ranks[0], group=communicator.device_group)
        shared.group_name = f"{shared.group_name}-{once[0]}"
        handle = start(shared)  # returns after a barrier, when every worker has opened all of it
        (_SHARED_MEMORY / f"{shared.group_name}_{communicator.rank}").unlink(missing_ok=True)
        return handle

    return started


def _after_ending_an_update(method: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(method)
    def carried_out(worker: Any) -> None:
        if worker._weight_update_active:
            logger.warning("refit: a weight update was started and never finished; it ends without effect")
            worker.finish_weight_update()
        method(worker)

    return carried_out
