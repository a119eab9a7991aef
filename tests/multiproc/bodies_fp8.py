"""Bodies of the tests of weights that are gathered in FP8, against Transformer Engine's own modules; on any device."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import etp
from benchmarks.host_calls import counted
from benchmarks.traffic import bytes_per_element
from etp.formats import quantize_nvfp4
from etp.te import active_format
from tests.support import te_apart, te_emulation
from tests.support.launch import device, on_gpus
from tests.support.te_site import add_fp8_kernels

IN, EXPERTS = 256, 3
# Rows of blocks that do not divide over the ranks, so that the last shard has padding.
OUT, SPLITS = 384, [128, 96, 32]
KINDS = ("Linear", "LayerNormLinear", "GroupedLinear")
RECIPES = ("Float8BlockScaling", "Float8CurrentScaling")
DEQUANTIZED = tuple(f"{recipe} dequantized" for recipe in RECIPES)
"""Recipes whose backward pass multiplies, in bf16, what the bytes of the forward pass stand for."""
APART = {"MXFP8BlockScaling": Fraction(33, 32), "NVFP4BlockScaling": Fraction(9, 16)}
"""Recipes in which rows and columns are apart, and bytes for each element of a weight."""
EMULATED = {"NVFP4 in blocks of 16 x 16": True, "NVFP4 in blocks of 16": False}
"""NVFP4 in Transformer Engine's emulation, and whether blocks of weights are square."""
BYTES = {**APART, **dict.fromkeys(EMULATED, APART["NVFP4BlockScaling"])}


def prepare(shim: str, recipe: str = "") -> None:
    """Put Transformer Engine's Python layer on CPU kernels where there is no GPU."""
    if on_gpus():
        return
    sys.path.append(shim)
    import te_cpu_shim  # type: ignore[import-not-found]

    add_fp8_kernels()
    if recipe in BYTES:
        te_apart.add_kernels(te_cpu_shim)


def _recipe(name: str) -> Any:
    from transformer_engine.common import recipe

    if name in EMULATED:
        return te_emulation.recipe(square=EMULATED[name])
    kind, _, override = name.partition(" ")
    return getattr(recipe, kind)(**({"backward_override": override} if override else {}))


def _autocast(recipe: str, enabled: bool = True) -> AbstractContextManager[None]:
    import transformer_engine.pytorch as te

    return cast("AbstractContextManager[None]", te.autocast(enabled=enabled, recipe=_recipe(recipe)))


def _build(kind: str, fuse: bool = False) -> nn.Module:
    import transformer_engine.pytorch as te

    torch.manual_seed(7)
    sizes = (EXPERTS, IN, OUT) if kind == "GroupedLinear" else (IN, OUT)
    module: nn.Module = getattr(te, kind)(
        *sizes, bias=False, params_dtype=torch.bfloat16, device=str(device()), fuse_wgrad_accumulation=fuse
    )
    return module


def _run(module: nn.Module, x: torch.Tensor, kind: str, recipe: str, recompute: bool = False) -> torch.Tensor:
    arguments = (x, SPLITS) if kind == "GroupedLinear" else (x,)

    def forward(*inputs: Any) -> torch.Tensor:
        with _autocast(recipe):
            out = module(*inputs)
        return cast("torch.Tensor", out[0] if isinstance(out, tuple) else out)

    if not recompute:
        return forward(*arguments)
    if not on_gpus():
        return cast("torch.Tensor", checkpoint(forward, *arguments, use_reentrant=True))
    import transformer_engine.pytorch as te

    with _autocast(recipe):
        out = te.checkpoint(module, *arguments, use_reentrant=True)
    return cast("torch.Tensor", out[0] if isinstance(out, tuple) else out)


def _inputs(step: int, peer: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + peer)
    return torch.randn(sum(SPLITS), IN, generator=generator).to(device(), torch.bfloat16)


def _reset(module: nn.Module, fused: set[str]) -> None:
    for name, p in module.named_parameters():
        p.grad = None
        if name in fused:
            p.main_grad = torch.zeros(p.shape, device=p.device)  # type: ignore[attr-defined]


def _gradients(module: nn.Module, fused: set[str]) -> dict[str, torch.Tensor]:
    return {
        name: (p.main_grad if name in fused else p.grad).clone()  # type: ignore[attr-defined,union-attr]
        for name, p in module.named_parameters()
    }


