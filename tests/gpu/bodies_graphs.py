"""Bodies of the tests with CUDA graphs: replayed against eager, on the same data, bit by bit.

The one that :mod:`tests.multiproc.test_engine` runs as well needs no GPU there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import etp
from etp.collectives.c10d import C10dTransport
from etp.collectives.copy_engine import CopyEngineTransport
from etp.config import EtpConfig
from etp.runtime import EtpRuntime
from etp.stack import Stack as TensorStack
from tests.gpu.bodies_engine import SIDE, VOCABULARY, Net, one_expert_twins, rows, train_twins
from tests.multiproc.bodies_hierarchical import on_host
from tests.support.launch import device

WARM_UP = 3


def _config(transport: str, **more: Any) -> etp.EtpConfig:
    return etp.EtpConfig(transport=transport, **more)  # type: ignore[arg-type]


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _tokens(rank: int, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, VOCABULARY, (4, 32), generator=generator).to(device())


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits.view(-1, VOCABULARY).float(), (tokens.view(-1) + 1) % VOCABULARY)


def _optimize(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p.sub_(p.grad, alpha=0.05)


def _same(ours: nn.Module, theirs: nn.Module, what: str, *, grads: bool) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.detach(), other.detach()), (what, "weight", name)
        if grads:
            assert mine.grad is not None, (what, name)
            assert other.grad is not None, (what, name)
            assert torch.equal(mine.grad, other.grad), (what, "gradient", name)


def on_side_stream(work: Callable[[], None], times: int = WARM_UP) -> None:
    """Warm up as PyTorch asks for before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            work()
    torch.cuda.current_stream().wait_stream(side)


def poison_captured(runtime: EtpRuntime) -> None:
    """Whatever graphs gather into or compute gradients in holds no number before the replay."""
    for slot in runtime.modes.all[-1].cache.slots():
        for buffer in slot.buffers:
            buffer.fill_(float("nan"))


class WholeStep:
    """A training step of two microbatches in one graph: gradients are zeroed inside.

    Args:
        model: what is trained.
        runtime: drives its weights.
        finish: end the step by finishing gradients and announcing other weights, as Megatron does.
        penalty: how much the sum of all squares of weights counts in the loss.
    """

    def __init__(self, model: nn.Module, runtime: EtpRuntime, *, finish: bool, penalty: float = 0.0) -> None:
        self.model = model
        self.penalty = penalty
        self.runtime = runtime
        self.finish = finish
        self.inputs = [torch.zeros(4, 32, dtype=torch.long, device=device()) for _ in range(2)]
        self.losses = torch.zeros(2, device=device())
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.zero_()
        for index, tokens in enumerate(self.inputs):
            loss = _loss(self.model, tokens)
            self.losses[index].copy_(loss.detach())
            if self.penalty:
                loss = loss + self.penalty * sum(p.square().sum() for p in self.model.parameters())
            loss.backward()
        if self.finish:
            etp.wait_async_comms(self.model)
            self.runtime.mark_weights_changed()

    def capture(self) -> None:
        on_side_stream(self.run)
        for p in self.model.parameters():
            assert p.grad is not None
            p.grad.normal_()
        before = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()
        torch.cuda.synchronize()
        for (name, p), grad in zip(self.model.named_parameters(), before, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, grad), ("the capture changed a gradient", name)

    def step(self, rank: int, step: int) -> torch.Tensor:
        for index, tokens in enumerate(self.inputs):
            tokens.copy_(_tokens(rank, step, index))
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        return self.losses.clone()


def whole_step_equals_eager(
    rank: int, world_size: int, transport: str, dtype: torch.dtype, recompute: bool, once: bool, reuse: bool
) -> dict[str, Any]:
    """20 replays with changing data and an optimizer step each, a capture anew among them, and eager passes between.

    Args:
        rank: this rank.
        world_size: all ranks.
        transport: which collectives move the shards.
        dtype: of weights and gradients.
        recompute: whether activations are recomputed.
        once: reduce once for both microbatches.
        reuse: as under Megatron: weights are taken over from one pass into the next and gathered ahead across passes,
            and a microbatch's gradients are finished at the end of the step; all of it inside the graph too.
    """
    torch.manual_seed(0)
    whole = Net(recompute, tied=dtype == torch.float32).to(device(), dtype)
    models = [copy.deepcopy(whole), copy.deepcopy(whole)]
    config = _config(transport, reduce_once_per_iteration=once, reuse_across_forwards=reuse)
    runtimes = [etp.shard_module(model, _world(), config=config) for model in models]
    for runtime in runtimes:
        runtime.finish_with_backward = not reuse
    eager, graphed = (
        WholeStep(model, runtime, finish=once or reuse) for model, runtime in zip(models, runtimes, strict=True)
    )
    on_side_stream(eager.run)
    graphed.capture()
    slots = [{b.data_ptr() for slot in part.cache.slots() for b in slot.buffers} for part in runtimes[1].modes.all]
    assert not slots[0] & slots[1], "eager and captured work share a slot"
    for step in range(20):
        if step == 10:
            graphed.graph = None
            graphed.capture()
        poison_captured(runtimes[1])
        losses = eager.step(rank, step), graphed.step(rank, step)
        assert torch.equal(*losses), ("loss", step, losses)
        _same(models[1], models[0], f"step {step}", grads=True)
        for model in models:
            _optimize(model)
        if step % 3 == 0:
            # Passes outside of the graph see the weights of now, and leave the graph's slots alone.
            tokens = _tokens(rank, step, 7)
            with torch.no_grad():
                assert torch.equal(models[1](tokens), models[0](tokens)), ("evaluation", step)
    _same(models[1], models[0], "end", grads=False)
    return {
        "losses": losses[0].tolist(),
        "captured": runtimes[1].modes.all[-1].cache.nbytes(),
        "eager": runtimes[0].modes.all[0].cache.nbytes(),
        "transports": {type(t).__name__ for t in runtimes[1].routes.transports.values()},
    }


