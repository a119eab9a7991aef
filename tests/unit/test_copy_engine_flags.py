"""The copy-engine transport's flags, with ranks that run in any order: no flag is lost, nobody waits for ever.

The transport's own code records what each rank enqueues; a scheduler then runs the ranks' operations in random orders.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from etp.collectives import copy_engine, symmetric
from etp.collectives.copy_engine import CopyEngineTransport
from etp.errors import StaleWeightError
from etp.stack import PitchedCopy, Stack

_APART = 1 << 40
"""Between the memories of two ranks."""


class Operation(NamedTuple):
    """What a stream does: takes or raises flags of a value, or anything else."""

    kind: str
    addresses: tuple[int, ...] = ()
    value: int = 0


@dataclass
class Rank:
    """What one rank has enqueued, and its allocations."""

    number: int
    program: deque[Operation] = field(default_factory=deque)
    used: int = 1024


@dataclass
class Machine:
    """Ranks whose memories are one dictionary of words."""

    ranks: list[Rank]
    current: int = 0
    words: dict[int, int] = field(default_factory=dict)

    def me(self) -> Rank:
        return self.ranks[self.current]

    def run(self, order: random.Random) -> None:
        """Run all programs to their ends, in a random order of ranks."""
        while any(rank.program for rank in self.ranks):
            ready = [rank for rank in self.ranks if rank.program and self._may_run(rank.program[0])]
            assert ready, f"all wait: {[rank.program[0] for rank in self.ranks if rank.program]}"
            operation = order.choice(ready).program.popleft()
            for address in operation.addresses:
                if operation.kind == "raise":
                    assert self.words.get(address, 0) == 0, f"the flag at {address:#x} is raised twice"
                self.words[address] = operation.value if operation.kind == "raise" else 0

    def _may_run(self, operation: Operation) -> bool:
        return operation.kind != "take" or all(self.words.get(a, 0) == operation.value for a in operation.addresses)


class _Driver:
    """Records instead of enqueuing."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def copy_pitched(self, copy: PitchedCopy, stream: int) -> None:
        del copy, stream
        self._machine.me().program.append(Operation("other"))

    def enqueue(self, operations: Operation, stream: int) -> None:
        del stream
        self._machine.me().program.append(operations)

    def allow_calls_during_capture(self) -> None:
        pass


class _Operations:
    """What :class:`_Driver` records of flags that are taken or raised."""

    @staticmethod
    def take_flags(addresses: Sequence[int], value: int) -> Operation:
        return Operation("take", tuple(addresses), value)

    @staticmethod
    def raise_flags(addresses: Sequence[int], value: int) -> Operation:
        return Operation("raise", tuple(addresses), value)


class _Buffer:
    """Symmetric memory that is only addresses; what is filled in goes into the machine's words."""

    def __init__(self, machine: Machine, nbytes: int) -> None:
        rank = machine.me()
        self._machine, self.nbytes = machine, nbytes
        self._start, rank.used = rank.used, rank.used + nbytes
        self.addresses = [other.number * _APART + self._start for other in machine.ranks]
        self.local = SimpleNamespace(data_ptr=lambda: self.addresses[rank.number])

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Any:
        first = self.addresses[self._machine.current] + offset

        def fill(value: int) -> None:
            for index in range(numel):
                self._machine.words[first + index * dtype.itemsize] = value

        return SimpleNamespace(fill_=fill)


def _always(value: object) -> Callable[..., Any]:
    return lambda *_, **__: value


@contextlib.contextmanager
def machine_of(size: int) -> Iterator[tuple[Machine, list[CopyEngineTransport]]]:
    """Ranks with a transport each, made by the transport's own constructor."""
    machine = Machine([Rank(number) for number in range(size)])
    stream = SimpleNamespace(cuda_stream=0, wait_event=_always(None), wait_stream=_always(None))
    event = SimpleNamespace(record=_always(None), query=_always(True))
    with pytest.MonkeyPatch.context() as patch:
        for module in (copy_engine, symmetric):
            patch.setattr(module, "SymmetricBuffer", lambda _group, nbytes, _device: _Buffer(machine, nbytes))
            patch.setattr(module, "CudaDriver", lambda: _Driver(machine))
            patch.setattr(dist, "get_rank", lambda _group=None: machine.current)
        patch.setattr(symmetric, "MemoryOperations", _Operations)
        patch.setattr(dist, "get_world_size", _always(size))
        patch.setattr(dist, "get_process_group_ranks", _always(list(range(size))))
        patch.setattr(copy_engine, "accumulate_parts", _always(None))
        patch.setattr(copy_engine, "Watchdog", _always(SimpleNamespace(expect_stream=_always(None))))
        patch.setattr(copy_engine, "current_stream", _always(stream))
        values = {"Stream": stream, "Event": event, "is_current_stream_capturing": False}
        for name, value in {**values, "synchronize": None}.items():
            patch.setattr(torch.cuda, name, _always(value))
        transports = []
        for rank in range(size):
            machine.current = rank
            transports.append(CopyEngineTransport(object(), torch.device("cpu"), timeout_s=1.0))  # type: ignore[arg-type]
        yield machine, transports