def _draw(whole: nn.Module, sharded: nn.Module, step: int) -> None:
    """New weights for both, among them tiles of zeros, of large and of tiny numbers."""
    for index, (param, cut) in enumerate(zip(whole.parameters(), sharded.parameters(), strict=True)):
        if param.dim() < 2:
            continue
        generator = torch.Generator().manual_seed(100 * step + index)
        values = torch.randn(param.shape, generator=generator)
        values[:128, :128] = 0
        values[128:256] *= 1e4
        values[256:, 128:] *= 1e-30
        with torch.no_grad():
            param.copy_(values)
            if isinstance(cut, etp.ETPShardedParam):
                start, stop = cut.layout.logical_range(cut.group_rank)
                cut.local_shard()[: stop - start].copy_(values[start:stop])
                cut.local_shard()[stop - start :].zero_()


def modules_equal_whole(
    rank: int, world_size: int, shim: str, recipe: str, kinds: tuple[str, ...], transport: str, alignment: int = 128
) -> int:
    """Output and gradients of each kind of module equal those of the whole module. Returns how many were compared."""
    prepare(shim, recipe)
    count = 0
    for kind, fuse, recompute in itertools.product(kinds, (False, True), (False, True)):
        _compare(rank, world_size, kind, recipe, fuse, recompute, transport, alignment)
        count += 1
    return count


def emulated_modules_equal_whole(
    rank: int, world_size: int, shim: str, recipe: str, kind: str, transport: str, alignment: int
) -> tuple[int, int]:
    """:func:`modules_equal_whole` in NVFP4, multiplied by Transformer Engine's emulation.

    Returns:
        how many gathered weights were multiplied by rows, and by columns.
    """
    prepare(shim, recipe)
    module = _build(KINDS[0])
    etp.shard_module(module, dist.group.WORLD)
    refused = ""
    try:
        _run(module, _inputs(0, rank), KINDS[0], recipe)
    except ValueError as error:
        refused = str(error)
    assert "weight is used with a CustomRecipe recipe: its quantizers are unknown" in refused
    with te_emulation.emulating(square=EMULATED[recipe]) as multiplied:
        for fuse, recompute in itertools.product((False, True), (False, True)):
            _compare(rank, world_size, kind, recipe, fuse, recompute, transport, alignment)
    return multiplied.count("rows"), multiplied.count("columns")


def multiplied(kind: str) -> tuple[int, int]:
    """What :func:`emulated_modules_equal_whole` should return."""
    weights = 3 * (EXPERTS if kind == "GroupedLinear" else 1)
    # Of three steps. Two of the four variants compute forward again.
    return (2 + 4) * weights, 4 * weights


def _compare(
    rank: int,
    world_size: int,
    kind: str,
    recipe: str,
    fuse: bool,
    recompute: bool,
    transport: str,
    alignment: int,
) -> None:
    whole, sharded = _build(kind, fuse), _build(kind, fuse)
    sharded.load_state_dict(whole.state_dict())
    config = etp.EtpConfig(transport=transport, pad_for_alignment=alignment)  # type: ignore[arg-type]
    runtime = etp.shard_module(sharded, dist.group.WORLD, config=config)
    layouts = {n: p.layout for n, p in sharded.named_parameters() if isinstance(p, etp.ETPShardedParam)}
    fused = set(layouts) if fuse else set()
    for step in range(3):
        _draw(whole, sharded, step)
        if step == 1:
            # Pages that an earlier step has written would hide bytes that are not written now.
            for slot in runtime.modes.now.cache.slots():
                slot.buffers[0].fill_(255)
        expected: list[dict[str, torch.Tensor]] = []
        for peer in range(world_size):
            data = _inputs(step, peer)
            x = data.clone().requires_grad_()
            _reset(whole, fused)
            y = _run(whole, x, kind, recipe, recompute)
            y.float().square().mean().backward()
            expected.append(_gradients(whole, fused))
            if peer == rank:
                mine, y_whole, dx_whole = data, y.detach(), x.grad
        x = mine.clone().requires_grad_()
        _reset(sharded, fused)
        y = _run(sharded, x, kind, recipe, recompute)
        assert torch.equal(y, y_whole), (kind, "output")
        y.float().square().mean().backward()
        assert torch.equal(x.grad, dx_whole), (kind, "input gradient")  # type: ignore[arg-type]
        for name, gradient in _gradients(sharded, fused).items():
            mean = sum((e[name].float() for e in expected[1:]), expected[0][name].float()) / world_size
            start, stop = layouts[name].logical_range(rank) if name in layouts else (0, mean.shape[0])
            found = gradient[: stop - start].float()
            wanted = mean[start:stop].to(gradient.dtype).float()
            # More ranks: their sum rounds in another order than ours; replicated gradients are summed in NCCL's.
            bound = 0.0 if world_size <= 2 and name in layouts else 2.0**-7 * mean.abs().max().item()
            assert ((found - wanted).abs() <= bound).all(), (kind, name)
        assert not runtime.groups[0]._copies()[0].derived, "derived columns were kept"  # type: ignore[attr-defined]
    assert not sharded._fp8_workspaces, "a full quantized copy was kept"
    gathered = sum(runtime.counters.gather_bytes.values())
    gathers = sum(runtime.counters.gathers.values())
    (group,) = runtime.groups
    nbytes = len(group.shards) * group.layout.padded_rows * IN * BYTES.get(recipe, 1)
    assert gathered == gathers * nbytes * (world_size - 1) // world_size


