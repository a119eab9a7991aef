"""Moves a version over links: any load whose link has a free slot, any packet that has come.

While packets are on their way the next are packed, and while some are unpacked the next arrive. Nothing waits in
turn; see [Note: progress] in :mod:`megatron_patches.refit.transports.base`.
"""

from __future__ import annotations

import time
from collections import deque

from megatron_patches.refit.packets import Packing, Sender, Unpacker
from megatron_patches.refit.ports import Pending
from megatron_patches.refit.transports.base import Check
from megatron_patches.refit.transports.links import Incoming, ReceivingEnd, SendingEnd, Slot

_PAUSE_S = 0.00005  # between looks at a GPU that still packs or unpacks


def send_version(sender: Sender, end: SendingEnd, version: int, check: Check) -> None:
    """Sends all loads of one version; returns when their destinations have unpacked them.

    Raises:
        RefitError: if a box cannot be packed, a destination does not take it, or ``check`` raises.
    """
    waiting = {destination: deque(loads) for destination, loads in sender.loads.items()}
    packing: list[tuple[Slot, Packing]] = []
    while waiting or packing:
        for slot, packed in [item for item in packing if item[1].done()]:
            packing.remove((slot, packed))
            end.send(packed.result(), slot, check)
        free = end.ready(waiting, check, wait=not packing) if waiting else None
        if free is not None:
            loads = waiting[free.destination]
            packing.append((free, sender.pack_into(loads.popleft(), version, free.payload, direct=free.direct)))
            if not loads:
                del waiting[free.destination]
        elif packing:
            check()
            time.sleep(_PAUSE_S)
    end.finish(check)


def receive_version(unpacker: Unpacker, end: ReceivingEnd, check: Check) -> None:
    """Receives and unpacks all packets of the version that ``unpacker`` has begun.

    Raises:
        RefitError: if a packet is not what it should be, none comes in time, or ``check`` raises.
    """
    left = unpacker.expected
    unpacking: list[tuple[Incoming, Pending[None]]] = []
    while left or unpacking:
        for incoming, pending in [item for item in unpacking if item[1].done()]:
            pending.result()
            unpacking.remove((incoming, pending))
            end.release(incoming, check)
        found = end.receive(unpacker.room, check, wait=not unpacking) if left else None
        if found is not None:
            unpacking.append((found, unpacker.accept(found.packet)))
            left -= 1
        elif unpacking:
            check()
            time.sleep(_PAUSE_S)
