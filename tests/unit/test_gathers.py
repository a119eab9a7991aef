"""What gathers and gradients come after: whatever wrote or read their memory before.

One process, with transports that copy at once, so that numbers are right whatever the order. Streams only note what
they are ordered after: what is compared is the order that streams and events give.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import etp
from etp.collectives.base import Transport
from etp.group import WeightGroup
from etp.reductions import Reductions
from etp.runtime import EtpRuntime
from etp.shard_grad import plain
from etp.stack import Stack
from etp.streams import InFlight, Lane

SIDE = 16


class Stream:
    """A stream that knows by number which work it is ordered after."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def wait_stream(self, other: Stream) -> None:
        self.seen |= other.seen


class Event:
    """What a stream had been given when it was recorded."""

    def __init__(self) -> None:
        self.seen: frozenset[int] = frozenset()

    def record(self, stream: Stream) -> None:
        self.seen = frozenset(stream.seen)

    def wait(self, stream: Stream) -> None:
        stream.seen |= self.seen


class Device:
    """In the place of ``torch.cuda``; checks every access to gathered weights and to gradients."""

    def __init__(self) -> None:
        self.Event = Event
        self._current = Stream()
        self._works = 0
        self._written: defaultdict[int, set[int]] = defaultdict(set)
        self._read: defaultdict[int, set[int]] = defaultdict(set)
        self._fresh: set[object] = set()
        # An address stands for one tensor: what the CPU's allocator would lend to any stream is not freed.
        self._kept: list[torch.Tensor] = []
        self.overtaken: list[str] = []
        self.gathers = 0
        self.reductions = 0

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

    def use(self, stream: Stream) -> None:
        self._current = stream

    def work(self, stream: Stream) -> int:
        self._works += 1
        stream.seen.add(self._works)
        return self._works

    def writes(self, buffer: torch.Tensor, stream: Stream, label: str) -> None:
        """``stream`` writes ``buffer``."""
        address = buffer.data_ptr()
        self._kept.append(buffer.detach())
        if not self._written[address] <= stream.seen:
            self.overtaken.append(f"{label} overtakes another write")
        if not self._read[address] <= stream.seen:
            self.overtaken.append(f"{label} overtakes a reader")
        self._written[address], self._read[address] = {self.work(stream)}, set()

    def reads(self, buffer: torch.Tensor, label: str) -> None:
        if not self._written[buffer.data_ptr()] <= self._current.seen:
            self.overtaken.append(f"a reader of {label} overtakes its write")
        self._read[buffer.data_ptr()].add(self.work(self._current))

    def allocates(self, fresh: torch.Tensor, label: str) -> None:
        """The current stream has allocated ``fresh`` and writes it; what is freed, it may write at once."""
        home, address = self._current, fresh.data_ptr()
        self._kept.append(fresh.detach())
        self._written[address], self._read[address] = {self.work(home)}, set()

        def freed(_: object) -> None:
            self._fresh.discard(reference)
            if not self._written[address] | self._read[address] <= home.seen:
                self.overtaken.append(f"{label} is freed while it is used")

        reference = weakref.ref(fresh, freed)
        self._fresh.add(reference)


