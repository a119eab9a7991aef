"""NCCL as far as order goes, in one process: what parties begin on one communicator, and when it ends.

Each party has one queue. What is at its head is carried out, and that alone: its parts meet those at the heads of their
peers' queues, and when all have, it ends and the next begins. The first call of a pair holds its caller until the peer
has come to it as well, as connections are made then.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.transports.c10d_groups import NcclGroup


@dataclass
class Batch:
    """What a party has begun with one call: tensors for or from a peer, of which some are still to meet theirs."""

    peer: int
    sends: bool
    tensors: deque[torch.Tensor]
    error: str = ""
    ended: threading.Event = field(default_factory=threading.Event)

    def done(self) -> bool:
        return self.ended.is_set()

    def result(self) -> None:
        self.ended.wait()
        if self.error:
            raise PartyFailedError(self.error)


class Communicator:
    """All parties' queues.

    Args:
        size: number of parties.
    """

    def __init__(self, size: int) -> None:
        self.queues: list[deque[Batch]] = [deque() for _ in range(size)]
        self.most = [0] * size  # things that were under way at a time
        self.together: list[set[int]] = [set() for _ in range(size)]  # the most peers that they were with
        self._news = threading.Condition()
        self._met: set[tuple[int, int]] = set()
        self.aborted: set[int] = set()

    def group(self, party: int) -> ModelGroup:
        return ModelGroup(self, party)

    def met(self, parties: Sequence[int]) -> None:
        """Makes the connections of some parties, so that no first call waits."""
        self._met.update(itertools.permutations(parties, 2))

    def begin(self, party: int, batch: Batch) -> Batch:
        with self._news:
            self._met.add((party, batch.peer))
            self._news.notify_all()
            while (batch.peer, party) not in self._met and party not in self.aborted:
                self._news.wait()
            queue = self.queues[party]
            queue.append(batch)
            self.most[party] = max(self.most[party], len(queue))
            self.together[party] = max(self.together[party], {item.peer for item in queue}, key=len)
            if party in self.aborted:
                self._end(party)
            self._advance()
        return batch

    def abort(self, party: int) -> None:
        with self._news:
            self.aborted.add(party)
            self._end(party)
            self._news.notify_all()

    def _end(self, party: int) -> None:
        for batch in self.queues[party]:
            batch.error = f"the group of party {party} was aborted"
            batch.ended.set()
        self.queues[party].clear()

    def _advance(self) -> None:
        while any(self._meet(party) for party in range(len(self.queues))):
            pass

    def _meet(self, party: int) -> bool:
        """Carries out what a party's head can do; whether there was anything."""
        if not self.queues[party] or not self.queues[party][0].sends:
            return False
        head = self.queues[party][0]
        theirs = self.queues[head.peer]
        if not theirs or theirs[0].sends or theirs[0].peer != party:
            return False
        sent, received = head.tensors.popleft(), theirs[0].tensors.popleft()
        if sent.nbytes != received.nbytes:
            head.error = theirs[0].error = f"{party} sent {sent.nbytes} bytes, {head.peer} takes {received.nbytes}"
        else:
            received.copy_(sent)
        for queue in (self.queues[party], theirs):
            if not queue[0].tensors or queue[0].error:
                queue.popleft().ended.set()
        return True


class ModelGroup(NcclGroup):
    """A party's side."""

    device = "cpu"

    def __init__(self, communicator: Communicator, party: int) -> None:
        self._communicator, self._party = communicator, party

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> Batch:
        return self._communicator.begin(self._party, Batch(peer, True, deque(tensors)))

    def receive(self, peer: int, tensors: Sequence[torch.Tensor]) -> Batch:
        return self._communicator.begin(self._party, Batch(peer, False, deque(tensors)))

    def abort(self) -> None:
        self._communicator.abort(self._party)
