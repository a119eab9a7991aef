"""Body of the test of Transformer Engine's Python layer with sharded weights, on CPU and gloo."""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import etp
from etp.modules import shard_weights

IN, OUT, ROWS, EXPERTS = 64, 104, 24, 3
SPLITS = [8, 10, 6]
KINDS = ("Linear", "LayerNormLinear", "GroupedLinear")


def _build(kind: str, bias: bool, fuse: bool) -> nn.Module:
    import transformer_engine.pytorch as te

    torch.manual_seed(7)
    common: dict[str, Any] = {"bias": bias, "params_dtype": torch.float32, "device": "cpu"}
    sizes = (EXPERTS, IN, OUT) if kind == "GroupedLinear" else (IN, OUT)
    module: nn.Module = getattr(te, kind)(*sizes, fuse_wgrad_accumulation=fuse, **common)
    return module


def _run(module: nn.Module, x: torch.Tensor, kind: str, recompute: bool) -> torch.Tensor:
    arguments = (x, SPLITS) if kind == "GroupedLinear" else (x,)
    out = checkpoint(module, *arguments, use_reentrant=True) if recompute else module(*arguments)
    return out[0] if isinstance(out, tuple) else out


def _reset(module: nn.Module, fused: set[str]) -> None:
    for name, p in module.named_parameters():
        p.grad = None
        if name in fused:
            p.main_grad = torch.zeros(p.shape)  # type: ignore[attr-defined]


def _gradients(module: nn.Module, fused: set[str]) -> dict[str, torch.Tensor]:
    return {
        name: (p.main_grad if name in fused else p.grad).clone()  # type: ignore[attr-defined,union-attr]
        for name, p in module.named_parameters()
    }


def _compare(rank: int, world_size: int, kind: str, bias: bool, fuse: bool, recompute: bool) -> None:
    whole, sharded = _build(kind, bias, fuse), _build(kind, bias, fuse)
    sharded.load_state_dict(whole.state_dict())
    group = dist.group.WORLD
    assert group is not None
    etp.shard_module(sharded, group)
    layouts = {n: p.layout for n, p in sharded.named_parameters() if isinstance(p, etp.ETPShardedParam)}
    assert len(layouts) == (EXPERTS if kind == "GroupedLinear" else 1)
    fused = set(layouts) if fuse else set()
    for step in range(2):
        expected: list[dict[str, torch.Tensor]] = []
        for peer in range(world_size):
            data = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(10 * step + peer))
            x = data.clone().requires_grad_()
            _reset(whole, fused)
            y = _run(whole, x, kind, recompute)
            y.square().mean().backward()
            expected.append(_gradients(whole, fused))
            if peer == rank:
                mine, y_whole, dx_whole = data, y.detach(), x.grad
        x = mine.clone().requires_grad_()
        _reset(sharded, fused)
        y = _run(sharded, x, kind, recompute)
        assert torch.equal(y, y_whole)
        y.square().mean().backward()
        assert torch.equal(x.grad, dx_whole)  # type: ignore[arg-type]
        for name, gradient in _gradients(sharded, fused).items():
            mean = sum((e[name] for e in expected[1:]), expected[0][name]) / world_size
            start, stop = layouts[name].logical_range(rank) if name in layouts else (0, mean.shape[0])
            assert torch.equal(gradient[: stop - start], mean[start:stop]), name


def te_modules_equal_whole(rank: int, world_size: int, shim: str) -> int:
    """Every kind, with and without bias, fused accumulation and recomputation. Returns how many were compared."""
    sys.path.append(shim)
    import te_cpu_shim  # type: ignore[import-not-found]  # noqa: F401 - puts CPU kernels under TE's Python layer

    count = 0
    for kind, bias, fuse, recompute in itertools.product(KINDS, (False, True), (False, True), (False, True)):
        if kind == "GroupedLinear" and bias:
            continue  # TE allocates the biases' gradients on the CUDA device by name
        _compare(rank, world_size, kind, bias, fuse, recompute)
        count += 1
    return count