class Copies(Transport):
    """A transport for one process, whose gathers have an end of their own, as those of ``copy_engine`` have."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def all_gather(self, outputs: Stack, shards: Stack, label: str) -> InFlight:
        stream, end = self._device.current_stream(), Event()
        for output, shard in zip(outputs, shards, strict=True):
            output.copy_(shard)
            self._device.writes(output, stream, label)
            self._device.gathers += 1
        end.record(stream)
        return InFlight(end)

    def reduce_scatter(self, wgrads: Stack, sinks: Stack, divisor: int, label: str, *, accumulate: bool) -> InFlight:
        del divisor
        for wgrad, sink in zip(wgrads, sinks, strict=True):
            self._device.reads(wgrad, label)
            self._device.reductions += 1
            self._device.writes(sink, self._device.current_stream(), f"the sum of {label}")
            (sink.add_ if accumulate else sink.copy_)(wgrad)
        return InFlight()


class Publishes(Copies):
    """One to which weights are published; there is nothing to copy."""

    publishes = True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Every lane of the test has a stream of this device."""
    machine = Device()
    made, take, lease = Lane.__init__, WeightGroup.take, Reductions.buffer

    def with_stream(self: Lane, *arguments: Any) -> None:
        made(self, *arguments)
        self._device_module, self._new_event, self._stream = machine, Event, Stream()

    def read(self: WeightGroup, lane: Lane, *, transposed: bool = False) -> list[torch.Tensor]:
        weights = take(self, lane, transposed=transposed)
        for weight in weights:
            machine.reads(weight, self.name)
        return weights

    def lent(self: Reductions, group: WeightGroup, index: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = lease(self, group, index, dtype)
        machine.writes(buffer, machine.current_stream(), f"the gradient of {group.name}")
        return buffer

    monkeypatch.setattr(Reductions, "buffer", lent)
    monkeypatch.setattr(Lane, "__init__", with_stream)
    monkeypatch.setattr(WeightGroup, "take", read)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield machine
    dist.destroy_process_group()


class Net(nn.Module):
    """Weights of one shape, of which one is an expert's, sharded over another process group and gathered elsewhere."""

    def __init__(self, experts: dist.ProcessGroup) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(3))
        self.expert = etp.GroupedLinear(1, SIDE, SIDE, bias=False, etp_group=experts)

    def forward(self, x: torch.Tensor, *, last: bool = True) -> torch.Tensor:
        x = self.dense[1](self.dense[0](x))
        x = self.expert(x, [x.shape[0]])
        return cast("torch.Tensor", self.dense[2](x)) if last else x


def sharded(device: Device, transport: type[Copies], **options: Any) -> tuple[Net, EtpRuntime]:
    torch.manual_seed(0)
    groups = [dist.group.WORLD, dist.new_group([0])]
    model = Net(groups[1])
    config = etp.EtpConfig(pad_for_alignment=1, **options)
    runtime = etp.shard_module(model, groups[0], expert_group=groups[1], config=config)
    for group in groups:
        runtime.routes.transports[group] = transport(device)
    return model, runtime


@pytest.mark.parametrize("transport", [Copies, Publishes])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("reuse", [False, True])
def test_no_gather_overtakes_who_used_its_slot_before(
    device: Device, transport: type[Copies], depth: int, reuse: bool
) -> None:
    """Also not one that nobody took, as where an iteration was predicted to go on like the one before."""
    model, runtime = sharded(device, transport, prefetch_depth=depth, reuse_across_forwards=reuse)
    assert len({len({g.spec for g in runtime.groups})}) == 1, "slots are shared across process groups"
    x = torch.randn(2, SIDE, requires_grad=True)

    def train(microbatches: int, *, last: bool = True) -> None:
        for _ in range(microbatches):
            model(x, last=last).sum().backward()
        etp.wait_async_comms(model)
        runtime.mark_weights_changed()

    def evaluate() -> None:
        with torch.no_grad():
            model(x)

    for _ in range(2):
        for microbatches in (2, 2, 1, 3):
            train(microbatches)
            evaluate()
            evaluate()
        train(2, last=False)
        train(2)
        runtime.drain()
    assert device.gathers > 40
    assert device.overtaken == []


def test_a_profile_names_the_publication_of_weights(device: Device) -> None:
    model, runtime = sharded(device, Publishes)
    model(torch.randn(2, SIDE)).sum().backward()
    runtime.mark_weights_changed()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as run:
        model(torch.randn(2, SIDE)).sum().backward()
    found = sorted(e.name for e in run.events() if e.name.startswith("etp: publication") and "gradient" not in e.name)
    # One for each process group, named by its first weight group.
    groups = [[g.name for g in runtime.groups if g.process_group is one] for one in runtime.routes.transports]
    assert found == sorted(f"etp: publication of {g[0]} and {len(g) - 1} other weight groups" for g in groups)


@pytest.mark.parametrize("transport", [Copies, Publishes])
def test_a_gather_comes_after_one_on_another_lane_that_was_abandoned(device: Device, transport: type[Copies]) -> None:
    model, runtime = sharded(device, transport, prefetch_depth=1)
    model(torch.randn(2, SIDE)).sum().backward()
    by_name = {group.name: group for group in runtime.groups}
    # The wanted ones share the first slot: the expert's weight is the third that was visited.
    dense, expert = by_name["dense.0.weight"], by_name["expert.weight0"]
    assert dense.slot is expert.slot
    gathers = runtime.gathers
    for first, second in ((dense, expert), (expert, dense)):
        gathers._issue(first.rows, first.slot, runtime.routes.of(first))
        assert first.pending
        gathers._issue(second.rows, second.slot, runtime.routes.of(second))
        assert not first.pending
    assert device.overtaken == []