def penalty_is_replayed(rank: int, world_size: int, transport: str) -> float:
    """Gradients that autograd brings itself add to those of reductions in a graph as they do outside of it.

    Returns:
        the largest difference that the penalty makes in a gradient.
    """
    torch.manual_seed(0)
    whole = Net(False, tied=True).to(device())
    models = [copy.deepcopy(whole) for _ in range(3)]
    config = _config(transport, grad_reduction="sum")
    runtimes = [etp.shard_module(model, _world(), config=config) for model in models]
    eager, graphed, without = (
        WholeStep(model, runtime, finish=False, penalty=penalty)
        for model, runtime, penalty in zip(models, runtimes, (0.01, 0.01, 0.0), strict=True)
    )
    for step in (eager, without):
        on_side_stream(step.run)
    graphed.capture()
    for step in range(6):
        poison_captured(runtimes[1])
        assert torch.equal(eager.step(rank, step), graphed.step(rank, step)), step
        _same(models[1], models[0], f"step {step}", grads=True)
        without.step(rank, step)
        difference = max(
            (p.grad - other.grad).abs().max().item()
            for p, other in zip(models[0].parameters(), models[2].parameters(), strict=True)
        )
        for model in models:
            _optimize(model)
    return difference


def captured_evaluation_equals_eager(rank: int, world_size: int, transport: str, graphed: bool) -> dict[str, Any]:
    """A graph of two forward passes alone, as Megatron's of an evaluation, between steps of training with look-ahead.

    Args:
        rank: this rank.
        world_size: all ranks.
        transport: which collectives move the shards.
        graphed: without it the same passes run without a graph.
    """
    whole, model, runtime = one_expert_twins(world_size, transport)
    optimizers = [torch.optim.SGD(twin.parameters(), lr=0.1) for twin in (whole, model)]
    inputs = [torch.zeros(6, SIDE, device=device()) for _ in range(2)]
    outputs = [torch.zeros(6, SIDE, device=device()) for _ in range(2)]

    def evaluate() -> None:
        with torch.no_grad():
            for x, out in zip(inputs, outputs, strict=True):
                out.copy_(model(x))

    graph = torch.cuda.CUDAGraph() if graphed else None
    worst, compared = 0.0, 0
    for step in range(8):
        for micro in range(2):
            worst = max(worst, train_twins(whole, model, rank, world_size, step, micro))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 2 and graph is not None:
            # What training has taught is what the captured passes are expected to follow.
            on_side_stream(evaluate)
            with torch.cuda.graph(graph):
                evaluate()
        if step < 2:
            continue
        for micro, (x, out) in enumerate(zip(inputs, outputs, strict=True)):
            x.copy_(rows(rank, step, 7 + micro))
            out.fill_(float("nan"))
        if graph is None:
            evaluate()
        else:
            poison_captured(runtime)
            graph.replay()
        for x, out in zip(inputs, outputs, strict=True):
            with torch.no_grad():
                assert torch.equal(out, whole(x)), ("evaluation", step)
            compared += 1
    return {
        "worst": worst,
        "compared": compared,
        "transports": {type(t).__name__ for t in runtime.routes.transports.values()},
    }


class Stack(nn.Module):
    """Blocks that are graphed one by one, between an embedding and an output layer that are not."""

    def __init__(self, blocks: list[nn.Module], hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden, dtype=dtype)
        self.blocks = nn.ModuleList(blocks)
        self.out = nn.Linear(hidden, VOCABULARY, bias=False, dtype=dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.out(x)
        return logits


def _torch_blocks(dtype: torch.dtype) -> list[nn.Module]:
    return [
        nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 336), nn.GELU(), nn.Linear(336, 128, bias=False)).to(dtype)
        for _ in range(3)
    ]


