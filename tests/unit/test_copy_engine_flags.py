"""The copy-engine transport's flags, with ranks that run in any order: no flag is lost, nobody waits for ever.

The transport's own code records what each rank enqueues; a scheduler then runs the ranks' operations in random orders:
those of all its streams one after the other, or of each stream on its own.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import defaultdict, deque
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

_SLOT = 1
"""Address of the first rank's word that says which gather its slot is free for."""


class Operation(NamedTuple):
    """What a stream does: takes or raises flags of a value, writes or reads memory, records or awaits an event."""

    kind: str
    addresses: tuple[int, ...] = ()
    value: int = 0
    event: int = 0


@dataclass
class Rank:
    """What one rank has enqueued, and its allocations."""

    number: int
    programs: dict[int, deque[Operation]] = field(default_factory=lambda: defaultdict(deque))
    used: int = 1024

    @property
    def program(self) -> deque[Operation]:
        """Of the calling stream."""
        return self.programs[0]


@dataclass
class Machine:
    """Ranks whose flags are one dictionary of words, and whose other memory is another."""

    ranks: list[Rank]
    current: int = 0
    words: dict[int, int] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)
    happened: set[int] = field(default_factory=set)
    """Numbers of the events that have."""
    gather: int = 0
    """Which one is being enqueued."""
    number: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """What the copies of each rank write, other than those of gathers, and what its sums read."""
    read: int = 0
    """How often staged shards were read."""

    def me(self) -> Rank:
        return self.ranks[self.current]

    def run(self, order: random.Random) -> None:
        """Run all programs to their ends, in a random order of ranks."""
        programs = [program for rank in self.ranks for program in rank.programs.values()]
        while any(programs):
            ready = [program for program in programs if program and self._may_run(program[0])]
            assert ready, f"all wait: {[program[0] for program in programs if program]}"
            self._run(order.choice(ready).popleft())

    def _run(self, operation: Operation) -> None:
        if operation.kind == "record":
            self.happened.add(operation.event)
        for address in operation.addresses:
            if operation.kind == "await slot":
                assert self.memory.get(address, 0) >= operation.value, "a slot is written before it is free"
                continue
            if operation.kind == "read":
                assert self.memory[address] == operation.value, f"{address:#x} is read too early or too late"
                self.read += 1
                continue
            if operation.kind == "write":
                self.memory[address] = operation.value
                continue
            if operation.kind == "raise":
                assert self.words.get(address, 0) == 0, f"the flag at {address:#x} is raised twice"
            self.words[address] = 0 if operation.kind == "take" else operation.value

    def _may_run(self, operation: Operation) -> bool:
        if operation.kind == "await":
            return operation.event in self.happened
        return operation.kind != "take" or all(self.words.get(a, 0) == operation.value for a in operation.addresses)