class Then(torch.autograd.Function):
    """Call one function where the forward pass goes by and another where the backward pass does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Callable[[], None], backward: Callable[[], None]) -> torch.Tensor:
        ctx.backward_call = backward
        forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.backward_call()
        return grad, None, None


class FreshGradient(torch.autograd.Function):
    """A linear whose gradient is a tensor of its own, as that of an embedding is, and not in a leased buffer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, device: Device) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.device = weight, device
        return F.linear(x, weight.materialize()[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        out = grad @ ctx.weight.materialize()[0]
        wgrad = grad.t() @ x
        ctx.device.allocates(wgrad, f"the fresh gradient of {ctx.weight.fqn}")
        ctx.weight.reduce_wgrads([wgrad])
        return out, None, None


class Branches(nn.Module):
    """Layers of two sizes in random order on two streams, which meet at the start and at the end only."""

    def __init__(self, device: Device, order: random.Random) -> None:
        super().__init__()
        self.device, self.side = device, Stream()
        self.small = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(5))
        self.large = nn.ModuleList(nn.Linear(SIDE, 3 * SIDE, bias=False) for _ in range(3))
        # Each weight as often as it is here; some twice, in which case its gradients are added locally.
        layers = [*self.small, *self.large, *order.choices([*self.small, *self.large], k=2)]
        order.shuffle(layers)
        self.plan = [(layer, order.random() < 0.5, order.random() < 0.3) for layer in layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main, side = self.device.current_stream(), self.side

        def hop(x: torch.Tensor, to: Stream) -> torch.Tensor:
            former = self.device.current_stream()
            return cast("torch.Tensor", Then.apply(x, lambda: self.device.use(to), lambda: self.device.use(former)))

        ends = {
            False: x,
            True: Then.apply(x, lambda: side.wait_stream(main), lambda: main.wait_stream(side)),
        }
        for layer, beside, fresh in self.plan:
            y = hop(ends[beside], side if beside else main)
            y = FreshGradient.apply(y, layer.weight, self.device) if fresh else layer(y)
            ends[beside] = hop(y[:, :SIDE].contiguous(), main)
        end = Then.apply(ends[True], lambda: main.wait_stream(side), lambda: side.wait_stream(main))
        return ends[False] + end


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("updated_late", [False, True])
def test_two_compute_streams_overtake_nobody(device: Device, seed: int, once: bool, updated_late: bool) -> None:
    order = random.Random(seed)  # noqa: S311
    torch.manual_seed(seed)
    model = Branches(device, order)
    config = etp.EtpConfig(
        pad_for_alignment=1,
        prefetch_depth=order.choice([0, 1, 2]),
        reduce_once_per_iteration=once,
        reuse_across_forwards=order.random() < 0.5,
    )
    runtime = etp.shard_module(model, dist.group.WORLD, config=config)
    runtime.routes.transports[dist.group.WORLD] = Copies(device)
    for group in runtime.groups if updated_late else ():
        group.before_gather.append(lambda: None)
    for _ in range(3):
        x = torch.randn(2, SIDE)
        for _ in range(2):
            model(x.requires_grad_()).square().sum().backward()
        etp.wait_async_comms(model)
        for param in model.parameters():
            device.reads(plain(param.grad), "a gradient")
        model.zero_grad()
        runtime.mark_weights_changed()
    assert device.reductions >= 3 * (8 if once else 16)
    assert device.overtaken == []


@pytest.mark.parametrize("depth", [0, 1, 5, 12])
def test_gathers_run_as_far_ahead_as_there_are_slots_for(world: dist.ProcessGroup, depth: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(20)))
    runtime = etp.shard_module(model, world, config=etp.EtpConfig(prefetch_depth=depth))
    model(torch.randn(2, 16)).sum().backward()
    in_flight = []
    for layer in model:
        layer.register_forward_hook(lambda *_: in_flight.append(sum(group.pending for group in runtime.groups)))
    model(torch.randn(2, 16))
    assert in_flight == [min(depth, 19 - place) for place in range(20)]
    assert len(runtime.modes.now.cache.slots()) == depth + 1
