"""Bodies: what a plain PyTorch user may do to a sharded model by habit, and would silently change its numbers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

import etp
from etp.shard_copy import ShardCopy
from tests.multiproc.models import Tiny, batch, loss_of
from tests.multiproc.oracle import rows_of_shard
from tests.support.launch import device

ROWS = 16
"""All of them on rank 0: there, a shard has the very shape of its weight, and no shape error tells."""


def _layer() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, ROWS, bias=False)).to(device())


def _inputs(rank: int) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(rank)).to(device())


def _answers(attempts: dict[str, Callable[[], Any]], errors: tuple[type[Exception], ...]) -> dict[str, str]:
    answers = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except errors as error:
            answers[name] = str(error)
        else:
            answers[name] = "no error"
    return answers


def functions_of_a_shard(rank: int, world_size: int) -> tuple[dict[str, str], dict[str, str]]:
    """What functions of a shard in place of its weight are answered, and functions that would draw it anew."""
    model = _layer()
    etp.shard_module(model, dist.group.WORLD)
    weight, x = model[0].weight, _inputs(rank)
    before = etp.full_state_dict(model)
    first = torch.zeros(1, dtype=torch.long, device=device())
    wrong: dict[str, Callable[[], Any]] = {
        "transpose": lambda: x @ weight.transpose(0, 1),
        "permute": lambda: x @ torch.permute(weight, (1, 0)),
        "H": lambda: x @ weight.H,
        "mH": lambda: x @ weight.mH,
        "__getitem__": lambda: weight[first],
        "__setitem__": lambda: weight.__setitem__(0, 0.0),
        "index_select": lambda: weight.index_select(0, first),
        "chunk": lambda: weight.chunk(2),
        "unbind": lambda: list(weight),
        "unsqueeze": lambda: F.conv1d(x.unsqueeze(-1), weight.unsqueeze(-1)),
        "tensordot": lambda: torch.tensordot(x, weight, dims=([1], [1])),
        "inner": lambda: torch.inner(x, weight),
        "addmm": lambda: x.new_zeros(ROWS, 3).addmm(weight, x.t()),
        "cosine_similarity": lambda: F.cosine_similarity(x[:, None], weight, dim=-1),
        "linalg_multi_dot": lambda: torch.linalg.multi_dot([weight, x.t()]),
        "rand_like": lambda: torch.rand_like(weight),
        "linalg_vector_norm": lambda: torch.linalg.vector_norm(weight),
        "linalg_svdvals": lambda: torch.linalg.svdvals(weight),
        "linalg_qr": lambda: torch.linalg.qr(weight),
        "pairwise_distance": lambda: F.pairwise_distance(weight, weight + 1),
        "mean": partial(torch.Tensor.mean, weight),
        "norm": partial(torch.Tensor.norm, weight),
        "max": lambda: torch.max(weight),
        "softmax": lambda: weight.softmax(0),
        "sort": lambda: torch.sort(weight, 0),
        "cumsum": lambda: weight.cumsum(0),
        "tril": partial(torch.Tensor.tril, weight),
        "numpy": partial(torch.Tensor.numpy, weight),
        "cat": lambda: F.linear(x, torch.cat([*model.parameters()])),
        "stack": lambda: torch.stack([*model.parameters()]),
    }
    drawn: dict[str, Callable[[], Any]] = {
        "normal_": lambda: nn.init.normal_(weight),
        "uniform_": lambda: nn.init.xavier_uniform_(weight),
        "kaiming_uniform_": lambda: cast("nn.Linear", model[0]).reset_parameters(),
        "eye": lambda: nn.init.eye_(weight),
        "normal_ of data": lambda: weight.data.normal_(0.0, 0.02),
        "uniform_ of data": lambda: nn.init.uniform_(weight.data),
    }
    with torch.no_grad():
        answers = _answers(wrong, (TypeError, etp.EtpStateError)), _answers(drawn, (TypeError,))
    assert torch.equal(etp.full_state_dict(model)["0.weight"], before["0.weight"])
    return answers


def computed_from_a_shard(rank: int, world_size: int, frozen: bool) -> dict[str, str]:
    """What a model might do with a tensor that was computed from a shard: a layer of its own, and a table of rows."""
    model = _layer().requires_grad_(not frozen)
    etp.shard_module(model, dist.group.WORLD)
    weight, x = model[0].weight, _inputs(rank)
    rows = torch.randn(2, ROWS, 8, device=device())
    same = torch.randn(ROWS, 8, device=device(), requires_grad=True)
    first = torch.zeros(1, dtype=torch.long, device=device())
    wrong: dict[str, Callable[[], Any]] = {
        "linear: cast": lambda: F.linear(x.double(), weight.double()),
        "linear: clamp": lambda: F.linear(x, weight.clamp(-1, 1)),
        "linear: scaled twice": lambda: F.linear(x, (2 * weight).abs() * 3),
        "linear: input": lambda: F.linear(same + weight, same),
        "embedding": lambda: F.embedding(first, weight * 2),
        "matmul": lambda: x @ (weight * 2).view(8, ROWS),
        "t": lambda: x @ (weight * 2).t(),
        "__getitem__": lambda: (weight * 2)[first],
        "add": lambda: rows + weight,
        "add: reversed": lambda: weight + rows,
        "add: twice": lambda: rows + weight * 2,
        "add_": lambda: rows.clone().add_(weight),
        "expand": lambda: weight.expand(2, -1, -1),
        "__getitem__: flat": lambda: weight.flatten()[:8],
        "narrow_copy": lambda: weight.view(-1).narrow_copy(0, 0, 8),
        "cat": lambda: torch.cat([weight.view(-1), weight.abs().flatten()]),
        "mean": lambda: weight.double().abs().mean(),
        "repeat": lambda: weight.repeat(2, 1),
    }
    answers = _answers(wrong, (etp.EtpStateError,))
    with torch.no_grad():
        answers |= _answers(
            {f"{name}, no_grad": wrong[name] for name in ("add", "expand", "__getitem__: flat")}, (etp.EtpStateError,)
        )
    return answers


class Its(nn.Linear):
    """Computes with its weight as it likes."""

    def __init__(self, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(ROWS, ROWS, bias=False)
        self.compute = compute

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """What it was made for."""
        return self.compute(input, self.weight)


def computed_with_data(rank: int, world_size: int) -> dict[str, str]:
    """Layers that compute with the data of their weights, or with what is detached of them; recorded or not."""
    layers: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "linear: data": lambda x, w: F.linear(x, w.data),
        "linear: twice the data": lambda x, w: F.linear(x, w.data * 2),
        "linear: detached": lambda x, w: F.linear(x, w.detach()),
        "t: data": lambda x, w: x @ w.data.t(),
        "t: detached": lambda x, w: x @ w.detach().t(),
        "matmul: data": lambda x, w: torch.matmul(x, w.data),
        "mean: data": lambda x, w: x * w.data.mean(),
        "__getitem__: detached": lambda x, w: x + w.detach()[0],
    }
    answers: dict[str, str] = {}
    for name, compute in layers.items():
        model = nn.Sequential(nn.Linear(8, ROWS), Its(compute)).to(device())
        etp.shard_module(model, dist.group.WORLD)
        for recorded in (True, False):
            with torch.set_grad_enabled(recorded):
                answers |= _answers({f"{name}: {recorded}": partial(model, _inputs(rank))}, (etp.EtpStateError,))
    return answers


class Casting(nn.Linear):
    """Computes in double precision."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """As ``nn.Linear``."""
        return F.linear(input.double(), self.weight.double())


def casts_in_an_evaluation(rank: int, world_size: int) -> dict[str, str]:
    """A layer that casts its weight, where autograd does not record; behind that, casts are plain tensors."""
    torch.manual_seed(4)
    model = nn.Sequential(Casting(8, ROWS, bias=False)).to(device()).eval()
    etp.shard_module(model, dist.group.WORLD)
    answers: dict[str, str] = {}
    for name, mode in {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.items():
        with mode():
            answers |= _answers({name: lambda: model(_inputs(rank))}, (etp.EtpStateError,))
            assert type(model[0].weight.double()) is ShardCopy
    return answers


def arithmetic_on_a_shard(rank: int, world_size: int) -> None:
    """What treats each element alone: penalties, casts, averages of weights, new tensors of their size; and gathers."""
    model = _layer()
    plain = copy.deepcopy(model)
    etp.shard_module(model, dist.group.WORLD)
    own, whole = model[0].weight, plain[0].weight
    start, whole_start = own.detach().clone() + 1, whole.detach().clone() + 1
    for weight, begin in ((own, start), (whole, whole_start)):
        loss = (weight - begin).square().sum() + weight.double().abs().sum() / weight.numel() * 8
        loss = loss + weight.flatten().square().sum() + (weight * 2).clone().sum(1).sum()
        loss.backward()
    expected = rows_of_shard(whole.grad, rank, world_size, ROWS)
    # Rank 0 has all rows.
    assert rank > 0 or torch.equal(torch.as_tensor(own.grad), expected)
    for made in (own.data + 1, own.detach().sum(0), torch.zeros_like(own), own.new_zeros(99, 99)):
        assert type(made) is torch.Tensor
    assert type(own * 2) is not torch.Tensor
    node = own.expand_as(own).grad_fn.next_functions[0][0]
    assert node.variable is own
    assert "a tensor computed from ETPShardedParam(0.weight: rows" in repr(own * 2)
    with torch.no_grad():
        average = start.lerp(own, 0.1).add_(own * 2).to(torch.float64)
        assert type(average) is torch.Tensor
    by_hand = funcol.all_gather_tensor(own.detach(), 0, dist.group.WORLD)
    assert torch.equal(funcol.all_gather_tensor(own, 0, dist.group.WORLD), by_hand)
    # A cast to the dtype that it has is the shard itself.
    x = _inputs(rank)
    assert torch.equal(F.linear(x, own.float()), F.linear(x, whole.float()))


def second_derivatives(rank: int, world_size: int) -> dict[str, str]:
    """A gradient penalty on a linear output, where autograd alone would drop the penalty's part without an error."""
    answers = {}
    for name in ("linear", "grouped"):
        torch.manual_seed(5)
        where: Any = {"etp_group": dist.group.WORLD, "device": device(), "bias": False}
        layer = etp.Linear(8, 5, **where) if name == "linear" else etp.GroupedLinear(1, 8, 5, **where)
        x = _inputs(rank).requires_grad_()
        for _ in range(2):
            y = layer(x) if name == "linear" else layer(x, [3])
            try:
                torch.autograd.grad(y.sum(), x, create_graph=True)
            except RuntimeError as error:
                answers[name] = str(error)
            y = layer(x) if name == "linear" else layer(x, [3])
            (grad,) = torch.autograd.grad(y.sum(), x)
            assert grad.abs().sum() > 0
    return answers


