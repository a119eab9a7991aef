"""Bodies: a sharded model and its optimizer through ``torch.distributed.checkpoint``."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import etp
from tests.multiproc.bodies_modules import Mixture
from tests.support.launch import device

VOCABULARY, WIDTH, ROWS = 37, 8, 5


class Small(nn.Module):
    """An embedding that is also the output layer, a layer of so few rows that shards are padding, a norm, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.narrow = nn.Linear(WIDTH, ROWS)
        self.wide = nn.Linear(ROWS, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores."""
        if self.training:
            self.steps += 1  # type: ignore[operator]
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.wide(torch.tanh(self.narrow(x)))))  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(_groups(m), lr=0.01),
    "adamw, rate in a tensor": lambda m: torch.optim.AdamW(_groups(m), lr=torch.tensor(0.01)),
    "momentum": lambda m: torch.optim.SGD(_groups(m), lr=0.01, momentum=0.9),
    "muon": lambda m: etp.Muon([p for p in m.parameters() if p.dim() > 1], lr=0.01),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
}


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    params = list(module.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]


def _made(
    seed: int, optimizer: str, *, shard: bool = True, replicated: Sequence[str] = ()
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Small().to(device())
    if shard:
        whole = [model.get_submodule(name) for name in replicated]
        etp.shard_module(model, dist.group.WORLD, replicated_modules=whole)
    return model, OPTIMIZERS[optimizer](model)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[str]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(0, VOCABULARY, (3, 6), generator=generator).to(device())
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def _bytes_of(state: Any) -> dict[str, bytes]:
    """What a nested state holds, by path; tensors by their bytes."""
    if isinstance(state, torch.Tensor):
        return {"": state.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()}
    if isinstance(state, dict):
        return {f".{key}{path}": value for key, item in state.items() for path, value in _bytes_of(item).items()}
    if isinstance(state, list):
        return {f".{key}{path}": value for key, item in enumerate(state) for path, value in _bytes_of(item).items()}
    return {"": repr(state).encode()}


def whole_from(folder: str, optimizer: str) -> dict[str, bytes]:
    """What a checkpoint holds for the unsharded model, read with PyTorch's own functions."""
    model, made = _made(99, optimizer, shard=False)
    model_state, optimizer_state = get_state_dict(model, made)
    state = {"app": {"model": model_state, "optimizer": optimizer_state}}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, made, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return _bytes_of({"model": model.state_dict(), "optimizer": made.state_dict()["state"]})


def train_save_and_go_on(
    rank: int, world_size: int, folder: str, optimizer: str, replicated: Sequence[str] = ()
) -> tuple[list[str], dict[str, bytes]]:
    """Losses of the steps after a checkpoint, and the full weights that it should hold."""
    model, made = _made(0, optimizer, replicated=replicated)
    _train(model, made, range(3))
    dcp.save({"app": etp.ShardedCheckpoint(model, made)}, checkpoint_id=folder)
    full = _bytes_of({"model": etp.full_state_dict(model)})
    return _train(model, made, range(3, 6)), full


def save_while_training_goes_on(rank: int, world_size: int, folder: str) -> dict[str, bytes]:
    """Full weights at the time of an ``async_save``, whose copies training must not change."""
    model, made = _made(0, "adamw")
    _train(model, made, range(3))
    full = _bytes_of({"model": etp.full_state_dict(model)})
    saving = dcp.async_save({"app": etp.ShardedCheckpoint(model, made)}, checkpoint_id=folder)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    cast("Any", saving).result()
    return full


def load_and_go_on(
    rank: int, world_size: int, folder: str, optimizer: str, again: str, replicated: Sequence[str] = ()
) -> tuple[list[str], dict[str, bytes], dict[str, bytes]]:
    """Losses after loading into a model of other values, the full weights that were loaded, and saved once more."""
    model, made = _made(1, optimizer, replicated=replicated)
    if rank == 0:
        # What a rank has computed before the load must not matter.
        torch.manual_seed(5)
    dcp.load({"app": etp.ShardedCheckpoint(model, made)}, checkpoint_id=folder)
    full = _bytes_of({"model": etp.full_state_dict(model)})
    dcp.save({"app": etp.ShardedCheckpoint(model, made)}, checkpoint_id=again)
    return _train(model, made, range(3, 6)), full, whole_from(again, optimizer)


def save_whole(rank: int, world_size: int, folder: str, optimizer: str) -> dict[str, bytes]:
    """An unsharded model's checkpoint, by PyTorch's own functions. Returns what it holds."""
    model, made = _made(3, optimizer, shard=False)
    _train(model, made, range(2))
    model_state, optimizer_state = get_state_dict(model, made)
    dcp.save({"app": {"model": model_state, "optimizer": optimizer_state}}, checkpoint_id=folder)
    return _bytes_of({"model": model.state_dict(), "optimizer": made.state_dict()["state"]})


def fresh_optimizer_is_left_alone(rank: int, world_size: int, folder: str) -> bool:
    """Saving before the first step changes nothing: training goes on as without it."""
    losses = []
    for saves in (False, True):
        model, made = _made(0, "adamw")
        tokens = torch.arange(6, device=device()).view(1, 6)
        model(tokens).square().mean().backward()
        before = _bytes_of(etp.full_state_dict(model))
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if saves:
            told: list[object] = []
            hooks = [
                register_optimizer_step_pre_hook(lambda *_, told=told: told.append(_)),
                register_optimizer_step_post_hook(lambda *_, told=told: told.append(_)),
            ]
            dcp.save({"app": etp.ShardedCheckpoint(model, made)}, checkpoint_id=folder)
            for hook in hooks:
                hook.remove()
            assert not told
            assert _bytes_of(etp.full_state_dict(model)) == before
            for gradient, param in zip(gradients, model.parameters(), strict=True):
                assert param.grad is not None
                assert torch.equal(gradient, param.grad)
        made.step()
        losses.append(_train(model, made, range(3)))
    return losses[0] == losses[1]


LAZY: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda m: torch.optim.Adam(_groups(m), lr=0.01),
    "momentum": OPTIMIZERS["momentum"],
    "rmsprop": lambda m: torch.optim.RMSprop(_groups(m), lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda m: torch.optim.NAdam(_groups(m), lr=0.01),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "asgd": lambda m: torch.optim.ASGD(_groups(m), lr=0.01),
    "adadelta": lambda m: torch.optim.Adadelta(_groups(m), lr=0.5),
    "adagrad": lambda m: torch.optim.Adagrad(_groups(m), lr=0.01, initial_accumulator_value=0.3),
}


def losses_around_a_checkpoint_of_no_step(rank: int, world_size: int, folder: str) -> dict[str, list[list[str]]]:
    """Losses by optimizer: without a checkpoint; saved before training; loaded; loaded after training has begun."""
    losses: dict[str, list[list[str]]] = {}
    for name, make in LAZY.items():
        losses[name] = found = []
        for attempt in ("none", "save", "load", "load later"):
            model, _ = _made(int(attempt.startswith("load")), "sgd")
            made = make(model)
            steps: list[object] = []
            made.register_step_post_hook(lambda *_, steps=steps: steps.append(_))
            if attempt == "load later":
                _train(model, made, range(7, 9))
                steps.clear()
            if attempt == "save":
                dcp.save({"app": etp.ShardedCheckpoint(model, made)}, checkpoint_id=f"{folder}/{name}")
            elif attempt != "none":
                dcp.load({"app": etp.ShardedCheckpoint(model, made)}, checkpoint_id=f"{folder}/{name}")
            assert not steps
            found.append(_train(model, made, range(4)))
    return losses


def parameters_without_state(rank: int, world_size: int, folder: str) -> list[list[str]]:
    """Losses where a layer has no state yet: going on, loaded, and from a full checkpoint into such an optimizer."""
    losses = []
    for frozen in (True, False):
        model, made = _made(0, "adamw")
        model.narrow.requires_grad_(not frozen)
        _train(model, made, range(2))
        model.narrow.requires_grad_(True)
        dcp.save({"app": etp.ShardedCheckpoint(model, made)}, checkpoint_id=f"{folder}/{frozen}")
        losses.append(_train(model, made, range(2, 5)))
        model, made = _made(1, "adamw")
        model.narrow.requires_grad_(frozen)
        _train(model, made, range(1))
        model.narrow.requires_grad_(True)
        dcp.load({"app": etp.ShardedCheckpoint(model, made)}, checkpoint_id=f"{folder}/{frozen}")
        losses.append(_train(model, made, range(2, 5)))
    return losses


def refusals(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """What is answered to what would lose shards."""
    model, made = _made(0, "adamw")
    _train(model, made, range(1))
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    factored = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        factored.state[param]["row_var"] = torch.ones(param.shape[0])
    groups = torch.optim.AdamW(model.parameters())
    amsgrad = torch.optim.AdamW(_groups(model), amsgrad=True)
    dcp.save({"app": etp.ShardedCheckpoint(model, amsgrad)}, checkpoint_id=f"{folder}-2")
    hooked, _ = _made(0, "sgd")
    hooked.register_state_dict_post_hook(lambda _, state, *__: state.update({k: v.detach() for k, v in state.items()}))
    saved = {"app": etp.ShardedCheckpoint(model, made)}
    dcp.save(saved, checkpoint_id=folder)
    shard = saved["app"].state_dict()["model"]["embedding.weight"]
    attempts: dict[str, Callable[[], Any]] = {
        "plain save": lambda: dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}-1"),
        "parameters": lambda: dcp.save({"model": dict(model.named_parameters())}, checkpoint_id=f"{folder}-4"),
        "hook": lambda: etp.ShardedCheckpoint(hooked).state_dict(),
        "plain load": lambda: dcp.load({"app": {"model": model.state_dict()}}, checkpoint_id=folder),
        "stranger": lambda: etp.ShardedCheckpoint(model, stranger),
        "factored": lambda: etp.ShardedCheckpoint(model, factored).state_dict(),
        "groups": lambda: dcp.load({"app": etp.ShardedCheckpoint(model, groups)}, checkpoint_id=folder),
        "options": lambda: dcp.load({"app": etp.ShardedCheckpoint(model, made)}, checkpoint_id=f"{folder}-2"),
        "lbfgs": lambda: etp.ShardedCheckpoint(model, torch.optim.LBFGS(model.parameters())),
        "arithmetic": lambda: shard + 1,
    }
    if device().type == "cpu":
        attempts["plain asynchronous save"] = lambda: cast(
            "Any", dcp.async_save({"model": model.state_dict()}, checkpoint_id=f"{folder}-3")
        ).result()
    answers = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            answers[name] = "no error"
        except (etp.EtpStateError, TypeError, ValueError, CheckpointException) as error:
            answers[name] = re.sub(r"\s+", " ", f"{error} {error.__cause__}")
    return answers


def states_are_saved_as_plain_tensors(rank: int, world_size: int) -> bool:
    """``torch.save`` and ``copy.deepcopy`` of a state dict keep no shard alive, and both load again."""
    model, _ = _made(0, "sgd")
    before = _bytes_of(etp.full_state_dict(model))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    copied = copy.deepcopy(model.state_dict())
    for state in (read, copied):
        assert state is copied or all(type(value) is torch.Tensor for value in state.values())
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(float("nan"))
        model.load_state_dict(state)
        assert _bytes_of(etp.full_state_dict(model)) == before
    return True


def run_the_documentation(rank: int, world_size: int, example: str) -> bool:
    """Runs the documentation's lines; what they save, they load."""
    model, optimizer = _made(0, "adamw")
    _train(model, optimizer, range(2))
    before = _bytes_of(etp.full_state_dict(model))
    save, load = example.split("dcp.load")
    names = {"etp": etp, "model": model, "optimizer": optimizer}
    exec(save, names)  # noqa: S102 - the documentation's own lines
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    exec(f"dcp.load{load}", names)  # noqa: S102
    return _bytes_of(etp.full_state_dict(model)) == before


def _save_later(state: dict[str, Any], folder: str) -> None:
    cast("Any", dcp.async_save(state, checkpoint_id=folder)).result()


def experts_of_pairs(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """Answers to saving where two pairs of ranks have experts of their own, in weights or biases, or replicas."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    answers = {}

    def attempt(name: str, save: Callable[[], Any]) -> None:
        try:
            save()
            answers[name] = "saved"
        except CheckpointException as error:
            answers[name] = re.sub(r"\s+", " ", str(error))

    for case, changed in (("weights", "weight1"), ("biases", "bias0"), ("replicas", "")):
        torch.manual_seed(4)
        model = Mixture(mine).to(device())
        if changed:
            with torch.no_grad():
                model.experts.get_parameter(changed).add_(rank // 2)
        etp.shard_module(model, dist.group.WORLD, expert_group=mine)
        state = {"app": etp.ShardedCheckpoint(model)}
        attempt(case, partial(dcp.save, state, checkpoint_id=f"{folder}/{case}"))
        if case == "replicas":
            before = _bytes_of(etp.full_state_dict(model))
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(rank)
            # What ranks hold before they load need not agree.
            dcp.load(state, checkpoint_id=f"{folder}/{case}")
            assert _bytes_of(etp.full_state_dict(model)) == before
        if case == "weights" and device().type == "cpu":
            attempt("later", partial(_save_later, state, f"{folder}/later"))
    return answers


class OwnNames(Mixture):
    """A mixture whose experts have names of their own on each pair of ranks."""

    def __init__(self, expert_group: dist.ProcessGroup, number: int) -> None:
        super().__init__(expert_group)
        self.own_name = f"experts{number}"
        self.add_module(self.own_name, self.experts)
        del self.experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        experts = self.get_submodule(self.own_name)
        return self.last(torch.tanh(experts(torch.tanh(self.first(x)), [x.shape[0] - 2, 2])))  # type: ignore[no-any-return]


def experts_of_own_names(rank: int, world_size: int, folder: str) -> tuple[list[str], list[str]]:
    """Losses after a checkpoint of experts that only a pair of ranks has: going on, and loaded into another model."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(rank)).to(device())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
        losses = []
        for _ in range(2):
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
        return losses

    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = OwnNames(mine, rank // 2).to(device())
        etp.shard_module(model, dist.group.WORLD, expert_group=mine)
        optimizer = torch.optim.AdamW(_groups(model), lr=0.01 + seed)
        state = {"app": etp.ShardedCheckpoint(model, optimizer)}
        if seed == 0:
            train(model, optimizer)
            dcp.save(state, checkpoint_id=folder)
        else:
            dcp.load(state, checkpoint_id=folder)
        found.append(train(model, optimizer))
    return found[0], found[1]


def one_of_unequal_replicas(rank: int, world_size: int, folder: str) -> tuple[str, dict[str, bytes], dict[str, bytes]]:
    """Two pairs of ranks hold shards of other values. Returns what all are told, and what one pair saves and has."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    torch.manual_seed(rank // 2)
    model: nn.Module = Small().to(device())
    etp.shard_module(model, mine)
    told = ""
    try:
        dcp.save({"app": etp.ShardedCheckpoint(model)}, checkpoint_id=f"{folder}/all")
    except CheckpointException as error:
        told = str(error)
    saved = {"app": etp.ShardedCheckpoint(model, process_group=mine)}
    dcp.save(saved, checkpoint_id=f"{folder}/{rank // 2}", process_group=mine)
    own = _bytes_of({"model": etp.full_state_dict(model)})
    whole: nn.Module = Small()
    state = {"app": {"model": whole.state_dict()}}
    dcp.load(state, checkpoint_id=f"{folder}/{rank // 2}", process_group=mine)
    return told, own, _bytes_of(state["app"])


def replicas_save_one(rank: int, world_size: int, folder: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Two groups of two ranks hold the same shards. Returns the full weights and what the checkpoint holds."""
    groups = [dist.new_group([first, first + 1]) for first in (0, 2)]
    torch.manual_seed(0)
    model: nn.Module = Small().to(device())
    etp.shard_module(model, groups[rank // 2])
    optimizer = OPTIMIZERS["adamw"](model)
    tokens = torch.arange(6, device=device()).view(1, 6) + rank % 2
    model(tokens).square().mean().backward()
    optimizer.step()
    dcp.save({"app": etp.ShardedCheckpoint(model, optimizer)}, checkpoint_id=folder)
    return _bytes_of({"model": etp.full_state_dict(model)}), whole_from(folder, "adamw")
