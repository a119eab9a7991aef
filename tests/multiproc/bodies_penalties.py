"""Bodies: gradients of the weights' own terms in a loss, where gradients are summed over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import etp
from tests.support.launch import device

SIDE = 8


def _input(rank: int) -> torch.Tensor:
    return torch.randn(3, SIDE, generator=torch.Generator().manual_seed(rank)).to(device())


def _penalty(weight: torch.Tensor) -> torch.Tensor:
    """Operators, functions of a list of tensors, and an operand in which the weight is used again."""
    absolute = torch._foreach_abs([weight])[0]
    return weight.square().sum() + (2 * weight * weight.detach()).sum() + torch.exp(absolute).sum()


class _Halves(torch.autograd.Function):
    """A function of the user's own, which nobody sees."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        del ctx
        return torch.Tensor.clone(weight.detach()) * 0.5

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        del ctx
        return grad * 0.5


class _Replay(torch.autograd.Function):
    """What ``torch.cuda.make_graphed_callables`` does to a layer: it returns memory that the graph fills."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        ctx.memory = memory
        return x.sum() + 0 * weight.detach().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        del grad
        return None, ctx.memory.detach(), None


def _replay(x: torch.Tensor, weight: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        replayed: torch.Tensor = _Replay.apply(x, weight, memory)
    return replayed


def _captured(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The memory that replays of the layer's backward pass would fill."""
    modes = layer.weight.driver.modes
    capturing = patch.object(modes, "_is_capturing", lambda: True)
    captured, now = patch.object(modes, "_current_capture", lambda *_: 1), patch.object(modes, "captures_part")
    with capturing, captured, now:
        (memory,) = torch.autograd.grad(layer(x).square().sum(), [layer.weight])
    return memory