def _note_hooks(sharded: nn.Module) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    counts: dict[str, int] = {}
    seen: dict[str, torch.Tensor] = {}
    for name, param in sharded.named_parameters():
        if isinstance(param, etp.ETPShardedParam):
            counts[name] = 0

            def note(param: torch.Tensor, name: str = name) -> None:
                counts[name] += 1
                seen[name] = param.grad.clone()  # type: ignore[union-attr]

            param.register_post_accumulate_grad_hook(note)
    return counts, seen


def hooks_of_two_uses(rank: int, world_size: int, shim: str) -> dict[str, dict[str, int]]:
    """One loss of two calls, three times: each hook sees the whole sum. Returns how often each weight's hook ran."""
    sys.path.append(shim)
    import te_cpu_shim  # noqa: F401 - see above

    answers: dict[str, dict[str, int]] = {}
    for kind in KINDS:
        sharded = _build(kind, bias=False, fuse=False)
        for param in sharded.parameters():
            dist.broadcast(param.detach(), 0)
        etp.shard_module(sharded, dist.group.WORLD)  # type: ignore[arg-type]
        counts, seen = _note_hooks(sharded)
        for step in range(3):
            sharded.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            y = [_run(sharded, torch.randn(ROWS, IN, generator=generator).requires_grad_(), kind, False) for _ in "ab"]
            (y[0] * y[1]).square().mean().backward()
            for name, param in sharded.named_parameters():
                if name in counts:
                    assert torch.equal(seen[name], param.grad), name  # type: ignore[arg-type]
        answers[kind] = counts
    return answers


def chosen_inputs(rank: int, world_size: int, shim: str) -> dict[str, list[list[str]]]:
    """Which weights have a gradient after ``backward(inputs=...)`` of one weight, and of the input, by layer."""
    sys.path.append(shim)
    import te_cpu_shim  # noqa: F401 - see above

    answers: dict[str, list[list[str]]] = {}
    for kind in KINDS:
        sharded = _build(kind, bias=False, fuse=False)
        for param in sharded.parameters():
            dist.broadcast(param.detach(), src=0)
        etp.shard_module(sharded, dist.group.WORLD)
        params = dict(sharded.named_parameters())
        whole: dict[str, torch.Tensor] = {}
        for chosen in (None, "weight1" if "weight1" in params else "weight", "x"):
            sharded.zero_grad()
            x = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            inputs = None if chosen is None else [x if chosen == "x" else params[chosen]]
            _run(sharded, x, kind, recompute=False).square().mean().backward(inputs=inputs)
            found = {name: param.grad.clone() for name, param in params.items() if param.grad is not None}
            whole = whole or found
            assert all(torch.equal(grad, whole[name]) for name, grad in found.items())
            answers.setdefault(kind, []).append(sorted(found))
    return answers


def _shared_inputs(step: int) -> torch.Tensor:
    """The same on all ranks, so that a gradient's mean over them is the gradient of one."""
    return torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(step))


def _same_rows(sharded: nn.Module, mine: dict[str, torch.Tensor], its: dict[str, torch.Tensor]) -> bool:
    """Whether ``mine`` has this rank's rows of what is in ``its``, by parameter."""
    same = []
    for name, param in sharded.named_parameters():
        start, stop = 0, len(its[name])
        if isinstance(param, etp.ETPShardedParam):
            start, stop = param.layout.logical_range(param.group_rank)
        same.append(torch.equal(mine[name][: stop - start], its[name][start:stop]))
    return all(same)


