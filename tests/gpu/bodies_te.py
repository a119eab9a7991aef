"""Bodies of the tests with Transformer Engine's modules: sharded against whole, on the same data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import etp

IN, OUT, ROWS, EXPERTS = 128, 208, 64, 3
SPLITS = [24, 8, 32]


def _run(module: nn.Module, x: torch.Tensor, kind: str, recompute: bool) -> torch.Tensor:
    arguments = (x, torch.tensor(SPLITS, device=x.device)) if kind == "GroupedLinear" else (x,)
    out = checkpoint(module, *arguments, use_reentrant=True) if recompute else module(*arguments)
    return out[0] if isinstance(out, tuple) else out


def _build(kind: str, bias: bool, fuse: bool, seed: int = 7, **options: Any) -> nn.Module:
    import transformer_engine.pytorch as te

    common: dict[str, Any] = {
        "bias": bias,
        "params_dtype": torch.bfloat16,
        "device": "cuda",
        "fuse_wgrad_accumulation": fuse,
        **options,
    }
    torch.manual_seed(seed)
    if kind == "GroupedLinear":
        module: nn.Module = te.GroupedLinear(EXPERTS, IN, OUT, **common)
    else:
        module = getattr(te, kind)(IN, OUT, **common)
    return module


def te_module_equals_whole(
    rank: int, world_size: int, kind: str, transport: str, bias: bool, fuse: bool, recompute: bool
) -> float:
    """Returns the largest difference of any gradient from the mean of the whole module's; outputs must be equal."""
    whole, sharded = _build(kind, bias, fuse), _build(kind, bias, fuse)

    def inputs(step: int) -> list[torch.Tensor]:
        return [_random(ROWS, IN, seed=100 * step + peer) for peer in range(world_size)]

    return _worst_difference(whole, sharded, dist.group.WORLD, inputs, kind, transport, fuse, recompute)


