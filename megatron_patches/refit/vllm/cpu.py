"""Changes that vLLM needs on CPUs so that weights can be replaced. Unused elsewhere."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

# Where Linux keeps shared memory made by shm_open.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked up by name

_APPLIED = "_etp_applied"  # attribute of a changed function; others may have wrapped the same function before


def adapt_to_cpu() -> None:
    """Keeps linear weights in place, and keeps the shared memory of one engine's workers apart from another's."""
    from vllm import _custom_ops
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.model_executor.layers import utils

    # On Arm, oneDNN packs experts into its own memory too.
    _custom_ops._supports_onednn = False
    prepare = utils.dispatch_cpu_unquantized_gemm
    if not hasattr(prepare, _APPLIED):
        utils.dispatch_cpu_unquantized_gemm = _with_linear_weights_in_place(prepare)
        setattr(utils.dispatch_cpu_unquantized_gemm, _APPLIED, True)
    start = _CPUSHMDistributed._init_cpu_shm
    if not hasattr(start, _APPLIED):
        _CPUSHMDistributed._init_cpu_shm = _with_a_name_of_its_own(start)
        setattr(_CPUSHMDistributed._init_cpu_shm, _APPLIED, True)


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