class _Driver:
    """Records instead of enqueuing."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def copy(self, copies: Sequence[PitchedCopy], stream: int, origin: int = 0) -> None:
        program = self._machine.me().programs[stream]
        for copy in copies:
            if not self._machine.gather:
                program.append(Operation("write", (copy.destination,), self._machine.number[self._machine.current]))
                continue
            # A copy takes a while: what it reads must not change before its end.
            reading = Operation("read", (origin + copy.source,), self._machine.gather)
            await_slot = Operation("await slot", (_SLOT + self._machine.current,), self._machine.gather)
            program += [await_slot, reading, reading]

    def enqueue(self, operations: Sequence[Operation], stream: int) -> None:
        self._machine.me().programs[stream].extend(operations)

    def allow_calls_during_capture(self) -> None:
        pass


def _operations(value: int, *, raised: Sequence[int] = (), taken: Sequence[int] = ()) -> list[Operation]:
    """What :class:`_Driver` records of flags that are raised and taken."""
    both = (Operation("raise", tuple(raised), value), Operation("take", tuple(taken), value))
    return [operation for operation in both if operation.addresses]


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
        if dtype != torch.int32:
            memory: Any = torch.empty(numel, dtype=dtype)  # what gets there is in the machine's words
            memory.address = first
            return memory

        def fill(value: int) -> None:
            for index in range(numel):
                self._machine.words[first + index * dtype.itemsize] = value

        return SimpleNamespace(fill_=fill)


def _summing(machine: Machine) -> Callable[..., tuple[()]]:
    """In the place of ``accumulate_parts``: a sum takes a while, and each part must be there until its end."""

    def accumulate_parts(parts: Any, sinks: Stack, *_: object, **__: object) -> tuple[()]:
        rank = machine.current
        row = len(sinks) * sinks.nbytes
        rows = tuple(parts.address + place * row for place in range(len(machine.ranks) - 1))
        reading = Operation("read", rows, machine.number[rank])
        machine.me().program.extend([reading, reading])
        return ()

    return accumulate_parts


def _always(value: object) -> Callable[..., Any]:
    return lambda *_, **__: value


class _Streams:
    """Makes streams and events: all streams are one, or each is one of its own."""

    def __init__(self, machine: Machine, *, apart: bool) -> None:
        self._machine, self._apart = machine, apart
        self._streams, self._events = itertools.count(1), itertools.count(1)
        self.calling = self._stream(0)

    def make(self, *_: object, **__: object) -> SimpleNamespace:
        """A stream, whose operations are a program of its own if streams are apart."""
        return self._stream(next(self._streams) if self._apart else 0)

    def _stream(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=handle)

    def event(self) -> SimpleNamespace:
        """An event, whose number is new whenever it is recorded."""
        event = SimpleNamespace(number=0, query=_always(True))

        def record(stream: SimpleNamespace) -> None:
            event.number = next(self._events)
            self._machine.me().programs[stream.cuda_stream].append(Operation("record", event=event.number))

        def wait(stream: SimpleNamespace) -> None:
            self._machine.me().programs[stream.cuda_stream].append(Operation("await", event=event.number))

        event.record, event.wait = record, wait
        return event


@contextlib.contextmanager
def machine_of(size: int, *, apart: bool = False) -> Iterator[tuple[Machine, list[CopyEngineTransport]]]:
    """Ranks with a transport each, made by the transport's own constructor; ``apart``: each stream runs by itself."""
    machine = Machine([Rank(number) for number in range(size)])
    streams = _Streams(machine, apart=apart)
    with pytest.MonkeyPatch.context() as patch:
        for module in (copy_engine, symmetric):
            patch.setattr(module, "SymmetricBuffer", lambda _group, nbytes, _device: _Buffer(machine, nbytes))
            patch.setattr(module, "CudaDriver", lambda: _Driver(machine))
            patch.setattr(dist, "get_rank", lambda _group=None: machine.current)
        patch.setattr(symmetric, "MemoryOperations", _operations)
        patch.setattr(dist, "get_world_size", _always(size))
        patch.setattr(dist, "get_process_group_ranks", _always(list(range(size))))
        patch.setattr(copy_engine, "Copies", tuple)
        patch.setattr(copy_engine, "accumulate_parts", _summing(machine))
        patch.setattr(copy_engine, "Watchdog", _always(SimpleNamespace(expect_stream=_always(None))))
        patch.setattr(copy_engine, "current_stream", _always(streams.calling))
        patch.setattr(torch.cuda, "Stream", streams.make)
        patch.setattr(copy_engine, "Event", streams.event)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", _always(streams.calling.cuda_stream), raising=False)
        patch.setattr(torch.cuda, "is_current_stream_capturing", _always(False))
        patch.setattr(torch.cuda, "synchronize", _always(None))
        transports = []
        for rank in range(size):
            machine.current = rank
            transports.append(CopyEngineTransport(object(), torch.device("cpu"), timeout_s=1.0))  # type: ignore[arg-type]
        yield machine, transports


def _act(transport: CopyEngineTransport, action: str, size: int) -> None:
    shard, weight = Stack([torch.zeros(2, 4)]), Stack([torch.zeros(2 * size, 4)])
    machine: Any = vars(transport._driver)["_machine"]
    machine.number[machine.current] += 1
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