def te_parallel_module_equals_whole(
    rank: int, world_size: int, kind: str, transport: str, mode: str, sequence: bool, fuse: bool
) -> float:
    """The same where each weight is cut over two tensor-parallel ranks first, and then over two others."""
    columns, rows = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    tensor = [dist.new_group(ranks) for ranks in columns][rank // 2]
    shards = [dist.new_group(ranks) for ranks in rows][rank % 2]
    options = {"parallel_mode": mode, "tp_group": tensor, "tp_size": 2, "sequence_parallel": sequence}
    whole, sharded = (_build(kind, False, fuse, seed=7 + rank % 2, **options) for _ in "ab")
    shape = (ROWS // 2 if sequence else ROWS, IN) if mode == "column" else (ROWS, IN // 2)

    def inputs(step: int) -> list[torch.Tensor]:
        # Ranks of one tensor-parallel group have the same data, or parts of it.
        part = rank % 2 if sequence or mode == "row" else 0
        return [_random(*shape, seed=100 * step + 10 * peer + part) for peer in range(2)]

    return _worst_difference(whole, sharded, shards, inputs, kind, transport, fuse, False)


def _random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def _worst_difference(
    whole: nn.Module,
    sharded: nn.Module,
    group: dist.ProcessGroup,
    inputs: Callable[[int], list[torch.Tensor]],
    kind: str,
    transport: str,
    fuse: bool,
    recompute: bool,
) -> float:
    """Three steps of ``sharded``, cut over ``group``, against ``whole`` on the ``inputs`` of all its ranks."""
    rank = dist.get_rank(group)
    sharded.load_state_dict(whole.state_dict())
    etp.shard_module(sharded, group, config=etp.EtpConfig(transport=transport))  # type: ignore[arg-type]
    weights = {name for name, p in sharded.named_parameters() if isinstance(p, etp.ETPShardedParam)}
    assert len(weights) == (EXPERTS if kind == "GroupedLinear" else 1)
    worst = 0.0
    for step in range(3):
        expected: dict[str, list[torch.Tensor]] = {}
        for index, data in enumerate(inputs(step)):
            x = data.clone().requires_grad_()
            _reset(whole, weights, fuse)
            y = _run(whole, x, kind, recompute)
            (y.float() ** 2).mean().backward()
            for name, p in whole.named_parameters():
                grad = p.main_grad if fuse and name in weights else p.grad
                expected.setdefault(name, []).append(grad.float().clone())
            if index == rank:
                y_whole, dx_whole = y.detach(), x.grad
        x = inputs(step)[rank].requires_grad_()
        _reset(sharded, weights, fuse)
        y = _run(sharded, x, kind, recompute)
        assert torch.equal(y, y_whole), "output"
        (y.float() ** 2).mean().backward()
        assert torch.equal(x.grad, dx_whole), "input gradient"
        worst = max(worst, _compare(sharded, expected, weights, fuse, rank))
    return worst


def _reset(module: nn.Module, weights: set[str], fuse: bool) -> None:
    for name, p in module.named_parameters():
        p.grad = None
        if fuse and name in weights:
            p.main_grad = torch.zeros(p.shape, device=p.device, dtype=torch.float32)


def _compare(
    module: nn.Module, expected: dict[str, list[torch.Tensor]], weights: set[str], fuse: bool, rank: int
) -> float:
    worst = 0.0
    for name, p in module.named_parameters():
        total = sum(expected[name][1:], expected[name][0]) / len(expected[name])
        got = p.main_grad if fuse and name in weights else p.grad
        assert got is not None, name
        if isinstance(p, etp.ETPShardedParam):
            start, stop = p.layout.logical_range(rank)
            got, total = got[: stop - start], total[start:stop]
        worst = max(worst, (got.float() - total.to(got.dtype).float()).abs().max().item())
    return worst


def constructed_is_te(rank: int, world_size: int) -> list[str]:
    """The layers of this package are TE's own modules where TE is there. Returns their classes' modules."""
    group = dist.group.WORLD
    found = []
    for build in (
        lambda: etp.Linear(IN, OUT, etp_group=group, params_dtype=torch.bfloat16),
        lambda: etp.LayerNormLinear(IN, OUT, etp_group=group, params_dtype=torch.bfloat16, normalization="RMSNorm"),
        lambda: etp.GroupedLinear(EXPERTS, IN, OUT, etp_group=group, params_dtype=torch.bfloat16),
    ):
        module = build()
        kind = type(module).__name__
        x = torch.randn(ROWS, IN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        full = etp.full_state_dict(module)
        whole = _build(kind, bias=True, fuse=False) if kind != "LayerNormLinear" else copy.copy(None)
        y = _run(module, x, kind, recompute=False)
        if whole is not None:
            whole.load_state_dict(full)
            assert torch.equal(y, _run(whole, x, kind, recompute=False))
        y.float().sum().backward()
        assert all(p.grad is not None for p in module.parameters())
        found.append(f"{type(module).__module__}.{kind}")
    return found


def frozen_weight(rank: int, world_size: int, kind: str) -> list[str]:
    """Frozen sharded weights pass the input's gradient on and get none.

    Returns:
        names of the parameters that have a gradient.
    """
    whole, sharded = _build(kind, bias=False, fuse=False), _build(kind, bias=False, fuse=False)
    for module in (whole, sharded):
        for name, param in module.named_parameters():
            param.requires_grad_(not name.startswith("weight"))
    etp.shard_module(sharded, dist.group.WORLD)
    x = _random(ROWS, IN, seed=rank)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    _run(whole, a, kind, recompute=False).float().square().sum().backward()
    _run(sharded, b, kind, recompute=False).float().square().sum().backward()
    assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    for name, p in whole.named_parameters():
        assert (dict(sharded.named_parameters())[name].grad is None) == (p.grad is None), name
    return [name for name, p in sharded.named_parameters() if p.grad is not None]


def hooks_are_refused(rank: int, world_size: int, kind: str) -> str:
    """Recomputation by hooks on saved tensors would hand TE's backward a plain tensor. Returns the message."""
    sharded = _build(kind, bias=False, fuse=False)
    etp.shard_module(sharded, dist.group.WORLD)
    x = torch.randn(ROWS, IN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    arguments = (x, torch.tensor(SPLITS, device=x.device)) if kind == "GroupedLinear" else (x,)
    try:
        checkpoint(sharded, *arguments, use_reentrant=False)
    except TypeError as error:
        return str(error)
    return ""


def hooks_of_two_uses(rank: int, world_size: int, kind: str, transport: str) -> dict[str, int]:
    """One loss of two calls, three times: each hook sees the whole sum. Returns how often each weight's hook ran."""
    whole, sharded = _build(kind, bias=False, fuse=False), _build(kind, bias=False, fuse=False)
    sharded.load_state_dict(whole.state_dict())
    etp.shard_module(sharded, dist.group.WORLD, config=etp.EtpConfig(transport=transport))  # type: ignore[arg-type]
    counts: dict[str, int] = {}
    seen: dict[str, torch.Tensor] = {}
    for name, param in sharded.named_parameters():
        if isinstance(param, etp.ETPShardedParam):
            counts[name] = 0

            def note(param: torch.Tensor, name: str = name) -> None:
                counts[name] += 1
                seen[name] = param.grad.clone()

            param.register_post_accumulate_grad_hook(note)
    for step in range(3):
        sharded.zero_grad()
        generator = torch.Generator(device="cuda").manual_seed(100 * step + rank)
        first, second = torch.randn(2, ROWS, IN, device="cuda", dtype=torch.bfloat16, generator=generator)
        first.requires_grad_()
        y = _run(sharded, first, kind, recompute=False).float() * _run(sharded, second, kind, recompute=False).float()
        y.square().mean().backward()
        for name in counts:
            assert torch.equal(seen[name], dict(sharded.named_parameters())[name].grad), name
    return counts
