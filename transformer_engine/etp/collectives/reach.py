"""Whether the ranks of a group reach each other's GPU memory.

GPUs are told apart by their UUIDs, not by their numbers: launchers that give each process a ``CUDA_VISIBLE_DEVICES`` of
its own (Ray, Slurm) make every process call its GPU 0. CUDA answers for the devices that a process sees, and the
management library, NVML, for all of the machine.
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

_P2P_READ, _P2P_WRITE, _P2P_OK = 0, 1, 0


@dataclass(frozen=True)
class _Seat:
    """Where a rank sits: its host, its GPU's UUID, and whether its environment lets ranks share one."""

    host: str
    uuid: str
    may_share: bool


def obstacle_to_peer_copies(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why these ranks cannot copy from and to each other's memory, or "". The same on all ranks. Collective.

    Ranks that share one GPU would only slow each other down. They are accepted where the environment says so, with the
    variable that torch has for it; tests with more ranks than there are GPUs do.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    own = _Seat(socket.gethostname(), _uuid(index), _may_share())
    seats = [own] * dist.get_world_size(group)
    dist.all_gather_object(seats, own, group=group)
    hosts = {seat.host for seat in seats}
    if len(hosts) > 1:
        return f"its ranks are on {len(hosts)} hosts"
    uuids = {seat.uuid for seat in seats}
    if len(uuids) < len(seats) and not all(seat.may_share for seat in seats):
        return "several of its ranks use one GPU"
    mine = _unreachable(own.uuid, sorted(uuids - {own.uuid}))
    answers = [mine] * len(seats)
    dist.all_gather_object(answers, mine, group=group)
    return next(filter(None, answers), "")


def _may_share() -> bool:
    return os.environ.get(DEVICES_OVERLAP_VARIABLE) == "1"


def _uuid(index: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _unreachable(own: str, peers: list[str]) -> str:
    """Why GPU ``own`` does not reach one of ``peers``, or ""."""
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
    """NVIDIA's management library, which knows all GPUs of a machine whatever ``CUDA_VISIBLE_DEVICES`` says.

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
        """Whether one GPU reads and writes the other's memory; both by UUID, ``GPU-...``."""
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
