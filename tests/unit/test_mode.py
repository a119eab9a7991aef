"""What changes when a capture into a CUDA graph begins or ends. That replays are right is shown on GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import etp
from etp.cache import BufferCache, BufferSpec
from etp.mode import Modes
from etp.runtime import EtpRuntime
from tests.unit.test_reductions import Overlaps

SIDE = 16
SPEC = BufferSpec((4, 3), torch.float32, torch.device("cpu"))


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A stack; while it holds a number, work counts as captured by the graph of that number."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    numbers: list[int] = []
    monkeypatch.setattr(Modes, "_current_capture", lambda *_: numbers[-1] if numbers else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: bool(numbers), raising=False)
    monkeypatch.setattr(Modes, "captures_part", lambda modes, _: modes.now.is_part and bool(numbers))
    yield numbers
    dist.destroy_process_group()


@contextlib.contextmanager
def capturing(numbers: list[int], number: int) -> Iterator[None]:
    numbers.append(number)
    try:
        yield
    finally:
        numbers.pop()


def sharded(**options: object) -> tuple[nn.Sequential, EtpRuntime]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(4)))
    config = etp.EtpConfig(**options)  # type: ignore[arg-type]
    return model, etp.shard_module(model, dist.group.WORLD, config=config)


def train(model: nn.Module) -> torch.Tensor:
    x = torch.ones(2, SIDE)
    loss = model(x).square().sum()
    loss.backward()
    return loss.detach()


def evaluate(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(torch.ones(2, SIDE))
    return output


def pending(runtime: EtpRuntime) -> list[str]:
    """What is being gathered: nobody joins it if a capture ends here."""
    return [group.name for group in runtime.groups if group.pending]


def addresses(cache: BufferCache) -> set[int]:
    return {buffer.data_ptr() for slot in cache.slots() if slot.allocated for buffer in slot.buffers}


def test_the_first_capture_takes_over_what_the_warm_up_filled(capture: list[int]) -> None:
    model, runtime = sharded()
    expected = train(model)
    warm = addresses(runtime.modes.now.cache)
    bytes_before = etp.resident_nbytes(model)["gather_slots"]
    with capturing(capture, 7):
        assert torch.equal(train(model), expected)
        assert runtime.modes.capturing
        assert addresses(runtime.modes.now.cache) == warm
    assert not runtime.modes.capturing
    assert etp.resident_nbytes(model)["gather_slots"] == bytes_before
    assert torch.equal(train(model), expected)
    eager, captured = runtime.modes.all
    assert addresses(captured.cache) == warm
    assert addresses(eager.cache)
    assert not addresses(eager.cache) & warm


def test_a_penalty_is_captured_behind_the_reduction_into_the_same_gradient(capture: list[int]) -> None:
    model, runtime = sharded(pad_for_alignment=1)
    plain = [cast("Any", param).local_shard().clone().requires_grad_() for param in model.parameters()]
    runtime.routes.transports[dist.group.WORLD] = Overlaps()
    x = torch.ones(2, SIDE)
    with capturing(capture, 1):
        for _ in range(2):  # the second adds to what the first has left
            (model(x).square().sum() + sum(param.square().sum() for param in model.parameters())).backward()
    hidden = x
    for weight in plain:
        hidden = hidden @ weight.t()
    (2 * (hidden.square().sum() + sum(weight.square().sum() for weight in plain))).backward()
    for param, weight in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(torch.as_tensor(param.grad), weight.grad)


def test_the_chain_is_described_at_any_time(capture: list[int]) -> None:
    model, runtime = sharded()
    assert runtime.gathers.describe_chain() == "chain of 0 weight groups, prefetch depth 1"
    train(model)

    def slots() -> list[str]:
        return [line.split(", ")[-2] for line in runtime.gathers.describe_chain().splitlines()[1:]]

    assert slots() == ["slot 0", "slot 1", "slot 0", "slot 1"]
    with capturing(capture, 1):
        assert runtime.modes.capturing
        assert slots() == ["no slot"] * 4
        train(model)
        assert slots() == ["slot 0", "slot 1", "slot 0", "slot 1"]
    assert not runtime.modes.capturing
    assert slots() == ["no slot"] * 4


def test_nothing_gathered_before_a_capture_counts_inside_and_the_other_way_round(capture: list[int]) -> None:
    model, runtime = sharded(reuse_across_forwards=True)

    def gathers(number: int | None, *, announce: bool = True) -> int:
        """Of two steps, which are an iteration if a change of weights is announced before them."""
        if announce:
            runtime.mark_weights_changed()
        runtime.counters.reset()
        with capturing(capture, number) if number is not None else contextlib.nullcontext():
            train(model)
            train(model)
        return sum(runtime.counters.gathers.values())

    fresh = gathers(None)
    assert gathers(None) == fresh
    # Each capture begins with nothing, and so does the first pass behind it.
    assert gathers(1) == fresh
    # Behind a whole captured step no count of changes is trusted: both passes gather all that forward needs.
    assert gathers(None) > fresh
    assert gathers(2) == fresh

    model, runtime = sharded(reuse_across_forwards=True)
    gathers(None)
    assert gathers(None, announce=False) < fresh, "weights that did not change are still there outside of captures"


def test_a_captured_evaluation_leaves_no_gather_behind(capture: list[int]) -> None:
    """Of a module in training mode too, whose passes without gradients may be those of reentrant checkpointing."""
    model, runtime = sharded(reuse_across_forwards=True)
    for _ in range(2):
        train(model)
        etp.wait_async_comms(model)
        runtime.mark_weights_changed()
    expected = [evaluate(model) for _ in range(3)]
    with capturing(capture, 1):
        for before in expected:
            assert torch.equal(evaluate(model), before)
            assert pending(runtime) == []


def test_a_captured_evaluation_that_ends_early_leaves_no_gather_behind(capture: list[int]) -> None:
    """The order that it follows is that of passes which went further."""

    class Ends(nn.Sequential):
        def forward(self, x: torch.Tensor, layers: int = 4) -> torch.Tensor:
            for layer in list(self)[:layers]:
                x = layer(x)
            return x

    torch.manual_seed(0)
    model = Ends(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(4)))
    runtime = etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig())
    for _ in range(2):
        train(model)
    x = torch.ones(2, SIDE)
    with torch.no_grad():
        expected = [model(x, 2), model(x)]
        with capturing(capture, 1):
            assert torch.equal(model(x, 2), expected[0])
            assert pending(runtime) == []
            assert torch.equal(model(x), expected[1])


def test_a_captured_step_gathers_ahead_within_its_passes(capture: list[int]) -> None:
    model, runtime = sharded(reuse_across_forwards=True)
    for _ in range(3):
        train(model)
        etp.wait_async_comms(model)
        runtime.mark_weights_changed()
    seen: list[list[str]] = []
    layer: Any = model[1]
    layer.register_forward_pre_hook(lambda *_: seen.append(pending(runtime)))
    with capturing(capture, 1):
        train(model)
        etp.wait_async_comms(model)
        assert pending(runtime) == []
    assert seen == [["1.weight"]]


def test_microbatches_of_a_captured_step_overlap(capture: list[int]) -> None:
    """Whoever waits at the end of an iteration does so inside the graph: no backward pass has to end what it began."""
    model, runtime = sharded(reuse_across_forwards=True)
    runtime.finish_with_backward = False
    x = torch.ones(2, SIDE)

    def iteration() -> tuple[list[torch.Tensor], list[tuple[list[str], bool]]]:
        """Losses and gradients; what is being gathered after each microbatch, and whether gradients are reduced."""
        model.zero_grad()
        runtime.mark_weights_changed()
        runtime.counters.reset()
        found, under_way = [], []
        for _ in range(3):
            loss = model(x).square().sum()
            loss.backward()
            found.append(loss.detach())
            under_way.append((pending(runtime), not runtime.reductions.idle))
        etp.wait_async_comms(model)
        assert pending(runtime) == []
        assert runtime.reductions.idle
        return [*found, *(p.grad.clone() for p in model.parameters() if p.grad is not None)], under_way

    eager = [iteration() for _ in range(3)][-1]
    # The input needs no gradient, so the backward pass left the first weight out.
    assert eager[1] == [(["0.weight"], True), (["0.weight"], True), ([], True)]
    gathers = runtime.counters.gathers
    for number in (1, 2):
        with capturing(capture, number):
            captured = iteration()
        assert captured[1] == eager[1]
        assert runtime.counters.gathers == gathers
        assert all(torch.equal(*pair) for pair in zip(captured[0], eager[0], strict=True))


def test_a_captured_backward_pass_that_may_end_the_graph_leaves_nothing_under_way(capture: list[int]) -> None:
    model, runtime = sharded(reuse_across_forwards=True)
    for _ in range(3):
        for _ in range(2):
            train(model)
        runtime.mark_weights_changed()
    with capturing(capture, 1):
        for _ in range(2):
            train(model)
            assert pending(runtime) == []
            assert runtime.reductions.idle


def test_a_backward_pass_ends_with_the_weights_that_the_next_forward_begins_with(capture: list[int]) -> None:
    del capture
    model, runtime = sharded(reuse_across_forwards=True)
    x = torch.ones(2, SIDE, requires_grad=True)
    for _ in range(3):
        runtime.mark_weights_changed()
        for microbatch in range(3):
            runtime.counters.reset()
            loss = model(x).square().sum()
            forward = sum(runtime.counters.gathers.values())
            loss.backward()
            assert pending(runtime) == []
            # Two slots: all weights, then all but the two that the last backward pass visited last.
            assert forward == (4 if microbatch == 0 else 2)


def test_captured_slots_survive_whatever_frees_the_others(capture: list[int]) -> None:
    model, runtime = sharded()
    train(model)
    with capturing(capture, 1):
        train(model)
    captured = runtime.modes.all[1].cache
    before = addresses(captured)
    train(model)
    runtime.release_buffers()
    assert not addresses(runtime.modes.now.cache)
    assert addresses(captured) == before
    with capturing(capture, 2):
        train(model)
        assert addresses(runtime.modes.now.cache) == before


def test_a_capture_with_gradients_under_way_is_refused(capture: list[int]) -> None:
    model, _ = sharded(reduce_once_per_iteration=True)
    train(model)
    with capturing(capture, 1), pytest.raises(etp.EtpStateError, match="wait_async_comms"):
        train(model)
    etp.wait_async_comms(model)
    with capturing(capture, 1):
        train(model)
        etp.wait_async_comms(model)


def test_a_part_that_only_adds_up_is_refused(capture: list[int]) -> None:
    model, _ = sharded(reduce_once_per_iteration=True)
    train(model)
    etp.wait_async_comms(model)
    with capturing(capture, 1), pytest.raises(etp.EtpStateError, match="reduce_once_per_iteration"):
        model[0](torch.ones(2, SIDE, requires_grad=True)).sum().backward()


def test_a_captured_backward_of_a_part_into_grad_is_refused(capture: list[int]) -> None:
    model, _ = sharded()
    train(model)
    with capturing(capture, 1), pytest.raises(etp.EtpStateError, match="make_graphed_callables"):
        model[0](torch.ones(2, SIDE, requires_grad=True)).sum().backward()


def test_a_captured_part_returns_its_gradient_and_runs_hooks_at_the_replay(capture: list[int]) -> None:
    model, _ = sharded()
    train(model)
    model.zero_grad()
    layer: Any = model[0]
    weight = layer.weight
    ran: list[str] = []
    weight.register_post_accumulate_grad_hook(lambda _: ran.append("hook"))
    x = torch.ones(2, SIDE)
    with capturing(capture, 1):
        (memory,) = torch.autograd.grad(layer(x).sum(), weight)
    assert weight.grad is None
    assert not ran
    assert torch.equal(memory, torch.full((SIDE, SIDE), 2.0))

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, param: torch.Tensor) -> torch.Tensor:
            del ctx
            return param.sum()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            del ctx, grad
            return memory.detach()

    for count in (1, 2):
        with torch._C.DisableTorchFunctionSubclass():
            Replay.apply(weight).backward()
        assert len(ran) == count
        # The memory of the graph is not taken for the gradient: the next replay will change it.
        assert weight.grad is not None
        assert weight.grad.data_ptr() != memory.data_ptr()
        assert torch.equal(weight.grad, memory * count)


def test_a_slot_that_a_pinned_cache_got_back_keeps_its_storage() -> None:
    cache = BufferCache(slots_per_shape=1, resident_bytes=0)
    slot = cache.reserve(SPEC)
    (buffer,) = slot.buffers
    cache.pin()
    cache.unreserve(slot)
    cache.clear()
    assert cache.slots() == [slot]
    assert slot.buffers[0] is buffer