def under_autocast(rank: int, world_size: int, shim: str) -> dict[str, list[bool]]:
    """Weights in fp32 under ``torch.autocast``: which of output and gradients equal the whole layer's, by layer."""
    del rank, world_size
    sys.path.append(shim)
    import te_cpu_shim  # noqa: F401 - see above

    answers: dict[str, list[bool]] = {}
    for kind in KINDS:
        whole, sharded = _build(kind, bias=False, fuse=False), _build(kind, bias=False, fuse=False)
        sharded.load_state_dict(whole.state_dict())
        etp.shard_module(sharded, dist.group.WORLD)
        for step in range(2):
            found = []
            for module in (whole, sharded):
                _reset(module, set())
                x = _shared_inputs(step).requires_grad_()
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    y = _run(module, x, kind, recompute=False)
                y.square().mean().backward()
                found.append((y.detach(), x.grad, _gradients(module, set())))
            (y_whole, dx_whole, its), (y, dx, mine) = found
            assert dx is not None
            answers.setdefault(kind, []).extend(
                (torch.equal(y, y_whole), torch.equal(dx, dx_whole), _same_rows(sharded, mine, its))
            )
    return answers


def first_microbatches(rank: int, world_size: int, shim: str) -> dict[str, bool]:
    """Fused accumulation into ``main_grad`` that nobody sets to zero: whether it equals the whole layer's, by case.

    The first of two microbatches says so, or each weight says that its gradient is to be overwritten.
    """
    del rank, world_size
    sys.path.append(shim)
    import te_cpu_shim  # noqa: F401 - see above

    answers: dict[str, bool] = {}
    for kind, says, once in itertools.product(KINDS, ("first microbatch", "weight"), (False, True)):
        whole, sharded = _build(kind, bias=False, fuse=True), _build(kind, bias=False, fuse=True)
        sharded.load_state_dict(whole.state_dict())
        etp.shard_module(sharded, dist.group.WORLD, config=etp.EtpConfig(reduce_once_per_iteration=once))
        fused = {name for name, param in sharded.named_parameters() if isinstance(param, etp.ETPShardedParam)}
        same = []
        for module in (whole, sharded):
            for name, param in module.named_parameters():
                if name in fused:
                    param.main_grad = torch.full(param.shape, 3.0)  # type: ignore[attr-defined]
                    if says == "weight":
                        param.overwrite_main_grad = True  # type: ignore[attr-defined]
        for step in range(2):
            found = []
            for module in (whole, sharded):
                module.zero_grad()
                for index in range(1 if says == "weight" else 2):
                    arguments = (SPLITS,) if kind == "GroupedLinear" else ()
                    first = index == 0 if says == "first microbatch" else None
                    x = _shared_inputs(10 * step + index)
                    module(x, *arguments, is_first_microbatch=first).square().mean().backward()
                if once and module is sharded:
                    etp.wait_async_comms(sharded)
                found.append(_gradients(module, fused))
            same.append(_same_rows(sharded, found[1], found[0]))
        answers[f"{kind}, by {says}{', reduced once' if once else ''}"] = all(same)
    return answers


_FAKE_QUANT = """
section:
  enabled: True
  layers:
    layer_name_regex_pattern: .*
  transformer_engine:
    FakeQuant:
      enabled: True
      quant_format: FP8E4M3
      gemms: [{}]
      tensors: [weight]
"""


