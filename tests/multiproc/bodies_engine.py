"""Bodies: what the engine does when, and how often: order of events, traffic, memory, staleness, failures."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import etp
from etp.collectives.base import Transport
from etp.group import WeightGroup
from etp.stack import Stack as TensorStack
from etp.streams import InFlight
from tests.multiproc.models import PlannedFailureError, Tiny, batch, loss_of
from tests.support.launch import device

SIDE = 16
"""Square weights of this side need no padding at 1, 2 or 4 ranks with alignment 4."""


class Stack(nn.Module):
    """Linears of one shape without bias, so that every event is a weight's."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def stack(layers: int, **options: Any) -> tuple[Stack, etp.EtpRuntime]:
    torch.manual_seed(3)
    model = Stack(layers).to(device())
    return model, etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(pad_for_alignment=4, **options))


def train_once(model: nn.Module, rank: int, step: int = 0) -> None:
    generator = torch.Generator().manual_seed(17 * step + rank)
    model.zero_grad()
    model(torch.randn(5, SIDE, generator=generator).to(device())).square().mean().backward()


# Order of events ---------------------------------------------------------------------------------------------


class _Recorded(InFlight):
    def __init__(self, inner: InFlight, log: list[str], event: str) -> None:
        super().__init__(inner.end, among_peers=inner.among_peers)
        self._inner, self._log, self._event = inner, log, event

    def join(self) -> None:
        self._inner.join()
        self._log.append(self._event)