def _act(transport: CopyEngineTransport, action: str, size: int) -> None:
    shard, weight = Stack([torch.zeros(2, 4)]), Stack([torch.zeros(2 * size, 4)])
    if action == "step":
        transport.publish([shard])
        transport.all_gather(weight, shard, "gather")
        transport.finish_reading()
    elif action == "publish":
        transport.publish([shard])
    elif action == "pair":
        transport.pair("all-reduce", ["a", "b"])
    else:
        transport.reduce_scatter(weight, shard, size, "reduce", accumulate=True)


def test_a_shard_that_was_not_published_is_refused_before_anything_is_copied() -> None:
    with machine_of(3) as (machine, transports):
        machine.current = 1
        published, other = Stack([torch.zeros(2, 4)]), Stack([torch.zeros(2, 4)])
        transports[1].publish([published])
        before = list(machine.me().program)
        with pytest.raises(
            StaleWeightError, match=r"gather of w on rank 1 \(shard group: ranks \[0, 1, 2\]\): the shard"
        ):
            transports[1].all_gather(Stack([torch.zeros(6, 4)]), other, "gather of w")
        assert list(machine.me().program) == before


@settings(max_examples=50, deadline=None)
@given(size=st.integers(2, 5), other=st.integers(0, 4), before=st.integers(0, 3), seed=st.integers(0, 2**32 - 1))
def test_ranks_that_reduce_different_weights_wait_for_each_other(size: int, other: int, before: int, seed: int) -> None:
    """And reach their timeouts, rather than add what belongs to another weight."""
    with machine_of(size) as (machine, transports):
        for rank, transport in enumerate(transports):
            machine.current = rank
            for _ in range(before):
                _act(transport, "reduce", size)
            sink, wgrad = Stack([torch.zeros(2, 4)]), Stack([torch.zeros(2 * size, 4)])
            name = "b" if rank == other % size else "a"
            transport.reduce_scatter(wgrad, sink, size, f"reduce-scatter of {name}'s gradient", accumulate=True)
        with pytest.raises(AssertionError, match="all wait: ") as waiting:
            machine.run(random.Random(seed))  # noqa: S311
        assert str(waiting.value).count("kind='take'") == size


@settings(max_examples=50, deadline=None)
@given(size=st.integers(2, 5), other=st.integers(0, 4), before=st.integers(0, 3), seed=st.integers(0, 2**32 - 1))
def test_ranks_that_all_reduce_different_gradients_wait_for_each_other(
    size: int, other: int, before: int, seed: int
) -> None:
    """Of which the first and the last, and the message, are the same."""
    with machine_of(size) as (machine, transports):
        for rank, transport in enumerate(transports):
            machine.current = rank
            for _ in range(before):
                _act(transport, "reduce", size)
            middle = "c" if rank == other % size else "b"
            transport.pair("all-reduce of a to d", ["a", middle, "d"])
        with pytest.raises(AssertionError, match="all wait: ") as waiting:
            machine.run(random.Random(seed))  # noqa: S311
        assert str(waiting.value).count("kind='take'") == size


ACTIONS = st.lists(st.sampled_from(["step", "publish", "reduce", "pair"]), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(size=st.integers(2, 5), actions=ACTIONS, seed=st.integers(0, 2**32 - 1))
def test_no_order_of_ranks_loses_a_flag_or_stops(size: int, actions: list[str], seed: int) -> None:
    with machine_of(size) as (machine, transports):
        before = dict(machine.words)
        for rank, transport in enumerate(transports):
            machine.current = rank
            for action in actions:
                _act(transport, action, size)
        machine.run(random.Random(seed))  # noqa: S311
        raised = {address for address, value in machine.words.items() if value}
        # A sequence ends as it began, but for the words of a rank for itself, which nobody uses.
        assert raised == {address for address, value in before.items() if value}


@settings(max_examples=80, deadline=None)
@given(
    size=st.integers(2, 4),
    captured=ACTIONS,
    order=st.lists(st.booleans(), min_size=2, max_size=6),
    between=ACTIONS,
    seed=st.integers(0, 2**32 - 1),
)
def test_a_recorded_sequence_replays_between_others(
    size: int, captured: list[str], order: list[bool], between: list[str], seed: int
) -> None:
    """What a graph has recorded is enqueued again as it is, whatever came since."""
    with machine_of(size) as (machine, transports):
        recordings = []
        for rank, transport in enumerate(transports):
            machine.current = rank
            transport.change_mode(capturing=True)
            for action in captured:
                _act(transport, action, size)
            transport.change_mode(capturing=False)
            recordings.append(list(machine.me().program))
            machine.me().program.clear()
        for replay in order:
            for rank, transport in enumerate(transports):
                machine.current = rank
                if replay:
                    machine.me().program.extend(recordings[rank])
                else:
                    for action in between:
                        _act(transport, action, size)
        machine.run(random.Random(seed))  # noqa: S311