def returned_gradients(rank: int, world_size: int) -> None:
    """torch.autograd.grad of replicated parameters returns the mean over the ranks, as it does for shards."""
    torch.manual_seed(6)
    model = Tiny(tied=True).to(device())
    plain = copy.deepcopy(model)
    etp.shard_module(model, dist.group.WORLD)
    for step in range(3):
        names = [name for name, param in model.named_parameters() if not isinstance(param, etp.ETPShardedParam)]
        own, whole = dict(model.named_parameters()), dict(plain.named_parameters())
        tokens, targets = batch(step, rank, device())
        got = torch.autograd.grad(loss_of(model(tokens), targets), [own[name] for name in names])
        each = []
        for peer in range(world_size):
            tokens, targets = batch(step, peer, device())
            each.append(torch.autograd.grad(loss_of(plain(tokens), targets), [whole[name] for name in names]))
        assert len(names) > 4
        for name, mine, *theirs in zip(names, got, *each, strict=True):
            assert torch.equal(mine, sum(theirs) / world_size), (step, name)
            assert own[name].grad is None


def changed_members(rank: int, world_size: int) -> dict[str, str]:
    """Forward passes of a model that has lost a shard, or gained a parameter, since it was sharded."""

    def pruned(model: nn.Sequential) -> nn.Module:
        prune.custom_from_mask(model[0], "weight", torch.ones(ROWS, 8, device=device()))
        return model

    def reassigned(model: nn.Sequential) -> nn.Module:
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        return model

    def grown(model: nn.Sequential) -> nn.Module:
        model.append(nn.Linear(ROWS, 2, device=device()))
        return model

    def adapted(model: nn.Sequential) -> nn.Module:
        model[0].add_module("adapter", nn.Linear(8, 2, bias=False, device=device()))
        return model

    def thawed(model: nn.Sequential) -> nn.Module:
        model.append(nn.LayerNorm(ROWS, device=device()).requires_grad_(False))
        model(_inputs(rank))
        model[1].requires_grad_(True)
        return model

    changes: dict[str, Callable[[nn.Sequential], nn.Module]] = {
        "adapted": adapted,
        "thawed": thawed,
        "pruned": pruned,
        "reassigned": reassigned,
        "grown": grown,
        "ddp": nn.parallel.DistributedDataParallel,
    }
    answers: dict[str, str] = {}
    for name, change in changes.items():
        model = _layer()
        etp.shard_module(model, dist.group.WORLD)
        model(_inputs(rank))
        changed = change(model)
        answers |= _answers({name: partial(changed, _inputs(rank))}, (etp.EtpStateError,))
    return answers