def record(transport: Transport, log: list[str]) -> Transport:
    """Let ``transport`` note when a collective is started and when its result is there."""
    gather, reduce = transport.all_gather, transport.reduce_scatter

    def all_gather(outputs: TensorStack, shards: TensorStack, label: str) -> InFlight:
        name = label.removeprefix("all-gather of ")
        log.append(f"gather {name}")
        return _Recorded(gather(outputs, shards, label), log, f"gathered {name}")

    def reduce_scatter(
        wgrads: TensorStack, sinks: TensorStack, divisor: int, label: str, *, accumulate: bool
    ) -> InFlight:
        name = label.removeprefix("reduce-scatter of ").removesuffix("'s gradient")
        log.append(f"reduce {name}")
        return _Recorded(reduce(wgrads, sinks, divisor, label, accumulate=accumulate), log, f"reduced {name}")

    transport.all_gather = all_gather  # type: ignore[method-assign]
    transport.reduce_scatter = reduce_scatter  # type: ignore[method-assign]
    return transport


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """The events of all runtimes whose first collective comes within this context."""
    from etp import routes

    log: list[str] = []
    select, take = routes.select_transport, WeightGroup.take

    def recording_select(*args: Any, **kwargs: Any) -> Transport:
        return record(select(*args, **kwargs), log)

    def recording_take(self: WeightGroup, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        weights = take(self, *args, **kwargs)
        log.append(f"use {self.name}")
        return weights

    with (
        mock.patch.object(routes, "select_transport", recording_select),
        mock.patch.object(WeightGroup, "take", recording_take),
    ):
        yield log


def events_of_a_step(rank: int, world_size: int, depth: int) -> tuple[list[str], list[str]]:
    """Events of the third step's forward and backward, with short names, plus where each layer computes."""
    with recorded() as log:
        model, _ = stack(4, prefetch_depth=depth)
        for index, layer in enumerate(model.layers):
            layer.register_forward_hook(lambda *_, index=index: log.append(f"compute {index}"))

            def hook(param: torch.Tensor, index: int = index) -> None:
                assert param.grad is not None
                log.append(f"hook {index} {param.grad.abs().sum().item() > 0}")

            layer.weight.register_post_accumulate_grad_hook(hook)
        for step in range(2):  # the first backward pass is guessed from the forward pass; from then on it is known
            train_once(model, rank, step)
        log.clear()
        model.zero_grad()
        loss = model(torch.randn(5, SIDE, device=device())).square().mean()
        forward = list(log)
        log.clear()
        loss.backward()
    return _short(forward), _short(log)


def gathers_between_passes(rank: int, world_size: int, depth: int) -> tuple[list[list[str]], bool]:
    """Gathers that the third iteration of three microbatches starts in each of its passes, and whether it is right.

    It is right if the weights after it are, bit for bit, those of a model that learns nothing across passes.
    """
    with recorded() as log:
        twins = [stack(4, prefetch_depth=depth, reuse_across_forwards=reuse)[0] for reuse in (True, False)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in twins]
        passes: list[list[str]] = []
        for iteration in range(3):
            for model, optimizer in zip(twins, optimizers, strict=True):
                for microbatch in range(3):
                    generator = torch.Generator().manual_seed(100 * iteration + 10 * microbatch + rank)
                    x = torch.randn(5, SIDE, generator=generator).to(device())
                    log.clear()
                    loss = model(x).square().mean()
                    forward = list(log)
                    log.clear()
                    loss.backward()
                    if iteration == 2 and model is twins[0]:
                        passes += [forward, list(log)]
                optimizer.step()
                optimizer.zero_grad()
    learning, plain = (etp.full_state_dict(model) for model in twins)
    same = all(torch.equal(learning[name], weight) for name, weight in plain.items())
    return [[event for event in _short(events) if event.startswith("gather ")] for events in passes], same


def _short(log: list[str]) -> list[str]:
    return [event.replace("layers.", "").replace(".weight", "") for event in log]


# Traffic ------------------------------------------------------------------------------------------------------


def gathers_per_step(rank: int, world_size: int, layers: int, options: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(gathers, bytes gathered, bytes reduced) of three steps with an optimizer step between."""
    model, runtime = stack(layers, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for step in range(3):
        runtime.counters.reset()
        train_once(model, rank, step)
        etp.wait_async_comms(model)
        optimizer.step()
        counters = runtime.counters
        totals = [sum(each.values()) for each in (counters.gathers, counters.gather_bytes, counters.reduce_bytes)]
        counts.append((totals[0], totals[1], totals[2]))
    return counts


def reuse_across_forwards(rank: int, world_size: int) -> dict[str, Any]:
    """Gathers of forwards with and without changes between, counted, announced and neither."""
    model, runtime = stack(3, reuse_across_forwards=True, resident_bytes=1 << 20)
    x = torch.randn(2, SIDE, device=device(), generator=None)
    dist.broadcast(x, 0)

    def forward() -> tuple[int, torch.Tensor]:
        runtime.counters.reset()
        with torch.no_grad():
            out = model(x)
        return sum(runtime.counters.gathers.values()), out

    answers: dict[str, Any] = {"first": forward()[0], "unchanged": forward()[0]}
    with torch.no_grad():
        model.layers[1].weight.mul_(2.0)
    answers["counted"] = forward()[0]
    model.layers[2].weight.data = model.layers[2].weight.data.clone()
    answers["rebound"] = forward()[0]
    model.layers[1].weight.data.div_(2.0)
    answers["data"], counted = forward()
    with torch.no_grad():
        model.layers[0].weight.local_shard().data.mul_(3.0)
    answers["unannounced"], stale = forward()
    runtime.mark_weights_changed()
    answers["announced"], fresh = forward()
    answers["stale is what it was"] = torch.equal(stale, counted)
    expected = x
    for layer in model.layers:
        expected = torch.tanh(F.linear(expected, layer.weight.full_tensor()))
    answers["fresh is right"] = torch.equal(fresh, expected)
    optimizers = {
        "sgd": torch.optim.SGD(model.parameters(), lr=0.1),
        "adamw foreach": torch.optim.AdamW(model.parameters(), foreach=True),
        "adamw fused": torch.optim.AdamW(model.parameters(), fused=True),
    }
    for name, optimizer in optimizers.items():
        train_once(model, rank)
        optimizer.step()
        answers[name] = forward()[0]
    return answers


def unneeded_slots(rank: int, world_size: int) -> dict[str, int]:
    """Evaluation in parts, never through the root, must not make gradients pile up at full size later."""
    model, runtime = stack(4)
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            for layer in model.layers:
                layer(torch.ones(1, SIDE, device=device()))
    model.train()
    train_once(model, rank)
    return {group.name: int(group.used_more_than_once) for group in runtime.groups}


# Memory -------------------------------------------------------------------------------------------------------


def _live_storages() -> dict[int, int]:
    gc.collect()
    found: dict[int, int] = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and item.device.type != "meta":
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


class Pyramid(nn.Module):
    """Weights of two shapes, three of each, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in [(24, 50), (50, 24)] * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def memory(rank: int, world_size: int, depth: int, resident: int) -> dict[str, int]:
    """Bytes of all live tensors after a step, and what each purpose should take."""
    train_pyramid(Pyramid().to(device()), rank)  # whatever torch allocates once
    before = _live_storages()
    torch.manual_seed(2)
    model = Pyramid().to(device())
    # Peer copies need symmetric memory besides, whose bytes their transport states.
    options: dict[str, Any] = {"prefetch_depth": depth, "resident_bytes": resident, "pad_for_alignment": 4}
    etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(transport="c10d", **options))
    for _ in range(2):
        model.zero_grad()
        train_pyramid(model, rank)
    live = {pointer: nbytes for pointer, nbytes in _live_storages().items() if pointer not in before}
    stated = etp.resident_nbytes(model)
    replicated = [p for p in model.parameters() if not isinstance(p, etp.ETPShardedParam)]
    return {
        "live": sum(live.values()),
        "replicated": sum(2 * p.numel() * p.dtype.itemsize for p in replicated),
        **stated,
    }


def train_pyramid(model: nn.Module, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    model(torch.randn(3, 24, generator=generator).to(device())).square().mean().backward()


def buffers_come_back(rank: int, world_size: int) -> dict[str, int]:
    """Sizes with buffers released, also between a forward and its backward, and after a failed backward."""
    model, runtime = stack(4)
    train_once(model, rank)
    held = etp.resident_nbytes(model)["gather_slots"]
    runtime.release_buffers()
    released = etp.resident_nbytes(model)
    x = torch.randn(2, SIDE, device=device())
    loss = model(x).square().mean()
    runtime.release_buffers()
    model.zero_grad()
    loss.backward()
    first = [layer.weight.grad.clone() for layer in model.layers]
    model.zero_grad()
    model(x).square().mean().backward()
    assert all(torch.equal(a, layer.weight.grad) for a, layer in zip(first, model.layers, strict=True))
    pool = runtime.modes.now.pool.nbytes()
    for _ in range(3):
        y = model(x)
        handle = model.layers[0].register_full_backward_hook(fail)
        with contextlib.suppress(PlannedFailureError):
            model(x).square().mean().backward()
        handle.remove()
        del y
    train_once(model, rank)
    inside: list[str] = []

    def release_inside(grad: torch.Tensor) -> None:
        try:
            runtime.release_buffers()
        except etp.EtpStateError as error:
            inside.append(str(error))

    y = model(x)
    y.register_hook(release_inside)
    y2 = model.layers[0](x)
    y2.register_hook(release_inside)
    (y.sum() + y2.sum()).backward()
    return {
        "held": held,
        "released slots": released["gather_slots"],
        "released pool": released["gradient_buffers"],
        "pool": pool,
        "pool after failures": runtime.modes.now.pool.nbytes(),
        "refused inside": len(inside),
    }


def fail(*_: Any) -> None:
    raise PlannedFailureError("in backward")


def dtype_changes(rank: int, world_size: int) -> list[str]:
    """module.to(dtype) after training: slots follow, and results are those of the converted weights."""
    model, runtime = stack(3)
    x = torch.randn(2, SIDE, device=device())
    seen = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32):
        model.to(dtype)
        expected = x.to(dtype)
        for layer in model.layers:
            expected = torch.tanh(F.linear(expected, layer.weight.full_tensor()))
        model.zero_grad()
        out = model(x.to(dtype))
        assert torch.equal(out, expected)
        out.sum().backward()
        assert all(layer.weight.grad.dtype is dtype for layer in model.layers)
        seen += [str(slot.spec.dtype) for slot in runtime.modes.now.cache.slots()]
    return seen


# Staleness ----------------------------------------------------------------------------------------------------


def stale_reads(rank: int, world_size: int) -> dict[str, str]:
    """A gathered tensor that is kept too long is stopped: by autograd, and by the slot's own check."""
    model, runtime = stack(4, prefetch_depth=0)
    messages = {}
    (kept,) = model.layers[0].weight.materialize()
    x = torch.randn(2, SIDE, device=device(), requires_grad=True)
    out = F.linear(x, kept).sum()
    model.layers[1].weight.materialize()
    try:
        out.backward()
    except RuntimeError as error:
        messages["autograd"] = str(error)
    group = model.layers[0].weight.weight_group
    try:
        group.take(runtime.routes.of(group).gather)
    except etp.StaleWeightError as error:
        messages["slot"] = str(error)
    out = model(x).sum()
    with torch.no_grad():
        model.layers[2].weight.add_(1.0)
    try:
        out.backward()
    except RuntimeError as error:
        messages["changed"] = str(error)
    return messages


def changed_where_it_does_not_matter(rank: int, world_size: int) -> None:
    """As without sharding, a weight may change before backward where no gradient depends on its value."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, SIDE), nn.Linear(SIDE, SIDE)).to(device())
    etp.shard_module(model, dist.group.WORLD)
    tokens = torch.tensor([1, 4, 4], device=device())
    out = model[1](model[0](tokens).detach())
    table = model[0](tokens)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    (out.sum() + table.sum()).backward()
    total = sum(param.grad.abs().sum() for param in model.parameters())
    assert total > 0


def shard_gradient_by_autograd_grad(rank: int, world_size: int) -> str:
    """torch.autograd.grad returns a shard's gradient, and leaves ``grad`` alone; with main_grad it says why not."""
    model, _ = stack(2)
    weight = model.layers[0].weight
    for step in range(3):
        x = torch.randn(2, SIDE, device=device())
        (got,) = torch.autograd.grad(model(x).square().sum(), weight)
        assert weight.grad is None, step
        model(x).square().sum().backward()
        assert weight.grad.abs().sum() > 0
        assert torch.equal(got, weight.grad), step
        model.zero_grad()
    weight.main_grad = torch.zeros_like(weight)
    try:
        torch.autograd.grad(model(x).sum(), weight)
    except RuntimeError as error:
        return str(error)
    return ""


# Silence and failures -----------------------------------------------------------------------------------------


def prints_nothing(rank: int, world_size: int) -> str:
    """What a training step writes to standard output and error, by any means."""
    with tempfile.TemporaryFile() as file:
        saved = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            torch.manual_seed(7)
            model = Tiny(tied=True).to(device())
            etp.shard_module(model, dist.group.WORLD)
            tokens, targets = batch(0, rank, device())
            loss_of(model(tokens, checkpointed="plain"), targets).backward()
            etp.full_state_dict(model)
        finally:
            for number, descriptor in zip((1, 2), saved, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
        file.seek(0)
        return file.read().decode()


def a_peer_dies(rank: int, world_size: int, where: str) -> None:
    """The last rank ends without a word in the second step; the others must not wait for ever."""
    torch.manual_seed(7)
    model = Tiny().to(device())
    etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(timeout_s=20.0))
    tokens, targets = batch(0, rank, device())
    loss_of(model(tokens), targets).backward()
    if rank == world_size - 1:
        if where == "forward":
            model.blocks[1].up.register_forward_pre_hook(lambda *_: os._exit(3))
        else:
            model.blocks[1].up.register_full_backward_hook(lambda *_: os._exit(3))
    loss_of(model(tokens), targets).backward()


def a_peer_does_not_come(rank: int, world_size: int, where: str) -> tuple[str, float]:
    """Rank 1 leaves the order; rank 0 learns the collective and the weight within the configured time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False), nn.LayerNorm(SIDE)).to(device())
    etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(timeout_s=2.0))
    inputs = torch.ones(1, SIDE, device=device())
    model(inputs).sum().backward()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 has given up"], timedelta(seconds=60.0))
        return "", 0.0
    began = time.monotonic()
    try:
        if where == "gather":
            model(inputs)
        else:
            torch.autograd.grad(model[1](inputs).sum(), model[1].weight)
    except etp.EtpCommunicationError as error:
        return str(error), time.monotonic() - began
    finally:
        store.set("rank 0 has given up", "")
    return "no error", 0.0


def loose_layers_have_their_own_runtimes(rank: int, world_size: int) -> None:
    """etp.Linear used outside any sharded model: twice in a pass, in eval, from two places."""
    torch.manual_seed(1)
    layer = etp.Linear(6, 6, etp_group=dist.group.WORLD, device=device())
    plain = nn.Linear(6, 6).to(device())
    plain.load_state_dict(etp.full_state_dict(layer))
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank)).to(device())
    out = layer(torch.tanh(layer(x)))
    assert torch.equal(out, plain(torch.tanh(plain(x))))
    out.sum().backward()
    total = torch.zeros(6, 6, device=device())
    for peer in range(world_size):
        plain.zero_grad()
        other = torch.randn(3, 6, generator=torch.Generator().manual_seed(peer)).to(device())
        plain(torch.tanh(plain(other))).sum().backward()
        total += plain.weight.grad
    rows = layer.weight.layout.logical_rows(rank)
    mine = (total / world_size)[:6] if rows else total[:0]
    torch.testing.assert_close(layer.weight.grad[:rows], mine[:rows])


def describes_its_chain(rank: int, world_size: int) -> str:
    """The text behind --etp-print-chains."""
    model, runtime = stack(3)
    train_once(model, rank)
    return runtime.gathers.describe_chain()