def debug_features(rank: int, world_size: int, shim: str, folder: str, gemm: str) -> dict[str, str]:
    """The message of each layer if a debug feature quantizes weights for ``gemm``; empty if it equals the whole one."""
    del world_size
    sys.path.append(shim)
    import te_cpu_shim  # noqa: F401 - see above
    import transformer_engine
    from nvdlfw_inspect import api  # type: ignore[import-not-found]
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    own = Path(folder, str(rank))
    own.mkdir()
    (own / "features.yaml").write_text(_FAKE_QUANT.format(gemm))
    features = [str(Path(transformer_engine.__file__).parent / "debug" / "features")]
    api.initialize(config_file=str(own / "features.yaml"), feature_dirs=features, log_dir=str(own))

    def quantize(_: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(torch.float8_e4m3fn).to(tensor.dtype)

    answers: dict[str, str] = {}
    with mock.patch.object(Float8Quantizer, "__call__", quantize):
        for kind in KINDS:
            whole, sharded = _build(kind, bias=False, fuse=False), _build(kind, bias=False, fuse=False)
            sharded.load_state_dict(whole.state_dict())
            etp.shard_module(sharded, dist.group.WORLD)
            found = []
            try:
                for module in (whole, sharded):
                    x = _shared_inputs(0).requires_grad_()
                    y = _run(module, x, kind, recompute=False)
                    y.square().mean().backward()
                    found.append((y.detach(), x.grad))
            except ValueError as error:
                answers[kind] = str(error)
            else:
                assert all(torch.equal(mine, its) for its, mine in zip(*found, strict=True)), kind  # type: ignore[arg-type]
                answers[kind] = ""
    return answers


def _operations(te: Any) -> dict[str, nn.Module]:
    """Transformer Engine's operations, which keep whole weights, by what they are built with."""
    common: dict[str, Any] = {"bias": False, "device": "cpu", "dtype": torch.float32}
    return {
        "operation": te.ops.Linear(IN, OUT, **common),
        "operation into main_grad": te.ops.Linear(IN, OUT, accumulate_into_main_grad=True, **common),
        "operations of experts into main_grad": te.ops.GroupedLinear(
            EXPERTS, IN, OUT, accumulate_into_main_grad=True, **common
        ),
        "operations of experts later": te.ops.GroupedLinear(EXPERTS, IN, OUT, delay_wgrad_compute=True, **common),
    }


def paths_past_the_protocol(rank: int, world_size: int, shim: str) -> dict[str, str]:
    """What is refused of TE's paths that do not ask for weights again, by case."""
    sys.path.append(shim)
    import te_cpu_shim  # noqa: F401 - see above
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    answers: dict[str, str] = {}

    def note(case: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except ValueError as error:
            answers[case] = str(error)

    def built(**options: Any) -> Any:
        return te.GroupedLinear(EXPERTS, IN, OUT, bias=False, params_dtype=torch.float32, device="cpu", **options)

    def sharded(module: nn.Module) -> nn.Module:
        for param in module.parameters():
            dist.broadcast(param.detach(), src=0)
        etp.shard_module(module, dist.group.WORLD)
        return module

    note("argument", lambda: sharded(built(use_grouped_tensor=True)))
    note("left out", lambda: sharded(built(use_grouped_tensor=False)))
    with mock.patch.dict(os.environ, {"NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM": "1"}), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        note("variable", lambda: sharded(built()))
        note("against the variable", lambda: sharded(built(use_grouped_tensor=False)))
    with mock.patch.dict(os.environ, {"NVTE_BACKWARD_OVERRIDE": "high_precision"}):
        note("override variable", lambda: sharded(_build("LayerNormLinear", bias=False, fuse=False)))
    for name, operation in _operations(te).items():
        note(name, partial(sharded, nn.Sequential(nn.Linear(IN, IN), operation)))
    with te.quantized_model_init(recipe=recipe.Float8BlockScaling()):
        first, second = (te.Linear(128, 128, params_dtype=torch.bfloat16, device="cpu") for _ in range(2))
    note("quantized model", lambda: etp.shard_module(nn.Sequential(first, second), dist.group.WORLD))
    note("quantized layer", lambda: shard_weights(first, ["weight"], dist.group.WORLD, None))
    for kind in KINDS:
        module = sharded(_build(kind, bias=False, fuse=False))
        high = recipe.Float8BlockScaling(backward_override="high_precision")
        for case, enabled in ((f"{kind} in FP8", True), (f"{kind} without", False)):
            with te.autocast(enabled=enabled, recipe=high):
                note(case, partial(_run, module, torch.randn(ROWS, IN), kind, recompute=False))
    return answers
