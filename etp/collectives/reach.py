"""Checks whether the ranks of a group can access each other's GPU memory.

GPUs are identified by UUID, not by index: with launchers that set ``CUDA_VISIBLE_DEVICES`` per process (Ray, Slurm),
every process calls its GPU 0. CUDA knows only the GPUs that the process sees; NVML knows all GPUs of the machine.
"""

from __future__ import annotations

import ctypes
import os
import socket
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from etp.collectives.symmetric import DEVICES_OVERLAP_VARIABLE
from etp.collectives.works import gather_objects

_P2P_READ, _P2P_WRITE, _P2P_OK = 0, 1, 0


@dataclass(frozen=True)
class _Seat:
    """A rank's location: its host, its GPU's UUID, and whether its environment allows ranks to share a GPU."""

    host: str
    uuid: str
    may_share: bool


def obstacle_to_peer_copies(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why these ranks cannot copy between each other's memory; "" if they can. The same on all ranks. Collective.

    Ranks that share one GPU would only slow each other down. They are accepted only if torch's environment variable for
    it is set, as in tests with more ranks than GPUs.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    own = _Seat(socket.gethostname(), _uuid(index), _may_share())
    seats = gather_objects(own, group, "exchange of the ranks' GPUs")
    hosts = {seat.host for seat in seats}
    if len(hosts) > 1:
        return f"its ranks are on {len(hosts)} hosts"
    uuids = {seat.uuid for seat in seats}
    if len(uuids) < len(seats) and not all(seat.may_share for seat in seats):
        return "several of its ranks use one GPU"
    mine = _unreachable(own.uuid, sorted(uuids - {own.uuid}))
    return next(filter(None, gather_objects(mine, group, "exchange of the GPUs that ranks reach")), "")


def _may_share() -> bool:
    return os.environ.get(DEVICES_OVERLAP_VARIABLE) == "1"


def _uuid(index: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _unreachable(own: str, peers: list[str]) -> str:
    """Why GPU ``own`` cannot access one of ``peers``; "" if it can access all."""
    visible = {_uuid(index): index for index in range(torch.cuda.device_count())}
    hidden = [uuid for uuid in peers if uuid not in visible]
    for uuid in peers:
        if uuid in visible and not torch.cuda.can_device_access_peer(visible[own], visible[uuid]):
            return f"GPU {own} has no direct access to the memory of {uuid}"
    if not hidden:
        return ""
    try:
        with Nvml() as nvml:
            for uuid in hidden:
                if not nvml.reaches(own, uuid):
                    return f"GPU {own} has no direct access to the memory of {uuid}"
    except NvmlError as error:
        return f"GPU {own} may not reach {', '.join(hidden)}, which its process does not see: {error}"
    return ""


class NvmlError(Exception):
    """NVML is missing or refused a call."""


class Nvml:
    """NVIDIA's management library, which sees all GPUs of a machine regardless of ``CUDA_VISIBLE_DEVICES``.

    Raises:
        NvmlError: without the library, or if a call fails.
    """

    def __enter__(self) -> Self:
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise NvmlError(f"NVML is not installed: {error}") from error
        self._call("nvmlInit_v2")
        return self

    def __exit__(self, *_: object) -> None:
        self._call("nvmlShutdown")

    def reaches(self, uuid: str, other: str) -> bool:
        """Whether one GPU can read and write the other's memory; both given by UUID, ``GPU-...``."""
        handles = []
        for name in (uuid, other):
            handle = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(handle))
            handles.append(handle)
        for ability in (_P2P_READ, _P2P_WRITE):
            status = ctypes.c_int()
            self._call("nvmlDeviceGetP2PStatus", *handles, ctypes.c_int(ability), ctypes.byref(status))
            if status.value != _P2P_OK:
                return False
        return True

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            describe = self._library.nvmlErrorString
            describe.restype = ctypes.c_char_p
            raise NvmlError(f"{name} failed: {describe(status).decode()}")