def penalties_beside_captures(rank: int, world_size: int, mean: bool) -> dict[str, float]:
    """Each way to differentiate a layer and a penalty, before and behind a capture of the layer.

    Returns:
        the largest difference from the unsharded layer's gradient, over all ranks' losses, for each; and
        how often its hook ran wrongly.
    """
    reduction = etp.GradReduction.MEAN if mean else etp.GradReduction.SUM
    torch.manual_seed(0)
    whole, model = (nn.Sequential(nn.Linear(SIDE, SIDE, bias=False)).to(device()) for _ in range(2))
    model.load_state_dict(whole.state_dict())
    config = etp.EtpConfig(pad_for_alignment=1, grad_reduction=reduction)
    runtime = etp.shard_module(model, dist.group.WORLD, config=config)
    runtime.modes.possible = True  # on a CPU as well
    layer: Any = model[0]
    weight, x = layer.weight, _input(rank)
    ran: list[int] = []
    weight.register_post_accumulate_grad_hook(lambda _: ran.append(1))

    def wanted(*terms: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        original = whole.get_parameter("0.weight")
        loss = torch.stack([term(original, _input(peer)) for peer in range(world_size) for term in terms]).sum()
        (grad,) = torch.autograd.grad(loss / world_size if mean else loss, [original])
        return grad.chunk(world_size)[rank]

    def of_layer(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, weight).square().sum()

    def of_penalty(weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return _penalty(weight)

    def of_own(weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = _Halves.apply(weight)
        return own.square().sum()

    answers: dict[str, float] = {}

    def compare(name: str, found: torch.Tensor, expected: torch.Tensor, hooks: int = 1) -> None:
        answers[name] = float((torch.Tensor(found) - expected).abs().max())
        answers[f"{name}, hooks"] = float(len(ran) - hooks)
        ran.clear()
        model.zero_grad()

    def differentiated(when: str) -> None:
        (model(x).square().sum() + _penalty(weight)).backward()
        compare(f"backward {when}", weight.grad, wanted(of_layer, of_penalty))
        model(x).square().sum().backward()
        compare(f"layer alone {when}", weight.grad, wanted(of_layer))
        _penalty(weight).backward()
        (model(x).square().sum() + _penalty(weight)).backward()
        compare(f"penalty, then a layer too {when}", weight.grad, wanted(of_penalty, of_layer, of_penalty), hooks=2)
        (grad,) = torch.autograd.grad(model(x).square().sum() + _penalty(weight), [weight])
        compare(f"grad {when}", grad, wanted(of_layer, of_penalty), hooks=0)
        (grad,) = torch.autograd.grad(model(x).square().sum(), [weight])
        compare(f"grad of the layer alone {when}", grad, wanted(of_layer), hooks=0)

    differentiated("before a capture")
    (model(x).square().sum() + of_own(weight, x)).backward()
    compare("the user's own function", weight.grad, wanted(of_layer, of_own))
    memory = _captured(layer, x)
    compare("captured", memory, wanted(of_layer), hooks=0)
    differentiated("behind a capture")
    _replay(x, weight, memory).backward()
    compare("replayed", weight.grad, wanted(of_layer))
    (_replay(x, weight, memory) + _penalty(weight)).backward()
    compare("replayed beside a penalty", weight.grad, wanted(of_layer, of_penalty))
    (model(x).square().sum() + of_own(weight * 1, x)).backward()
    compare("the user's own function, behind a capture", weight.grad, wanted(of_layer, of_own))
    return answers


def own_functions_beside_reduced_gradients(rank: int, world_size: int) -> dict[str, str]:
    """What PyTorch adds up before the engine sees it: a gradient of the user's own function, and another one.

    Returns:
        the error for each kind of other gradient; empty where there was none.
    """
    del world_size
    model = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False)).to(device())
    config = etp.EtpConfig(pad_for_alignment=1, grad_reduction=etp.GradReduction.SUM)
    runtime = etp.shard_module(model, dist.group.WORLD, config=config)
    runtime.modes.possible = True  # on a CPU as well
    layer: Any = model[0]
    weight, x = layer.weight, _input(rank)

    def own() -> torch.Tensor:
        result: torch.Tensor = _Halves.apply(weight)
        return result.square().sum()

    def backward() -> None:
        (model(x).square().sum() + own()).backward()

    def beside_a_penalty() -> None:
        (model(x).square().sum() + own() + _penalty(weight)).backward()

    def returned() -> None:
        torch.autograd.grad(model(x).square().sum() + own(), [weight])

    answers = {}

    def attempt(name: str, differentiate: Callable[[], None]) -> None:
        answers[name] = ""
        try:
            differentiate()
        except etp.EtpStateError as error:
            answers[name] = str(error)
        model.zero_grad()

    def in_a_checkpoint() -> None:
        x.requires_grad_()
        checkpoint(lambda x: model(x).square().sum() + _penalty(weight), x, use_reentrant=True).backward()

    attempt("layer", backward)
    attempt("penalty", beside_a_penalty)
    attempt("penalty in a checkpoint", in_a_checkpoint)
    attempt("layer, behind an error", backward)
    attempt("returned by autograd", returned)
    _captured(layer, x)
    attempt("behind a capture", backward)
    return answers


class _Squares(torch.autograd.Function):
    """Computes its gradient, too, from a copy of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.copied = weight.detach() * 1
        result: torch.Tensor = ctx.copied.square().sum()
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.copied


def own_functions_of_thawed_experts(rank: int, world_size: int) -> list[float]:
    """How often the gradient of a function of the user's own counts, for each expert; the second one was frozen."""
    config = etp.EtpConfig(pad_for_alignment=1, grad_reduction=etp.GradReduction.SUM)
    options: dict[str, Any] = {"bias": False, "etp_group": dist.group.WORLD, "device": device(), "config": config}
    model = etp.GroupedLinear(2, SIDE, SIDE, **options)
    weights = [model.get_parameter(f"weight{index}") for index in range(2)]
    for trained in (False, True):
        model.zero_grad()
        weights[1].requires_grad_(trained)
        terms: list[torch.Tensor] = [_Squares.apply(weight) for weight in weights if weight.requires_grad]
        (0 * model(_input(rank), [1, 2]).sum() + torch.stack(terms).sum()).backward()
    return [float((weight.grad / (2 * weight.detach())).mean()) / world_size for weight in weights]


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        del ctx
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        del ctx, grad
        raise ArithmeticError


def own_function_behind_a_failure(rank: int, world_size: int) -> float:
    """How often the gradient of a user's own function counts after a backward pass that failed behind a penalty's."""
    model = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False)).to(device())
    config = etp.EtpConfig(pad_for_alignment=1, grad_reduction=etp.GradReduction.SUM)
    etp.shard_module(model, dist.group.WORLD, config=config)
    weight: Any = model[0].weight
    failing = _Fails.apply(weight * 1)
    try:
        # The penalty is the later one, so that it is differentiated first.
        (failing.sum() + (weight * 1).sum()).backward()
    except ArithmeticError:
        model.zero_grad()
    (0 * model(_input(rank)).sum() + _Squares.apply(weight)).backward()
    return float((weight.grad / (2 * weight.detach())).mean()) / world_size


def penalty_behind_a_failed_forward(rank: int, world_size: int) -> tuple[str, float]:
    """The error of a pass with a penalty after a forward pass that failed behind a function of the user's own.

    Returns:
        the error, and how often the penalty's gradient counts when that pass is repeated.
    """
    model = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False)).to(device())
    config = etp.EtpConfig(pad_for_alignment=1, grad_reduction=etp.GradReduction.SUM)
    etp.shard_module(model, dist.group.WORLD, config=config)
    weight: Any = model[0].weight
    _Squares.apply(weight)
    error = ""
    for _ in range(2):
        try:
            (0 * model(_input(rank)).sum() + weight.square().sum()).backward()
        except etp.EtpStateError as raised:
            error = str(raised)
            model.zero_grad()
    return error, float((weight.grad / (2 * weight.detach())).mean()) / world_size