def calls_of_visits(rank: int, world_size: int, shim: str, recipe: str) -> dict[int, dict[str, int]]:
    """Python calls that a format adds to a visit, TE's and PyTorch's included: by experts, and by what is visited."""
    prepare(shim, recipe)
    import transformer_engine.pytorch as te

    found = {}
    for experts in (4, 16):
        calls = {}
        for enabled in (False, True):
            layer = te.GroupedLinear(experts, IN, IN, bias=False, params_dtype=torch.bfloat16, device="cpu")
            etp.shard_module(layer, dist.group.WORLD, config=etp.EtpConfig(pad_for_alignment=128))
            weight = cast("etp.ETPShardedParam", next(layer.parameters()))
            for _ in range(3):
                with _autocast(recipe, enabled), torch.no_grad():
                    forward = counted(weight.materialize_group_for_forward, "")[1].all
                backward = counted(weight.materialize_group_for_backward, "")[1].all
                end = counted(weight.weight_group.release_derived, "")[1].all if enabled else 0
            calls[enabled] = {"forward": forward, "backward": backward, "end": end}
        found[experts] = {part: calls[True][part] - calls[False][part] for part in calls[True]}
    return found


def bytes_of_formats(rank: int, world_size: int, shim: str, layers: int) -> dict[str, float]:
    """Bytes per element of a weight and microbatch, counted in the third of three steps with two microbatches.

    By recipe; "" for none, in which case weights travel in bf16.
    """
    prepare(shim)
    import transformer_engine.pytorch as te

    options: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": str(device())}
    found = {}
    for recipe in ("", "Float8BlockScaling", *APART):
        if recipe == next(iter(APART)):
            prepare(shim, recipe)
        model = nn.Sequential(*(te.Linear(IN, IN, **options) for _ in range(layers)))
        runtime = etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(pad_for_alignment=128))
        for step in range(3):
            runtime.counters.reset()
            for micro in range(2):
                with _autocast(recipe) if recipe else nullcontext():
                    out = model(_inputs(2 * step + micro, rank))
                out.float().square().mean().backward()
        found[recipe] = bytes_per_element([runtime], microbatches=2)
    return found


