"""Detects ranks that run different collectives, for backends that pair each one with whatever the peers start next.

[Note: order] A collective of NCCL or gloo knows its group and its size, not its weight. If one rank skips a layer that
its peers visit, its next gather of the same size pairs with theirs: every rank gets a plausible weight, made of parts
of two. So each rank keeps a digest of the names of its collectives, and the ranks exchange their digests at the end of
a pass. Without streams, a difference raises there. With streams, the host would have to wait for the device, so it
reads the answer when the next pass ends. Replays of a CUDA graph are not recorded, because their order cannot change.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice, zip_longest
from typing import Any

import torch
import torch.distributed as dist

from etp.collectives.watchdog import Watchdog
from etp.collectives.works import WorkLine, free_bytes, gather_numbers
from etp.errors import PeerMismatchError

logger = logging.getLogger(__name__)

ORDER_LABEL = "exchange of the order of collectives"
"""Name of the exchange in messages."""

# Most collectives that are compared, the latest ones: more than any pass has, and a bound if no pass ever ends.
_MOST_COLLECTIVES = 2**20
# Of these, the names kept for the message.
_MOST_NAMES = 4096
# Timeout for names, which go through the process group's store: ranks reach this point at different times.
_PATIENCE_S = 30.0


@dataclass(frozen=True)
class _Answer:
    """The result of an exchange.

    Attributes:
        words: ``[ranks, 2]`` int64 on the host: each rank's digest, and the number of collectives that it covers.
        arrived: an event after which the words have arrived; None if they have already.
        names: of this rank's latest collectives.
        count: number of this rank's collectives.
    """

    words: torch.Tensor
    arrived: Any
    names: Sequence[str]
    count: int


class CollectiveOrder:
    """The order of one rank's collectives in a group.

    Args:
        group: the ranks that compare their orders.
        device: where the group's backend needs its tensors.
        timeout_s: seconds to wait for peers; None uses the process group's timeout.
        watchdog: watches on a GPU that their answers arrive in time; None: something else does.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout_s: float | None, watchdog: Watchdog | None = None
    ) -> None:
        self.recording = True
        """Whether collectives are recorded: not while a CUDA graph is captured."""
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._device = device
        self._timeout_s = timeout_s
        self._watchdog = watchdog
        self._line = WorkLine()
        self.names: deque[str] = deque(maxlen=_MOST_COLLECTIVES)
        """The collectives since the last exchange, see :meth:`record`; as many on all ranks that run the same ones."""
        self._answer: _Answer | None = None

    @property
    def is_answered(self) -> bool:
        """Whether the answer to the last exchange has arrived, so that :meth:`verify` need not wait for a device."""
        return self._answer is not None and self._answer.arrived is None

    def record(self, name: str) -> None:
        """Record that a collective starts now. Hot paths append to :attr:`names` themselves, to save the call."""
        if self.recording:
            self.names.append(name)

    def exchange(self, whose: str = "") -> None:
        """Exchange the digest of what was recorded, on the calling stream, and begin a new one. Collective.

        Args:
            whose: tells these collectives from others of the same names, such as those of another model.
        """
        if whose:
            self.names.append(f"end of a pass of {whose}")
        names, count = "\n".join(self.names), len(self.names)
        word = int.from_bytes(hashlib.sha256(names.encode()).digest()[:8], "little", signed=True)
        on_gpu = self._device.type == "cuda"
        own = torch.tensor([word, count], dtype=torch.int64, pin_memory=on_gpu)
        own = own.to(self._device, non_blocking=True)
        everyone = gather_numbers(own, self._group, self._line, self._timeout_s, ORDER_LABEL)
        words = torch.empty(everyone.shape, dtype=torch.int64, pin_memory=on_gpu).copy_(everyone, non_blocking=on_gpu)
        arrived = None
        if on_gpu:
            arrived = torch.cuda.Event()
            arrived.record()
            if self._watchdog is not None:
                self._watchdog.expect(arrived, ORDER_LABEL)
        else:
            free_bytes(own)
            free_bytes(everyone)
        latest = tuple(islice(self.names, max(count - _MOST_NAMES, 0), None))
        self._answer = _Answer(words, arrived, latest, count)
        self.names.clear()

    def verify(self) -> None:
        """Wait for the answer to the last exchange, if there was one, and check it.

        Raises:
            PeerMismatchError: on every rank of the group, naming the first collective that differs.
        """
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if answer.arrived is not None:
            answer.arrived.synchronize()
        if bool((answer.words == answer.words[0]).all()):
            return
        raise PeerMismatchError(self._difference(self._names_of_all(answer)))

    def _names_of_all(self, answer: _Answer) -> list[tuple[int, Sequence[str]]]:
        """How many collectives each rank had, and the latest names; (0, ()) for a rank that does not answer in time.

        Not by a collective: if collectives differ, the device may be waiting for one that no peer will start.
        """
        store = dist.distributed_c10d._get_process_group_store(self._group)
        # All ranks have received the same words.
        topic = hashlib.sha256(answer.words.numpy().tobytes()).hexdigest()
        keys = [f"etp/order/{topic}/{rank}" for rank in self._ranks]
        store.set(keys[dist.get_rank(self._group)], json.dumps([answer.count, answer.names]))
        try:
            store.wait(keys, timedelta(seconds=_PATIENCE_S))
        except dist.DistStoreError:
            logger.warning("not all of ranks %s told the names of their collectives", self._ranks)
        return [tuple(json.loads(store.get(key))) if store.check([key]) else (0, ()) for key in keys]

    def _difference(self, everyone: Sequence[tuple[int, Sequence[str]]]) -> str:
        """Describe the first difference in the kept names, given each rank's count and latest names."""
        start = max(count - len(names) for count, names in everyone)
        kept = [names[start - (count - len(names)) :] for count, names in everyone]
        where = "they differ before the names that were kept"
        for place, names in enumerate(zip_longest(*kept, fillvalue="no collective"), start + 1):
            other = next((index for index, name in enumerate(names) if name != names[0]), None)
            if other is not None:
                where = (
                    f"number {place} was the {names[0]} on rank {self._ranks[0]} and the {names[other]} on rank "
                    f"{self._ranks[other]}"
                )
                break
        when = "since the last comparison" if self._device.type == "cpu" else "in the pass before the one that ends now"
        return (
            f"ranks {self._ranks} share their weights and have not used the same ones in the same order {when}: "
            f"{where}. Each collective pairs with the peers' next one, so outputs and gradients since then are wrong: "
            "go back to a checkpoint. Take branches that skip or reorder layers alike on all ranks of the group, or "
            "leave those layers out of sharding"
        )