def test_a_sum_is_launched_again_at_any_addresses_but_only_for_the_same_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with machine_of(2) as (_, transports):
        done: list[str] = []
        sent: list[int] = []

        def add(*_: Any, **__: Any) -> list[Callable[..., None]]:
            done.append("prepared")
            return [lambda *addresses: done.append(f"again from {addresses[1]:#x} to {addresses[2]:#x}")]

        def note_sends(copies: Sequence[PitchedCopy], stream: int, origin: int) -> None:
            del stream
            sent[:] = [origin + copy.source for copy in copies]

        monkeypatch.setattr(copy_engine, "accumulate_parts", add)
        wgrad, sink = Stack([torch.zeros(4, 4)]), Stack([torch.zeros(2, 4)])
        transport = transports[0]
        monkeypatch.setattr(transport._driver, "copy", note_sends)

        def reduced(
            sink: Stack, label: str = "a", *, wgrad: Stack = wgrad, divisor: int = 2, accumulate: bool = True
        ) -> list[str]:
            """In both places of the ring."""
            done.clear()
            for _ in range(2):
                transport.reduce_scatter(wgrad, sink, divisor, label, accumulate=accumulate)
                assert sent == [wgrad.address + wgrad.nbytes // 2], "the peer's half of this gradient"
            return list(done)

        def again(wgrad: Stack, sink: Stack) -> list[str]:
            return [f"again from {wgrad.address:#x} to {sink.address:#x}"] * 2

        prepared = ["prepared"] * 2
        assert reduced(sink) == prepared
        assert reduced(sink) == again(wgrad, sink)
        fresh, other = Stack([torch.zeros(4, 4)]), Stack([torch.zeros(2, 4)])
        assert len({wgrad.address, fresh.address, sink.address, other.address}) == 4
        assert reduced(other, wgrad=fresh) == again(fresh, other), "other memory"
        assert reduced(sink, "b") == prepared
        unaligned = torch.zeros(9)[1:].view(2, 4)
        for changed in (
            lambda: reduced(Stack([unaligned])),
            lambda: reduced(Stack([sink[0].view(torch.int32)])),
            lambda: reduced(sink, divisor=1),
            lambda: reduced(sink, accumulate=False),
        ):
            assert changed() == prepared
            assert reduced(sink) == prepared
        transport.reduce_scatter(Stack([torch.zeros(400, 4)]), Stack([torch.zeros(200, 4)]), 2, "c", accumulate=True)
        assert reduced(sink) == prepared, "the ring has grown, and lies elsewhere"


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


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(2, 3),
    before=st.integers(0, 3),
    captured=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    order=st.lists(st.sampled_from([0, 1, 2, 3]), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_gradient_is_written_over_another_that_is_being_summed(
    size: int, before: int, captured: tuple[int, int], order: list[int], seed: int
) -> None:
    """Reductions before two captures, their replays in any ``order``, and 2 or 3 reductions outside between these."""
    with machine_of(size) as (machine, transports):
        for rank, transport in enumerate(transports):
            machine.current = rank
            program = machine.me().program

            def reduce(count: int, transport: CopyEngineTransport = transport) -> None:
                for _ in range(count):
                    _act(transport, "reduce", size)

            reduce(before)
            recordings = []
            for count in captured:
                begin = len(program)
                transport.change_mode(capturing=True)
                reduce(count)
                transport.change_mode(capturing=False)
                recordings.append([program.pop() for _ in range(len(program) - begin)][::-1])
            for what in order:
                if what < len(recordings):
                    program.extend(recordings[what])
                else:
                    reduce(what)
        machine.run(random.Random(seed))  # noqa: S311


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(2, 4),
    actions=st.lists(st.sampled_from(["staged", "reduce", "pair"]), min_size=1, max_size=12),
    apart=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_staged_shards_are_read_after_they_have_come_and_before_the_next_ones_do(
    size: int, actions: list[str], apart: bool, seed: int
) -> None:
    with machine_of(size, apart=apart) as (machine, transports):
        before = dict(machine.words)
        for rank, transport in enumerate(transports):
            machine.current = rank
            weight = Stack([torch.zeros(2 * size, 4)])
            for number, action in enumerate(actions, 1):
                if action != "staged":
                    _act(transport, action, size)
                    continue
                machine.me().program.append(Operation("write", (_SLOT + rank,), number))
                shards = transport.stage(weight)
                assert transport._staged is not None
                copies: Any = transport._staged.gather.copies
                own = copies[-1]
                machine.gather = number
                machine.me().program.append(Operation("write", (own.source,), number))
                transport.all_gather(weight, shards, f"gather {number}")
                machine.gather = 0
        machine.run(random.Random(seed))  # noqa: S311
        raised = {address for address, value in machine.words.items() if value}
        assert raised == {address for address, value in before.items() if value}
        reduced = 2 * size * (size - 1) * actions.count("reduce")
        assert machine.read == 2 * size**2 * actions.count("staged") + reduced


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 4), gathers=st.lists(st.integers(0, 2), min_size=1, max_size=5), seed=st.integers(0, 2**32 - 1)
)
def test_gathers_read_what_was_published_last(size: int, gathers: list[int], seed: int) -> None:
    """The own chunk too; ``gathers``: how many follow each publication."""
    with machine_of(size) as (machine, transports):
        for rank, transport in enumerate(transports):
            machine.current = rank
            shard, weight = Stack([torch.zeros(2, 4)]), Stack([torch.zeros(2 * size, 4)])
            for number, count in enumerate(gathers, 1):
                machine.me().program.append(Operation("write", (_SLOT + rank,), number))
                machine.number[rank] = number
                transport.publish([shard])
                machine.gather = number
                for _ in range(count):
                    transport.all_gather(weight, shard, "gather")
                machine.gather = 0
        machine.run(random.Random(seed))  # noqa: S311
        assert machine.read == 2 * size**2 * sum(gathers)


def test_ranks_that_gather_different_staged_shards_wait_for_each_other() -> None:
    with machine_of(3, apart=True) as (machine, transports):
        for rank, transport in enumerate(transports):
            machine.current = rank
            weight = Stack([torch.zeros(6, 4)])
            transport.all_gather(weight, transport.stage(weight), f"gather of {'v' if rank == 1 else 'w'}")
        with pytest.raises(AssertionError, match="all wait: "):
            machine.run(random.Random(1))  # noqa: S311


def test_two_places_for_staged_shards_grow_with_the_largest_weight() -> None:
    with machine_of(2) as (machine, transports):
        for rank, transport in enumerate(transports):
            machine.current = rank
            for rows in (2, 400, 4):
                weight = Stack([torch.zeros(rows, 8) for _ in range(3)])
                shards = transport.stage(weight)
                assert (len(shards), shards.numel, shards.is_one_block) == (3, rows * 8 // 2, True)
                transport.all_gather(weight, shards, "gather")
            assert transport.nbytes()["staged_shards"] == 2 * 19456  # 3 * 400 * 8 * 4 / 2, rounded up to 512