def _te_blocks(dtype: torch.dtype) -> list[nn.Module]:
    import transformer_engine.pytorch as te

    return [
        nn.Sequential(
            te.LayerNormLinear(128, 336, params_dtype=dtype, device="cuda"),
            nn.GELU(),
            te.Linear(336, 128, bias=False, params_dtype=dtype, device="cuda"),
        )
        for _ in range(3)
    ]


def _count(calls: dict[str, int], name: str, param: torch.Tensor) -> None:
    del param
    calls[name] = calls.get(name, 0) + 1


def parts_equal_eager(rank: int, world_size: int, transport: str, maker: str, dtype: torch.dtype) -> list[float]:
    """20 steps of two microbatches (one in bf16), of a model whose blocks are graphed callables.

    Autograd adds a second microbatch's gradient in the gradient's dtype, the engine in fp32.
    """
    microbatches = 2 if dtype == torch.float32 else 1
    torch.manual_seed(0)
    blocks = (_te_blocks if maker == "te" else _torch_blocks)(dtype)
    whole = Stack(blocks, 128, dtype).to(device())
    # Transformer Engine's modules do not copy deeply; their state does.
    torch.manual_seed(0)
    other = Stack((_te_blocks if maker == "te" else _torch_blocks)(dtype), 128, dtype).to(device())
    other.load_state_dict(whole.state_dict())
    models = [whole, other]
    runtimes = [etp.shard_module(model, _world(), config=_config(transport)) for model in models]
    for model in models:
        # Once through all of it: reductions need their memory before a capture.
        _loss(model, _tokens(rank, 99, 0)).backward()
        model.zero_grad()
    samples = tuple((torch.randn(4, 32, 128, device=device(), dtype=dtype, requires_grad=True),) for _ in range(3))
    if maker == "te":
        import transformer_engine.pytorch as te

        graphed = te.make_graphed_callables(tuple(models[1].blocks), samples, allow_unused_input=True)
    else:
        graphed = torch.cuda.make_graphed_callables(tuple(models[1].blocks), samples, allow_unused_input=True)
    models[1].blocks = nn.ModuleList(graphed)
    assert all(p.grad is None for p in models[1].parameters()), "the capture left gradients"
    calls: dict[str, int] = {}
    for name, p in models[1].named_parameters():
        if isinstance(p, etp.ETPShardedParam):
            p.register_post_accumulate_grad_hook(partial(_count, calls, name))
    losses = []
    for step in range(20):
        poison_captured(runtimes[1])
        for model in models:
            model.zero_grad()
        for micro in range(microbatches):
            tokens = _tokens(rank, step, micro)
            pair = [_loss(model, tokens) for model in models]
            assert torch.equal(pair[0], pair[1]), ("loss", step, micro, [p.item() for p in pair])
            for loss in pair:
                loss.backward()
            losses.append(pair[0].item())
        _same(models[1], models[0], f"step {step}", grads=True)
        for model in models:
            _optimize(model)
    assert set(calls.values()) == {20 * microbatches}, calls
    return losses


