"""Gives each gloo process group a single thread, because two threads race on one string.

The threads of a ``ProcessGroupGloo``, two by default, write the name of the collective that they have completed to a
shared ``std::string`` without a lock (``runLoop`` in torch/csrc/distributed/c10d/ProcessGroupGloo.cpp). Names of more
than 15 characters are on the heap. If two such collectives of a group end at the same time, the string is freed twice
and the process aborts. Megatron's overlapped parameter gathers have such a name: ``ALLGATHER_COALESCED``.

All ranks issue the collectives of a group in the same order, so one thread is enough.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import default_pg_timeout

from megatron_patches.registry import PatchRecord

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroupGloo, Store


def _devices() -> list[Any]:
    """The network interfaces that torch would use."""
    from torch.distributed.distributed_c10d import ProcessGroupGloo  # which torch may have been built without

    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [ProcessGroupGloo.create_device(interface=name) for name in names] or [
        ProcessGroupGloo.create_default_device()
    ]


def _replace(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def replacement(
        self: ProcessGroupGloo,
        store: Store,
        rank: int,
        size: int,
        options: Any = None,
        *,
        timeout: timedelta = default_pg_timeout,
        **more: Any,
    ) -> None:
        if options is None or isinstance(options, timedelta):  # torch also accepts a timeout instead of options
            limit = timeout if options is None else options
            options = type(self)._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
            options._devices, options._timeout, options._threads = _devices(), limit, 1
            for name, value in more.items():  # such as enable_reconfigure, of torch 2.15
                setattr(options, name, value)
            more = {}
        init(self, store, rank, size, options, **more)

    return replacement


RECORD = PatchRecord(
    target="torch.distributed.distributed_c10d:ProcessGroupGloo.__init__",
    replace=_replace,
    reason="two threads of a process group that complete collectives at the same time free one string twice",
)