def copies_equal_slices(rank: int, world_size: int, shim: str, recipe: str, transport: str) -> dict[str, bool]:
    """Whether quantized shards equal the slices of Transformer Engine's quantized weight, bit by bit, with scales."""
    prepare(shim)
    answers: dict[str, bool] = {}
    for kind in ("Linear", "GroupedLinear"):
        whole, sharded = _build(kind), _build(kind)
        sharded.load_state_dict(whole.state_dict())
        config = etp.EtpConfig(transport=transport, pad_for_alignment=128)  # type: ignore[arg-type]
        runtime = etp.shard_module(sharded, dist.group.WORLD, config=config)
        _draw(whole, sharded, 1)
        with _autocast(recipe), torch.no_grad():
            _run(sharded, _inputs(0, rank), kind, recipe)
            gathered = sharded.get_parameter("weight0" if kind == "GroupedLinear" else "weight")
            found = gathered.materialize_group_for_forward()  # type: ignore[operator]
        (group,) = runtime.groups
        for weight, cut, tensor, copy in zip(
            whole.parameters(), group.shards, found, group.published()[0], strict=True
        ):
            if recipe == "Float8BlockScaling":
                import transformer_engine.pytorch as te
                from transformer_engine.pytorch.constants import DType

                quantizer = te.Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)
                own = quantizer(weight.detach())
                data, scales = own._rowwise_data, own._rowwise_scale_inv
                mine, my_scales = tensor._rowwise_data, tensor._rowwise_scale_inv
                across = -(-IN // 128)
                scales, my_scales = scales[:, :across], my_scales[:, :across]
            else:
                from transformer_engine.pytorch.constants import DType
                from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

                own = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, weight.device, rowwise=True, columnwise=False)(
                    weight.detach()
                )
                data, scales = own._data, own._scale_inv
                mine, my_scales = tensor._data, tensor._scale_inv
            start, stop = cut.layout.logical_range(rank)
            answers[f"{kind} {cut.fqn} data"] = torch.equal(mine, data)
            answers[f"{kind} {cut.fqn} scales"] = torch.equal(my_scales.reshape(-1), scales.reshape(-1))
            answers[f"{kind} {cut.fqn} copy"] = torch.equal(copy[: stop - start], data[start:stop])
    return answers