def whole_step_over_hosts_equals_c10d(rank: int, world_size: int) -> list[str]:
    """Graphs of a group that spans hosts have ``c10d``'s bits; eager passes between them go in two steps.

    Returns:
        the transports of both models.
    """
    torch.manual_seed(0)
    whole = Net(False, tied=True).to(device())
    models = [whole, copy.deepcopy(whole)]
    with on_host(rank // (world_size // 2)):
        runtimes = [
            etp.shard_module(model, _world(), config=_config(transport))
            for model, transport in zip(models, ("c10d", "auto"), strict=True)
        ]
        eager, graphed = (WholeStep(*pair, finish=False) for pair in zip(models, runtimes, strict=True))
        graphed.capture()
        for step in range(10):
            poison_captured(runtimes[1])
            losses = eager.step(rank, step), graphed.step(rank, step)
            assert torch.equal(*losses), ("loss", step, losses)
            _same(models[1], models[0], f"step {step}", grads=True)
            with torch.no_grad():
                outputs = [_loss(model, _tokens(rank, step, 2)) for model in models]
            assert torch.equal(*outputs), ("evaluation", step, outputs)
            for model in models:
                _optimize(model)
    return [type(transport).__name__ for runtime in runtimes for transport in runtime.routes.transports.values()]


class _Sequence:
    """A publication, and gathers and reductions of four groups but for the last one's reduction."""

    SHAPES = ([(48, 64)], [(5, 8)], [(1024, 512)], [(16, 24)] * 3)

    def __init__(self, rank: int, world_size: int) -> None:
        self.size = world_size
        self.generator = torch.Generator(device=device()).manual_seed(rank)
        self.shards = [TensorStack([self.random(s) for s in shapes]) for shapes in self.SHAPES]
        full = [[(world_size * rows, columns) for rows, columns in shapes] for shapes in self.SHAPES]
        self.fulls = [TensorStack.allocate(len(shapes), shapes[0], torch.float32, device()) for shapes in full]
        self.wgrads = [TensorStack([self.random(s) for s in shapes]) for shapes in full]
        self.sums, self.expected = (
            [TensorStack([torch.zeros(s, device=device()) for s in shapes]) for shapes in self.SHAPES] for _ in range(2)
        )

    def random(self, shape: tuple[int, ...] | torch.Size) -> torch.Tensor:
        return torch.randn(shape, device=device(), generator=self.generator)

    def run(self, engine: CopyEngineTransport) -> None:
        engine.publish(self.shards)
        for index, (shards, full) in enumerate(zip(self.shards, self.fulls, strict=True)):
            engine.all_gather(full, shards, "gather")
            # An odd number of reductions: the next sequence begins at the other place of the ring.
            if index < 3:
                self.reduce(engine, index)

    def reduce(self, engine: CopyEngineTransport, index: int) -> None:
        engine.reduce_scatter(self.wgrads[index], self.sums[index], self.size, "reduce", accumulate=True).join()

    def change(self) -> None:
        """Other weights and gradients, and nothing gathered."""
        for shard in (s for shards in self.shards for s in shards):
            shard.mul_(0.5).add_(self.random(shard.shape))
        for wgrad in (w for wgrads in self.wgrads for w in wgrads):
            wgrad.copy_(self.random(wgrad.shape))
        for full in (f for fulls in self.fulls for f in fulls):
            full.fill_(float("nan"))

    def compare(self, c10d: C10dTransport, step: int) -> int:
        """How many results were compared with the other transport's."""
        pairs = []
        for index, (shards, full) in enumerate(zip(self.shards, self.fulls, strict=True)):
            theirs = TensorStack([torch.empty_like(f) for f in full])
            c10d.all_gather(theirs, shards, "gather").join()
            pairs += list(zip(full, theirs, strict=True))
            if index < 3:
                c10d.reduce_scatter(
                    self.wgrads[index], self.expected[index], self.size, "reduce", accumulate=True
                ).join()
                pairs += list(zip(self.sums[index], self.expected[index], strict=True))
        for number, (mine, other) in enumerate(pairs):
            assert torch.equal(mine, other), (step, number)
        return len(pairs)


def transports_agree_in_graphs(rank: int, world_size: int) -> int:
    """One sequence of publication, gathers and reductions, replayed between others that are not captured."""
    c10d = C10dTransport(_world(), EtpConfig(timeout_s=60.0), device=device())
    engine = CopyEngineTransport(_world(), device(), timeout_s=60.0)
    work = _Sequence(rank, world_size)
    on_side_stream(lambda: work.run(engine), times=2)
    # The largest place of the ring is needed before the capture.
    work.reduce(engine, 3)
    torch.cuda.synchronize()
    engine.change_mode(capturing=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.run(engine)
    engine.change_mode(capturing=False)
    for total in (t for sums in work.sums for t in sums):
        total.zero_()
    compared = 0
    for step in range(30):
        if step % world_size == rank:
            torch.cuda._sleep(20_000_000)
        work.change()
        if step % 4 == 3:
            work.run(engine)
        else:
            graph.replay()
        compared += work.compare(c10d, step)
        # Shards change next.
        engine.finish_reading()
    torch.cuda.synchronize()
    return compared


def capture_with_work_under_way_is_refused(rank: int, world_size: int) -> str:
    """A capture between microbatches whose gradients are only added up would bake them in."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))).to(device())
    etp.shard_module(model, _world(), config=_config("copy_engine", reduce_once_per_iteration=True))
    x = torch.randn(4, 64, device=device())
    model(x).sum().backward()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(x)
    except etp.EtpStateError as error:
        return str(error)
    finally:
        torch.cuda.synchronize()
    return ""


def part_outside_of_any_forward_is_refused(rank: int, world_size: int) -> str:
    """A part whose weights nobody would publish is not captured."""
    parent = nn.Sequential(nn.Linear(64, 64, bias=False)).to(device())
    runtime = etp.shard_module(parent, _world(), config=_config("copy_engine"))
    layer = parent[0]
    # Nobody calls the module that was sharded again.
    del parent
    assert runtime.groups
    x = torch.randn(4, 64, device=device())
    layer(x).sum().backward()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            layer(x)
    except etp.EtpStateError as error:
        return str(error)
    finally:
        torch.cuda.synchronize()
    return ""