PADDED_TERMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "smooth absolute value": lambda weight: (weight.square() + 1e-2).sqrt().sum(),
    "gates": lambda weight: torch.sum(torch.sigmoid(weight), dtype=torch.float64).float(),
    "barrier": lambda weight: -weight.abs().log().sum(),
    "norms of rows": lambda weight: weight.square().sum(dim=1).sqrt().sum(),
    "sums of columns": lambda weight: torch.sum(input=torch.exp(weight), dim=0).mul(0.5).sum(),
    "flattened": lambda weight: (weight.flatten() - 1).square().sum(0) + weight.cos().view(-1).sum(),
    "weight set to a constant": lambda weight: nn.init.constant_(weight, 0.5).sum(),
}


def terms_of_padded_weights(rank: int, world_size: int, mean: bool) -> dict[str, tuple[float, float, int]]:
    """Terms that are not zero, or have no gradient, at zero, where a rank has rows of padding.

    Returns:
        for each term the largest relative difference of its value, summed over the ranks, and of this rank's gradient
        from the unsharded layer's, over some steps; and how many elements of the padding's gradient are not zero.
    """
    reduction = etp.GradReduction.MEAN if mean else etp.GradReduction.SUM
    answers = {}
    for name, term in PADDED_TERMS.items():
        torch.manual_seed(0)
        whole, model = (nn.Sequential(nn.Linear(SIDE, 5, bias=False)).to(device()) for _ in range(2))
        model.load_state_dict(whole.state_dict())
        etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(pad_for_alignment=2, grad_reduction=reduction))
        weight: Any = model[0].weight
        start, stop = weight.layout.logical_range(rank)
        off = off_grad = 0.0
        for _ in range(3):
            for each in (whole, model):
                each.zero_grad()
            value, expected = term(weight), term(whole[0].weight)
            (model(_input(0)).square().mean() + value).backward()
            (whole(_input(0)).square().mean() + expected).backward()
            total = value.detach().clone()
            dist.all_reduce(total)
            off = max(off, _difference(total, expected.detach()))
            scale = 1 if mean else world_size
            grad = weight.grad.as_subclass(torch.Tensor)
            off_grad = max(off_grad, _difference(grad[: stop - start], scale * whole[0].weight.grad[start:stop]))
            with torch.no_grad():
                weight.sub_(weight.grad, alpha=1e-3)
                whole[0].weight.copy_(weight.full_tensor())
        answers[name] = off, off_grad, int(grad[stop - start :].count_nonzero())
    return answers


