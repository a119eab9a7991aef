"""Bodies: full states out of and into sharded models, across world sizes, and states that do not fit."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import etp
from tests.multiproc.models import Tiny, batch
from tests.support.launch import device


def state_out(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """A sharded model's full state, on the CPU."""
    torch.manual_seed(21)
    model = Tiny(tied=True).to(device())
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    etp.shard_module(model, dist.group.WORLD)
    full = etp.full_state_dict(model)
    assert list(full) == list(expected)
    for name, value in full.items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, expected[name]), name
    assert full["head.weight"] is full["embedding.weight"]
    pointers = {param.data_ptr() for param in model.parameters()}
    assert not pointers & {value.data_ptr() for value in full.values()}
    return {name: value.cpu() for name, value in full.items()}


def state_in(rank: int, world_size: int, state: dict[str, torch.Tensor]) -> None:
    """Load it over another number of ranks; then into the plain module; then in another dtype."""
    torch.manual_seed(22)
    plain = Tiny(tied=True).to(device())
    torch.manual_seed(22)
    model = Tiny(tied=True).to(device())
    etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(reuse_across_forwards=True, resident_bytes=1 << 20))
    tokens, _ = batch(0, 0, device())
    model(tokens)  # slots hold the old weights
    etp.load_full_state_dict(model, state)
    plain.load_state_dict(etp.full_state_dict(model))
    for name, value in plain.state_dict().items():
        assert torch.equal(value.cpu(), state[name]), name
    assert torch.equal(model(tokens), plain(tokens))
    for param in model.parameters():
        if isinstance(param, etp.ETPShardedParam):
            padding = param.local_shard()[param.layout.logical_rows(rank) :]
            assert padding.count_nonzero() == 0
    etp.load_full_state_dict(model, {name: value.double() for name, value in state.items()})
    assert torch.equal(model(tokens), plain(tokens))


