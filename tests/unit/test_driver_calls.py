"""Calls of the CUDA driver in an eager step do not grow: on a GPU, each of them takes microseconds of the host.

The engine and the copy-engine transport run as they are. Streams, events, the driver and symmetric memory only count.
Whoever makes the calls fewer lowers the limits here.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import etp
from etp.collectives import copy_engine, symmetric
from etp.collectives.copy_engine import CopyEngineTransport
from etp.collectives.driver import Copies, MemoryOperations
from etp.streams import Lane

HIDDEN, QUERIES, FFN, VOCABULARY, LAYERS = 32, 48, 112, 250, 8
"""Those of ``llama8b-8l`` in ``benchmarks/train_shapes.py``, divided by 128."""

LIMITS = {
    # By prefetch depth and microbatches; event: made.
    (1, 1): Counter(event=37, record=197, wait=186, copy=184, flags=36),
    (1, 4): Counter(event=142, record=749, wait=678, copy=574, flags=138),
    (2, 1): Counter(event=37, record=193, wait=178, copy=176, flags=36),
}


class Machine:
    """In the place of ``torch.cuda``, of the driver and of symmetric memory: counts calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.Event = lambda: Event(self)
        self.Stream = lambda *_, **__: Stream(self)
        self._current = Stream(self)
        self._used = 1 << 20

    def current_stream(self, device: object = None) -> Stream:
        del device
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        former, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = former

    def copy(self, copies: Copies, stream: int, origin: int = 0) -> None:
        del stream, origin
        self.calls["copy"] += len(copies.flat) + len(copies.pitched)

    def enqueue(self, operations: MemoryOperations, stream: int) -> None:
        del operations, stream
        self.calls["flags"] += 1

    def allow_calls_during_capture(self) -> None: ...

    def allocate(self, nbytes: int) -> int:
        address, self._used = self._used, self._used + nbytes
        return address


class Stream:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.cuda_stream = 0

    def wait_stream(self, other: Stream) -> None:
        del other
        self._machine.calls.update(record=1, wait=1)


class Event:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        machine.calls["event"] += 1

    def record(self, stream: Stream) -> None:
        del stream
        self._machine.calls["record"] += 1

    def wait(self, stream: Stream) -> None:
        del stream
        self._machine.calls["wait"] += 1


class Memory:
    """Symmetric memory of two ranks, which is only addresses."""

    def __init__(self, machine: Machine, nbytes: int) -> None:
        self.nbytes = nbytes
        self.addresses = [machine.allocate(nbytes) for _ in range(2)]
        self.local = self

    def data_ptr(self) -> int:
        return self.addresses[0]

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        del offset
        return torch.zeros(numel, dtype=dtype)


class NoWatchdog:
    def __init__(self, *_: object) -> None: ...
    def expect(self, *_: object) -> None: ...
    def expect_stream(self, *_: object) -> None: ...


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, world: dist.ProcessGroup) -> Machine:
    """Every lane and transport of the test runs on it."""
    del world
    machine = Machine()
    made = Lane.__init__

    def with_stream(self: Lane, *arguments: Any) -> None:
        made(self, *arguments)
        self._device_module, self._new_event, self._stream = cast("Any", machine), machine.Event, machine.Stream()

    monkeypatch.setattr(Lane, "__init__", with_stream)
    for module in (copy_engine, symmetric):
        monkeypatch.setattr(module, "SymmetricBuffer", lambda _group, nbytes, _device: Memory(machine, nbytes))
        monkeypatch.setattr(module, "CudaDriver", lambda: machine)
    monkeypatch.setattr(copy_engine, "accumulate_parts", lambda *_, **__: ())
    monkeypatch.setattr(copy_engine, "Watchdog", NoWatchdog)
    monkeypatch.setattr(copy_engine, "current_stream", machine.current_stream)
    monkeypatch.setattr(copy_engine, "Event", machine.Event)
    monkeypatch.setattr(torch.cuda, "Stream", machine.Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return machine


class Layer(nn.Module):
    """The linear layers of a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        sizes: Sequence[tuple[int, int]] = ((HIDDEN, QUERIES), (HIDDEN, HIDDEN), (HIDDEN, 2 * FFN), (FFN, HIDDEN))
        self.qkv, self.proj, self.fc1, self.fc2 = (nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.proj(self.qkv(x)[:, :HIDDEN])
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return cast("torch.Tensor", x + self.fc2(gate * up))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(self.embedding(tokens))), tokens)


def transport_of_two() -> CopyEngineTransport:
    """One that copies from and to a peer, in the only process that there is."""
    assert dist.group.WORLD is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda _group=None: 2)
        patch.setattr(dist, "get_rank", lambda _group=None: 0)
        return CopyEngineTransport(dist.group.WORLD, torch.device("cpu"), timeout_s=1.0)


def train(machine: Machine, depth: int, microbatches: int) -> Counter[str]:
    """The calls of a step, once the order of visits is known."""
    assert dist.group.WORLD is not None
    model = Net()
    config = etp.EtpConfig(pad_for_alignment=2, prefetch_depth=depth, reuse_across_forwards=True)
    runtime = etp.shard_module(model, dist.group.WORLD, config=config)
    runtime.routes.transports[dist.group.WORLD] = transport_of_two()
    assert len(runtime.groups) == 4 * LAYERS + 2
    tokens = torch.arange(4)
    for _ in range(3):
        machine.calls.clear()
        for _ in range(microbatches):
            model(tokens).backward()
        etp.wait_async_comms(model)
        runtime.mark_weights_changed()
    return machine.calls


@pytest.mark.parametrize(("depth", "microbatches"), LIMITS)
def test_calls_of_a_step_do_not_grow(machine: Machine, depth: int, microbatches: int) -> None:
    calls = train(machine, depth, microbatches)
    limits = LIMITS[depth, microbatches]
    assert calls.keys() == limits.keys()
    assert calls <= limits, calls