def _difference(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, relative to numbers above 0.1; infinite if a number is not finite."""
    if not bool(mine.isfinite().all()):
        return float("inf")
    return float(((mine - theirs).abs() / theirs.abs().clamp(min=0.1)).max()) if mine.numel() else 0.0


def penalties_without_a_layer(rank: int, world_size: int, once: bool) -> dict[str, list[str]]:
    """Hooks that run in each of several backward passes; weights were never gathered before the first ones.

    The hooks are compared with those of unsharded weights, and so are the gradients that they see of penalties alone.
    """
    torch.manual_seed(0)
    whole, model = (nn.Sequential(*(nn.Linear(SIDE, 5) for _ in range(2))).to(device()) for _ in range(2))
    model.load_state_dict(whole.state_dict())
    config = etp.EtpConfig(pad_for_alignment=4, grad_reduction=etp.GradReduction.SUM, reduce_once_per_iteration=once)
    model[1].weight.requires_grad_(False)
    etp.shard_module(model, dist.group.WORLD, config=config)
    model[1].weight.requires_grad_(True)
    seen: dict[nn.Module, list[tuple[str, torch.Tensor]]] = {whole: [], model: []}

    def note(module: nn.Module, name: str, param: torch.Tensor) -> None:
        assert param.grad is not None
        seen[module].append((name, param.grad.clone()))

    for module in seen:
        for name in ("0.weight", "1.weight"):
            module.get_parameter(name).register_post_accumulate_grad_hook(partial(note, module, name))
    answers: dict[str, list[str]] = {}
    x = _input(rank).requires_grad_()

    def penalties(names: Sequence[str], module: nn.Module) -> torch.Tensor:
        return torch.stack([torch.exp(module.get_parameter(name)).sum() for name in names]).sum()

    def differentiate(name: str, loss: Callable[[Any], torch.Tensor], alone: bool = False) -> None:
        for module in seen:
            module.zero_grad()
            loss(module).backward()
        etp.wait_async_comms(model)
        expected, found = (sorted(pairs, key=itemgetter(0)) for pairs in seen.values())
        answers[name] = [name for name, _ in found]
        assert answers[name] == [name for name, _ in expected]
        for (_, grad), (_, wanted) in zip(found, expected, strict=True) if alone else ():
            padded = torch.cat([wanted, torch.zeros(3, SIDE, device=device())])
            torch.testing.assert_close(torch.Tensor(grad), padded.chunk(world_size)[rank] * world_size)
        for pairs in seen.values():
            pairs.clear()

    def used_twice(module: Any) -> torch.Tensor:
        both: torch.Tensor = module[0](x).sum() + module[0](2 * x).sum()
        return both + penalties(["0.weight", "1.weight"], module)

    def recomputed(module: Any) -> torch.Tensor:
        result: torch.Tensor = checkpoint(module[0], x, use_reentrant=True)
        return result.sum() + penalties(["0.weight"], module)

    for names in (["0.weight"], ["1.weight"], ["0.weight", "1.weight"]):
        differentiate(f"penalties of {', '.join(names)}", partial(penalties, names), True)
    weight = model.get_parameter("0.weight")
    torch.autograd.grad(penalties(["0.weight"], model), [weight])
    assert not seen[model]
    differentiate("a layer", lambda module: module[0](x).sum())
    differentiate("used twice beside penalties", used_twice)
    differentiate("recomputed beside a penalty", recomputed)
    differentiate("penalty behind a layer", partial(penalties, ["0.weight"]), True)
    return answers


def _stock_hook(param: torch.Tensor, told: list[str], name: str) -> Callable[..., None]:
    """What Megatron's DistributedDataParallel does once a gradient is accumulated."""

    def hook(*_: object) -> None:
        whole: Any = param
        if whole.grad is not None and not whole.grad_added_to_main_grad:
            whole.main_grad.add_(whole.grad.data)
        whole.grad = None
        told.append(name)

    return hook


def penalties_in_main_grad(
    rank: int, world_size: int, dtype: torch.dtype
) -> dict[str, tuple[list[str], list[str], bool]]:
    """Backward passes with ``main_grad`` and Megatron's hooks, those of unsharded weights on autograd's own nodes.

    Returns:
        for each pass the weights whose hooks have run, without shards and with them, and whether the rows of
        ``main_grad`` are equal, bit by bit.
    """
    del world_size
    torch.manual_seed(0)
    whole, model = (nn.Sequential(*(nn.Linear(SIDE, 6, False) for _ in range(2))).to(device(), dtype) for _ in range(2))
    model.load_state_dict(whole.state_dict())
    etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(pad_for_alignment=4))
    told: dict[nn.Module, list[str]] = {whole: [], model: []}
    nodes = []
    for module in (whole, model):
        for name in ("0.weight", "1.weight"):
            weight: Any = module.get_parameter(name)
            weight.main_grad = torch.zeros(weight.shape, device=device())
            weight.grad_added_to_main_grad = False
            hook = _stock_hook(weight, told[module], name)
            if module is whole:
                nodes.append(weight.expand_as(weight).grad_fn.next_functions[0][0])
                nodes[-1].register_hook(hook)
            else:
                weight.register_reduce_hook(hook)
    x = _input(0).to(dtype)
    passes: dict[str, Callable[[nn.Module], torch.Tensor]] = {
        "a penalty": lambda module: torch.exp(module.get_parameter("0.weight")).sum(),
        "another": lambda module: module.get_parameter("1.weight").square().sum(),
        "penalties": lambda module: torch.stack([torch.exp(weight).sum() for weight in module.parameters()]).sum(),
        "a layer": lambda module: module.get_submodule("0")(x).square().sum(),
        "a layer and penalties": lambda module: (
            module.get_submodule("0")(x).sum()
            + torch.stack([weight.cos().sum() for weight in module.parameters()]).sum()
        ),
        "a penalty behind them": lambda module: torch.exp(module.get_parameter("0.weight")).sum(),
    }
    answers = {}
    for description, loss in passes.items():
        for module in told:
            loss(module).backward()
        etp.wait_async_comms(model)
        same = True
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            shard: Any = mine
            start, stop = shard.layout.logical_range(rank)
            same &= torch.equal(shard.main_grad[: stop - start], cast("Any", theirs).main_grad[start:stop])
            same &= not shard.main_grad[stop - start :].count_nonzero()
            shard.main_grad.zero_()
            cast("Any", theirs).main_grad.zero_()
            shard.grad_added_to_main_grad = False
        answers[description] = sorted(told[whole]), sorted(told[model]), bool(same)
        for names in told.values():
            names.clear()
    return answers