class Mixed(nn.Module):
    """Layers in FP8 between layers that are not, as in Megatron with ``--first-last-layers-bf16``."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.table = nn.Embedding(IN, IN, dtype=torch.bfloat16, device=device())
        self.layers = nn.ModuleList(
            te.Linear(IN, IN, bias=False, params_dtype=torch.bfloat16, device=str(device())) for _ in range(layers)
        )
        self.out = nn.Linear(IN, IN, bias=False, dtype=torch.bfloat16, device=device())

    def forward(self, tokens: torch.Tensor, recipes: list[str]) -> torch.Tensor:
        """Layer i under the i-th recipe, "" for none."""
        x = self.table(tokens)
        for layer, recipe in zip(self.layers, recipes, strict=True):
            with _autocast(recipe or RECIPES[0], enabled=bool(recipe)):
                x = x + layer(x)
        return cast("torch.Tensor", self.out(x))


def layers_of_many_recipes(rank: int, world_size: int, shim: str, transport: str) -> list[str]:
    """Steps of a model whose layers change their recipes between steps, against the whole model.

    Returns:
        the format of each group of weights after each step.
    """
    prepare(shim)
    torch.manual_seed(3)
    model, whole = Mixed(), Mixed()
    whole.load_state_dict(model.state_dict())
    config = etp.EtpConfig(transport=transport, pad_for_alignment=128)  # type: ignore[arg-type]
    runtime = etp.shard_module(model, dist.group.WORLD, config=config)
    block, tensor = RECIPES[0], RECIPES[1] if on_gpus() else ""
    every = [["", block, block, ""], ["", block, block, ""], [block, block, tensor, ""], ["", "", "", ""], [block] * 4]
    optimizers = [torch.optim.SGD(side.parameters(), lr=0.1, foreach=False) for side in (model, whole)]
    formats: list[str] = []
    for step, recipes in enumerate(every):
        losses = []
        for side, optimizer in zip((model, whole), optimizers, strict=True):
            optimizer.zero_grad()
            peers = [rank] if side is model else range(world_size)
            for peer in peers:
                tokens = torch.randint(IN, (128,), generator=torch.Generator().manual_seed(10 * step + peer))
                out = side(tokens.to(device()), recipes)
                if peer == rank:
                    losses.append(out.float().detach())
                (out.float().square().mean() / len(peers)).backward()
            optimizer.step()
        if step == 0 or world_size == 1:
            assert torch.equal(*losses), step
        assert (losses[0] - losses[1]).abs().max() < 0.05 * losses[1].abs().max(), step
        formats.append(" ".join(type(group.format).__name__ for group in runtime.groups))
    return formats


def nvfp4_equals_reference(rank: int, world_size: int, shim: str) -> int:
    """Bytes and scales of shards against those of Transformer Engine's reference. Returns how many were compared."""
    del world_size
    prepare(shim)
    compared = 0
    for square, (rows, columns) in itertools.product((True, False), ((64, 32), (96, 160), (192, 416))):
        generator = torch.Generator().manual_seed(rank)
        weight = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).exp2()
        weight[: rows // 4, : columns // 2] = 0
        weight[-rows // 4 :] *= 1e-4
        weight[:, -16:] *= 1e-30
        weight = weight.bfloat16()
        data, scales, column_data, column_scales, amax = te_apart.reference_nvfp4(weight, square=square)
        half = rows // 2
        wanted = (data, scales, column_data.t(), column_scales.t())
        for start in (0, half):
            found = quantize_nvfp4(weight[start : start + half], amax.view(()), square=square)
            for part, whole in zip(found, wanted, strict=True):
                first = start * len(whole) // rows
                assert torch.equal(part, whole[first : first + len(part)]), (square, rows, columns, start)
                compared += 1
    return compared


def refused(rank: int, world_size: int, shim: str) -> dict[str, str]:
    """What is refused, by case, with its message."""
    prepare(shim)
    from transformer_engine.common import recipe as recipes

    answers: dict[str, str] = {}

    def note(case: str, call: Callable[[], object]) -> None:
        try:
            call()
        except ValueError as error:
            answers[case] = str(error)

    import transformer_engine.pytorch as te

    def sharded(**options: Any) -> nn.Module:
        module = _build("Linear")
        etp.shard_module(module, dist.group.WORLD, config=etp.EtpConfig(**options))
        return module

    def forward(module: nn.Module, recipe: Any) -> None:
        with te.autocast(recipe=recipe):
            module(_inputs(0, rank))

    note("alignment", partial(forward, sharded(pad_for_alignment=16), recipes.Float8BlockScaling()))
    module = sharded(pad_for_alignment=128)
    if on_gpus():  # it makes its buffers on a CUDA device
        note("delayed", partial(forward, module, recipes.DelayedScaling()))
    note("one-dimensional", partial(forward, module, recipes.Float8BlockScaling(w_block_scaling_dim=1)))
    note("good", partial(forward, module, recipes.Float8BlockScaling()))
    return answers


def refused_on_blackwell(rank: int, world_size: int, shim: str) -> dict[str, str]:
    """What is refused of recipes with rows and columns apart, by case, with its message; CPUs only."""
    del world_size
    prepare(shim, "MXFP8BlockScaling")
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    answers: dict[str, str] = {}
    cases = {
        "square": recipes.MXFP8BlockScaling(enable_2d_quantization=True),
        "dequantized": recipes.MXFP8BlockScaling(backward_override="dequantized"),
        "dequantized in FP4": recipes.NVFP4BlockScaling(backward_override="dequantized"),
        "4 over 6": recipes.NVFP4BlockScaling(nvfp4_4over6="weights", disable_rht=True),
        "alignment": recipes.MXFP8BlockScaling(),
        "good": recipes.NVFP4BlockScaling(),
        "too old": recipes.MXFP8BlockScaling(),
    }
    module = _build("Linear")
    etp.shard_module(module, dist.group.WORLD, config=etp.EtpConfig(pad_for_alignment=16))
    for case, recipe in cases.items():
        if case == "too old":
            torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
        try:
            with te.autocast(recipe=recipe):
                module(_inputs(0, rank))
        except ValueError as error:
            answers[case] = str(error)
    return answers


_REFUSED = "weight is used with a {} recipe: {} and backward_override are not implemented".format
_BLOCK, _MXFP8, _NVFP4 = RECIPES[0], *APART
VARIABLES = {
    ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1", _BLOCK): "Float8Block(power_of_two=False, epsilon=0.0)",
    ("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1", RECIPES[1]): "Float8PerTensor(power_of_two=True, epsilon=0.0)",
    ("NVTE_BACKWARD_OVERRIDE", "dequantized", _BLOCK): "Float8Block(power_of_two=True, epsilon=0.0)",
    ("NVTE_BACKWARD_OVERRIDE", "dequantized", RECIPES[1]): "Float8PerTensor(power_of_two=False, epsilon=0.0)",
    ("NVTE_BACKWARD_OVERRIDE", "dequantized", _MXFP8): _REFUSED(_MXFP8, "enable_2d_quantization"),
    ("NVTE_BACKWARD_OVERRIDE", "dequantized", _NVFP4): _REFUSED(_NVFP4, "nvfp4_4over6 of weights"),
    ("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "1", _NVFP4): "NVFP4(square=False)",
    ("NVTE_NVFP4_DISABLE_RHT", "1", _NVFP4): "NVFP4(square=True)",
    ("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1", _NVFP4): "NVFP4(square=True)",
    ("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "1", _NVFP4): "NVFP4(square=True)",
    ("NVTE_NVFP4_4OVER6", "activations", _NVFP4): "NVFP4(square=True)",
    ("NVTE_NVFP4_4OVER6", "weights", _NVFP4): _REFUSED(_NVFP4, "nvfp4_4over6 of weights"),
    ("NVTE_NVFP4_4OVER6", "all", _NVFP4): _REFUSED(_NVFP4, "nvfp4_4over6 of weights"),
}
"""Environment variables from which recipes take their defaults, and the format of weights then, or why there is none.

With each, its value and the recipe.
"""


def formats_of_variables(rank: int, world_size: int, shim: str) -> list[str]:
    """What there is with each of :data:`VARIABLES`."""
    del rank, world_size
    prepare(shim, "MXFP8BlockScaling")
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    found = []
    for variable, value, recipe in VARIABLES:
        with mock.patch.dict(os.environ, {variable: value}):
            importlib.reload(recipes)
        with te.autocast(recipe=getattr(recipes, recipe)()):
            try:
                found.append(str(active_format("weight")))
            except ValueError as error:
                found.append(str(error))
    return found


def trained_after_inference(rank: int, world_size: int, shim: str, recipe: str) -> list[bool]:
    """Steps that are each preceded by an evaluation in inference mode, the first of all passes.

    Returns:
        for each step and kind of module, whether the output is that of the whole module, with a gradient of the input.
    """
    prepare(shim, recipe)
    right = []
    for kind in KINDS:
        whole, sharded = _build(kind), _build(kind)
        sharded.load_state_dict(whole.state_dict())
        etp.shard_module(sharded, dist.group.WORLD, config=etp.EtpConfig(pad_for_alignment=128))
        for step in range(2):
            _draw(whole, sharded, step)
            with torch.inference_mode():
                _run(sharded, _inputs(step, rank), kind, recipe)
            _draw(whole, sharded, step + 2)
            outputs = []
            for side in (whole, sharded):
                x = _inputs(step, rank).requires_grad_()
                y = _run(side, x, kind, recipe)
                y.float().square().mean().backward()
                outputs.append((y.detach(), x.grad))
            right.append(all(torch.equal(mine, its) for its, mine in zip(*outputs, strict=True)))
    return right


def used_in_two_precisions(rank: int, world_size: int, shim: str, recipe: str) -> dict[str, bool]:
    """Layers used in FP8 and without it before the backward pass: whether all is as in the whole layer, by case."""
    prepare(shim, recipe)
    answers = {}
    for kind, first, second in itertools.product(KINDS, (True, False), ("trained", "evaluated", "in inference mode")):
        whole, sharded = _build(kind), _build(kind)
        sharded.load_state_dict(whole.state_dict())
        etp.shard_module(sharded, dist.group.WORLD, config=etp.EtpConfig(pad_for_alignment=128))
        same = []
        for step in range(2):
            _draw(whole, sharded, step)
            sides = []
            for side in (whole, sharded):
                side.zero_grad()
                x, other = (_inputs(step + offset, rank).requires_grad_() for offset in (0, 100))
                y = _run_if(side, x, kind, recipe, enabled=first)
                loss = y.float().square().mean()
                with {"trained": nullcontext, "evaluated": torch.no_grad}.get(second, torch.inference_mode)():
                    z = _run_if(side, other, kind, recipe, enabled=not first)
                if second == "trained":
                    loss = loss + z.float().square().mean()
                loss.backward()
                sides.append([y.detach(), z.detach().clone(), x.grad, other.grad])
            same += [one is its or torch.equal(one, its) for its, one in zip(*sides, strict=True)]  # type: ignore[arg-type]
        answers[f"{kind}, {'' if first else 'not '}in FP8 first, then {second}"] = all(same)
    return answers


def _run_if(module: nn.Module, x: torch.Tensor, kind: str, recipe: str, *, enabled: bool) -> torch.Tensor:
    with _autocast(recipe, enabled):
        out = module(x, SPLITS) if kind == "GroupedLinear" else module(x)
    return cast("torch.Tensor", out[0] if isinstance(out, tuple) else out)
