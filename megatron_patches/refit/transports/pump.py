"""Moves a version over links: any load whose link has a free slot, any packet that has arrived.

Packing, sending and unpacking overlap, and links never wait for each other; see
[Note: progress] in :mod:`megatron_patches.refit.transports.base`.

If anything fails, transfers in flight are stopped first, because later work on a GPU might wait for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_patches.refit.memory.packets import Packet, Packing
from megatron_patches.refit.memory.ports import Pending
from megatron_patches.refit.memory.sender import Sender
from megatron_patches.refit.memory.unpacker import Unpacker
from megatron_patches.refit.transports.base import Check
from megatron_patches.refit.transports.frames import LOOK_AROUND_S, Patience
from megatron_patches.refit.transports.receiving import ReceivingEnd
from megatron_patches.refit.transports.sending import SendingEnd, StagingSlot

_IMPATIENT_S = 0.0005  # how long to poll without a pause, for work that takes a GPU less than this
_PAUSE_S = 0.00005  # then, between polls


class _Looks:
    """Polling with backoff: without pauses for a short while, then with pauses."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def found(self) -> None:
        """Restarts the backoff, because something has ended."""
        self._since = time.perf_counter()

    def nothing(self, check: Check) -> None:
        """Waits a little, because nothing has ended."""
        if time.perf_counter() - self._since < _IMPATIENT_S:
            time.sleep(0)
            return
        check()
        time.sleep(_PAUSE_S)


@contextmanager
def _stopped_by_errors(end: SendingEnd | ReceivingEnd) -> Iterator[None]:
    try:
        yield
    except BaseException:
        end.stop()
        raise


def send_version(
    sender: Sender, end: SendingEnd, version: int, check: Check, meanwhile: Callable[[], None] | None = None
) -> None:
    """Sends all loads of one version. Returns once their destinations have unpacked them.

    Args:
        sender: packs and digests them.
        end: the sending end of the links.
        version: number of the weights.
        check: raises if another party has failed.
        meanwhile: called once, when all loads are packed or digested and the last of them are on their way.

    Raises:
        RefitError: if a box cannot be packed, a destination does not accept it, or ``check`` or ``meanwhile`` raises.
    """
    with _stopped_by_errors(end):
        packed = {
            destination: deque(load for load in loads if not load.direct) for destination, loads in sender.loads.items()
        }
        packed = {destination: loads for destination, loads in packed.items() if loads}
        waves = deque(sender.waves())
        digesting: deque[Packing] = deque()
        packing: deque[tuple[StagingSlot, Packing]] = deque()
        looks = _Looks()

        def at_work() -> str:
            working = {item.load.destination for item in [*digesting, *(item for _, item in packing)]}
            return f"the own device to pack or digest what goes to destination ranks {sorted(working)[:8]}"

        patience = Patience(end.timeout_s, at_work, check)
        while packed or waves or digesting or packing:
            progress = False
            # Digest ahead of what is being sent, one wave at a time: the first load waits while others are begun.
            if waves and len(digesting) <= len(waves[0]):
                digesting.extend(sender.digest(waves.popleft(), version))
            # A packet of scales would make the digests behind it wait until the last weights are quantized.
            free = end.free_slot(() if waves and sender.urgent else packed, check)
            if free is not None:
                loads = packed[free.destination]
                packing.append((free, sender.pack_into(loads.popleft(), version, free.payload)))
                if not loads:
                    del packed[free.destination]
                progress = True
            # A port completes its work in order of submission.
            if packing and packing[0][1].done():
                slot, ready = packing.popleft()
                end.send(ready.result(), slot, check)
                progress = True
            if digesting and digesting[0].done():
                ready = digesting.popleft()
                end.send_direct(ready.result(), ready.load, sender.storages(ready.load), check)
                progress = True
            if not progress and (packing or digesting):
                looks.nothing(patience.tick)
                continue
            if not progress:
                end.wait_for_news(check, f"room for a packet to destination ranks {sorted(packed)[:8]}")
            looks.found()
            patience = Patience(end.timeout_s, at_work, check)
        if meanwhile is not None:
            meanwhile()
        end.finish(check)


def receive_version(
    unpacker: Unpacker,
    end: ReceivingEnd,
    timeout_s: float,
    check: Check,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Receives and unpacks all packets of the version that ``unpacker`` has begun.

    Args:
        unpacker: takes the packets.
        end: the receiving end of the links.
        timeout_s: seconds to wait for each packet.
        check: raises if another party has failed.
        meanwhile: called once, when everything that is still missing is in flight. It runs in this thread, because
            another thread that computes in Python would slow this one down.

    Raises:
        RefitError: if a packet is invalid or late, or ``check`` raises.
    """
    with _stopped_by_errors(end):
        left = unpacker.expected
        unpacking: deque[tuple[Packet, Pending[None]]] = deque()
        looks = _Looks()
        patience = Patience(timeout_s, lambda: end.awaited, check)
        while left or unpacking:
            waiting = not (end.on_their_way or unpacking)
            found = end.receive(unpacker.load_of, unpacker.storages, check, wait_s=LOOK_AROUND_S if waiting else 0.0)
            if found is not None:
                unpacking.append((found[0], unpacker.accept(*found)))
                left -= 1
            if meanwhile is not None and left == end.on_their_way:
                meanwhile()
                meanwhile = None
            ended = bool(unpacking) and unpacking[0][1].done()
            if ended:
                packet, pending = unpacking.popleft()
                pending.result()
                end.release(packet, check)
            if found is not None or ended:
                looks.found()
                patience = Patience(timeout_s, lambda: end.awaited, check)
                continue
            patience.tick()
            if not waiting:
                looks.nothing(check)
        if meanwhile is not None:
            meanwhile()