def allowed_changes(rank: int, world_size: int) -> None:
    """A frozen addition, a removed layer, a conversion, and an addition that is sharded as well."""
    model = _layer()
    etp.shard_module(model, dist.group.WORLD)
    model.append(nn.Linear(ROWS, 4, device=device()).requires_grad_(False))
    assert model(_inputs(rank)).shape == (3, 4)
    model[1] = nn.Identity()
    assert model.double()(_inputs(rank).double()).dtype is torch.float64
    torch.manual_seed(8)
    model[1] = nn.Linear(ROWS, 21, dtype=torch.float64, device=device())
    plain = copy.deepcopy(model[1])
    features = model[0](_inputs(rank).double())
    etp.shard_module(model, dist.group.WORLD)
    assert torch.equal(model(_inputs(rank).double()), plain(features))
    model[1] = nn.Identity()
    assert torch.equal(model(_inputs(rank).double()), features)


def tied_across_calls(rank: int, world_size: int) -> str:
    """Two modules share a weight and are sharded one by one: the tie would be lost."""
    torch.manual_seed(9)
    pair = nn.ModuleDict({"table": nn.Embedding(9, 6), "head": nn.Linear(6, 9, bias=False)}).to(device())
    pair["head"].weight = pair["table"].weight
    etp.shard_module(pair["table"], dist.group.WORLD)
    return _answers({"head": lambda: etp.shard_module(pair["head"], dist.group.WORLD)}, (ValueError,))["head"]