def bad_states(rank: int, world_size: int) -> dict[str, str]:
    """Each is refused on every rank, and no parameter changes."""
    torch.manual_seed(21)
    model = Tiny().to(device())
    etp.shard_module(model, dist.group.WORLD)
    good = etp.full_state_dict(model)

    def changed(**values: Any) -> dict[str, Any]:
        state = {name: value + 1.0 for name, value in good.items()}
        for name, value in values.items():
            state[name.replace("__", ".")] = value
        return state

    bump = 1.0 if rank == 1 else 0.0
    states: dict[str, dict[str, Any]] = {
        "unexpected": changed(stranger=torch.ones(1)),
        "missing": {name: value for name, value in changed().items() if name != "norm.bias"},
        "shape": changed(blocks__0__up__weight=torch.ones(32, 12)),
        "no tensor": changed(head__weight="weights"),
        "sharded differs": changed(head__weight=good["head.weight"] + bump),
        "replicated differs": changed(norm__bias=good["norm.bias"] + bump),
        "dtype differs": changed(norm__bias=good["norm.bias"].to(torch.bfloat16 if rank else torch.float32)),
    }
    messages = {}
    for name, state in states.items():
        try:
            etp.load_full_state_dict(model, state)
        except (ValueError, etp.PeerMismatchError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
        for key, value in etp.full_state_dict(model).items():
            assert torch.equal(value, good[key]), f"{name}: {key} changed"
    return messages


def hidden_shards(rank: int, world_size: int) -> list[str]:
    """A hook that casts the state dict, which would pass this rank's rows off as the whole weight."""
    torch.manual_seed(21)
    model = Tiny().to(device())
    etp.shard_module(model, dist.group.WORLD)
    good = etp.full_state_dict(model)
    model.register_state_dict_post_hook(
        lambda _, state, *__: state.update({name: value.bfloat16() for name, value in state.items()})
    )
    messages = []
    for attempt in (lambda: etp.full_state_dict(model), lambda: etp.load_full_state_dict(model, good)):
        try:
            attempt()
        except ValueError as error:
            messages.append(str(error))
    return messages


def _saved(state: Mapping[str, torch.Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def _read(data: bytes) -> dict[str, torch.Tensor]:
    return torch.load(io.BytesIO(data), weights_only=True)


def _copies_of(model: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Copies of a state as people make them, none of which has the state dict's ``_metadata``."""
    state = model.state_dict()
    average = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        average[name] = 0.9 * average[name]
        average[name].add_(param.detach(), alpha=0.1)
    return {
        "clones": {name: value.clone() for name, value in state.items()},
        "cpu": {name: value.cpu() for name, value in state.items()},
        "bf16": {name: value.to(torch.bfloat16) for name, value in state.items()},
        "data": {name: param.data for name, param in model.named_parameters()},
        "data, cloned": {name: param.data.clone() for name, param in model.named_parameters()},
        "parameters, cast": {name: param.detach().double() for name, param in model.named_parameters()},
        "average": average,
    }


def _of_this_rank(param: torch.nn.Parameter) -> torch.Tensor:
    return param.local_shard() if isinstance(param, etp.ETPShardedParam) else param.detach()


def copied_states(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """One rank's copies, loaded on all; distributed checkpoints of copies; and what loads, bitwise."""
    torch.manual_seed(21)
    model = Tiny().to(device())
    etp.shard_module(model, dist.group.WORLD)
    before = etp.full_state_dict(model)
    answers: dict[str, str] = {}

    def attempt(name: str, run: Callable[[], Any]) -> None:
        try:
            run()
            answers[name] = "no error"
        except (ValueError, CheckpointException) as error:
            answers[name] = re.sub(r"\s+", " ", f"{error} {error.__cause__ or ''}")

    for name, state in _copies_of(model).items():
        attempt(f"dcp: {name}", partial(dcp.save, state, checkpoint_id=f"{folder}/{name}"))
        files = [_saved(state)]
        dist.broadcast_object_list(files, src=0)
        attempt(f"torch: {name}", partial(model.load_state_dict, _read(files[0])))
        # Each rank's own loads.
        model.load_state_dict(state)
        model.load_state_dict(_read(_saved(state)))
    clones = _copies_of(model)["clones"]
    etp.load_full_state_dict(model, before)
    files = [safetensors.torch.save({name: _of_this_rank(param) for name, param in model.named_parameters()})]
    own = safetensors.torch.load(files[0])
    dist.broadcast_object_list(files, src=0)
    attempt("safetensors", lambda: model.load_state_dict(safetensors.torch.load(files[0])))
    attempt("safetensors, own", lambda: model.load_state_dict(own))
    others = [_saved(clones)]
    dist.broadcast_object_list(others, src=0)
    attempt("marked, of rank 0", lambda: etp.mark_own_shards(model, _read(others[0])))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(etp.mark_own_shards(model, own))
    for name, value in etp.full_state_dict(model).items():
        assert torch.equal(value, before[name]), name
    return answers


def what_a_state_dict_says(rank: int, world_size: int) -> list[str]:
    """Warnings of several state dicts, of etp's own whole one, and of a load."""
    model = Tiny().to(device())
    etp.shard_module(model, dist.group.WORLD)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(2):
            model.load_state_dict(model.state_dict())
            etp.full_state_dict(model)
    return [str(one.message) for one in seen]


def optimizer_states(rank: int, world_size: int) -> dict[str, str]:
    """The first rank's state of an optimizer, loaded on all, before the first step and later; and each rank's own."""
    torch.manual_seed(23)
    model = Tiny().to(device())
    etp.shard_module(model, dist.group.WORLD)

    def new() -> torch.optim.Optimizer:
        weights, biases = ([p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False))
        return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=1e-2)

    def backward(step: int) -> None:
        tokens, targets = batch(step, rank, device())
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, -2), targets.flatten()).backward()
        etp.wait_async_comms(model)

    def weights() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in etp.full_state_dict(model).items()}

    trained = new()
    backward(0)
    trained.step()
    saved = _saved(trained.state_dict())
    files = [saved]
    dist.broadcast_object_list(files, src=0)
    before = weights()
    backward(1)
    trained.step()
    after = weights()
    answers: dict[str, str] = {}
    for name, optimizer in (("new", new()), ("used", trained)):
        etp.load_full_state_dict(model, before)
        backward(1)
        optimizer.load_state_dict(_read(files[0]))
        if rank:
            for _ in range(2):
                try:
                    optimizer.step()
                except etp.EtpStateError as error:
                    answers[name] = str(error)
        assert all(torch.equal(value, before[key]) for key, value in weights().items())
        optimizer.load_state_dict(_read(saved))
        optimizer.step()
        assert all(torch.equal(value, after[key]) for key, value in weights().items())
    checkpoint = etp.ShardedCheckpoint(model, trained).state_dict()
    assert all(set(group) == set(trained.defaults) | {"params"} for group in checkpoint["optimizer"]["param_groups"])
    return answers