def on_the_meta_device(rank: int, world_size: int) -> str:
    """A model without values."""
    model = nn.Sequential(nn.Linear(8, ROWS, device="meta"))
    return _answers({"meta": lambda: etp.shard_module(model, dist.group.WORLD)}, (ValueError,))["meta"]


def states_of_other_ranks(rank: int, world_size: int) -> dict[str, str]:
    """Loads shards of rank 0, full weights, and shards with assign=True; only the rank's own state is loaded."""
    torch.manual_seed(10)
    model = Tiny(tied=True).to(device())
    whole = {name: value.clone() + 1.0 for name, value in model.state_dict().items()}
    etp.shard_module(model, dist.group.WORLD)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    own = torch.load(file, weights_only=True)
    files = [file.getvalue()]
    dist.broadcast_object_list(files, src=0)
    before = etp.full_state_dict(model)
    attempts: dict[str, Callable[[], Any]] = {
        "rank 0": lambda: model.load_state_dict(torch.load(io.BytesIO(files[0]), weights_only=True)),
        "whole": lambda: model.load_state_dict(whole),
        "whole, not strict": lambda: model.load_state_dict(whole, strict=False),
        "assign": lambda: model.load_state_dict(own, assign=True),
    }
    answers = _answers(attempts, (ValueError,))
    assert isinstance(model.head.weight, etp.ETPShardedParam)
    after = etp.full_state_dict(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(own)
    after = etp.full_state_dict(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return answers


def sparse_gradients(rank: int, world_size: int) -> str:
    """A replicated table with sparse gradients, behind which there is a sharded layer."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.EmbeddingBag(9, 8, sparse=True), nn.Linear(8, ROWS)).to(device())
    etp.shard_module(model, dist.group.WORLD)
    indices = torch.tensor([[rank, 3], [4, rank]], device=device())
    try:
        model(indices).square().sum().backward()
    except TypeError as error:
        return str(error)
    return "no error"


class _Constant(torch.autograd.Function):
    """An input plus a parameter that it gives no gradient, as some of Transformer Engine's functions do with a bias."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """Their sum."""
        del ctx
        return x + offset

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """The gradient of the input alone."""
        del ctx
        return grad, None


class _WithConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, ROWS)
        self.offset = nn.Parameter(torch.randn(ROWS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", _Constant.apply(self.linear(x), self.offset))


def functions_without_gradients(rank: int, world_size: int) -> list[str]:
    """Replicated parameters with a gradient, after two steps in which a function returned None for one of them."""
    torch.manual_seed(4)
    model = _WithConstant().to(device())
    etp.shard_module(model, dist.group.WORLD)
    for _ in range(2):
        model(_inputs(rank)).square().sum().backward()
    return [name for name, param in model.named_parameters() if param.grad is not None]


def unfit_optimizers(rank: int, world_size: int) -> dict[str, str]:
    """Optimizers that would not train the shards, or would damage them; then one that trains them."""
    model = _layer()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    early.step()
    etp.shard_module(model, dist.group.WORLD)
    before = etp.full_state_dict(model)
    model(_inputs(rank)).square().sum().backward()
    lbfgs = torch.optim.LBFGS(model.parameters())
    whole = {
        "Adafactor": torch.optim.Adafactor(model.parameters()),
        "Muon": torch.optim.Muon(model.parameters()),
        "LAMB": type("LAMB", (torch.optim.SGD,), {})(model.parameters()),
    }
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    answers = _answers(
        {name: optimizer.step for name, optimizer in whole.items()}
        | {"early": early.step, "lbfgs": lambda: lbfgs.step(lambda: 0.0), "zero": zero.step},
        (TypeError, etp.EtpStateError),
    )
    assert torch.equal(etp.full_state_dict(model)["0.weight"], before["0.weight"])
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(etp.full_state_dict(model)["0.weight"], before["0.weight"])
    return answers


def distributed_already(rank: int, world_size: int) -> dict[str, str]:
    """Modules whose weights or gradients PyTorch distributes itself."""
    mesh = init_device_mesh(device().type, (world_size,))
    modules: dict[str, Callable[[], nn.Module]] = {
        "ddp": lambda: nn.Sequential(DistributedDataParallel(_layer())),
        "fsdp": lambda: nn.Sequential(fully_shard(_layer())),
        "dtensor": lambda: parallelize_module(_layer(), mesh, {"0": ColwiseParallel()}),
    }
    attempts = {name: lambda made=made: etp.shard_module(made(), dist.group.WORLD) for name, made in modules.items()}
    return _answers(attempts, (ValueError,))
