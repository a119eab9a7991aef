"""What users do with a model besides training it: the right result, or a refusal with the way out; docs/numerics.md."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

import etp
from tests.support.launch import device, run_distributed

pytestmark = [pytest.mark.multiproc]

SIDE = 8
WRITTEN = "would write this rank's rows as the whole weight"


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def made(*, shard: bool = True, timeout_s: float | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.ReLU(), nn.Linear(SIDE, SIDE)).to(device())
    if shard:
        etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(pad_for_alignment=1, timeout_s=timeout_s))
    return model


def parametrized(model: nn.Sequential, x: torch.Tensor) -> object:
    parametrize.register_parametrization(model[0], "weight", Doubled())
    return model(x)


def differentiated(model: nn.Sequential, x: torch.Tensor) -> object:
    def loss(weights: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(model, weights, (x,)).sum()
        return result

    return torch.func.grad(loss)(dict(model.named_parameters()))


def halved(model: nn.Sequential) -> dict[str, torch.Tensor]:
    return {name: value.bfloat16() for name, value in model.named_parameters()}


def data_of(model: nn.Sequential) -> dict[str, torch.Tensor]:
    return {name: param.data for name, param in model.named_parameters()}


def copied(model: nn.Sequential) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def merged(model: nn.Sequential, _: torch.Tensor) -> object:
    """As PEFT merges an adapter into the layer that it is for."""
    return model[0].weight.data.add_(model[2].weight @ model[0].weight)


def adapted(model: nn.Sequential, x: torch.Tensor) -> object:
    """As PEFT adds adapters to a model: layers in it, and the original as a part of one that takes its place."""
    model[0] = nn.ModuleDict({"base_layer": model[0], "lora_A": nn.Linear(SIDE, 2).to(device())})
    model[0].forward = model[0]["base_layer"].forward  # type: ignore[index]
    return model(x)


USES: dict[str, tuple[Callable[[nn.Sequential, torch.Tensor], object], str]] = {
    "copy.deepcopy": (lambda model, _: copy.deepcopy(model), "cannot be deep-copied; copy the module before"),
    "AveragedModel": (lambda model, _: AveragedModel(model), "cannot be deep-copied; copy the module before"),
    "quantize_dynamic": (
        lambda model, _: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}),  # type: ignore[no-untyped-call]
        "cannot be deep-copied; copy the module before",
    ),
    "prune": (lambda model, _: prune.l1_unstructured(model[0], "weight", 0.5), "a shard is not its weight"),
    "random prune": (lambda model, _: prune.random_unstructured(model[0], "weight", 0.5), "a shard is not its weight"),
    "weight_norm": (lambda model, x: parametrizations.weight_norm(model[0])(x), "a shard is not its weight"),
    "spectral_norm": (lambda model, x: parametrizations.spectral_norm(model[0])(x), "a shard is not its weight"),
    "parametrize": (parametrized, "in its module, where it must stay"),
    "parameters_to_vector": (lambda model, _: parameters_to_vector(model.parameters()), "a shard is not its weight"),
    "torch.save": (lambda model, _: torch.save(model, os.devnull), "cannot be pickled; save module.state_dict()"),
    "safetensors.save_file": (lambda model, _: safetensors.torch.save_file(model.state_dict(), os.devnull), WRITTEN),
    "safetensors.save_file, copies": (lambda model, _: safetensors.torch.save_file(copied(model), os.devnull), WRITTEN),
    "safetensors.save_file, data": (lambda model, _: safetensors.torch.save_file(data_of(model), os.devnull), WRITTEN),
    "safetensors.save_file, cast": (lambda model, _: safetensors.torch.save_file(halved(model), os.devnull), WRITTEN),
    "safetensors.save_model": (lambda model, _: safetensors.torch.save_model(model, os.devnull), WRITTEN),
    "adapters after sharding": (adapted, "was added after etp.shard_module"),
    "merging of adapters": (merged, "a shard is not its weight"),
    "DoRA's norm": (lambda model, _: model[0].weight + torch.ones(SIDE, SIDE, device=device()), "replicated_modules"),
    "DoRA's norm, cast": (
        lambda model, _: model[0].weight * 2 + torch.ones(SIDE, SIDE).to(device()),
        "replicated_modules",
    ),
    "vmap": (lambda model, x: torch.vmap(model)(x), "a transform of torch.func"),
    "torch.func.grad": (differentiated, "a transform of torch.func"),
    "torch.jit.trace": (torch.jit.trace, "torch.jit.trace cannot record"),
    "torch.export": (lambda model, x: torch.export.export(model, (x,)), "in its module, where it must stay"),
}


def refused(rank: int, world_size: int, use: str) -> str:
    del world_size
    call, _ = USES[use]
    model = made()
    try:
        call(model, torch.randn(4, SIDE, generator=torch.Generator().manual_seed(rank)).to(device()))
    except (TypeError, etp.EtpError) as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("use", USES)
def test_what_would_be_wrong_is_refused_on_every_rank(use: str) -> None:
    told = run_distributed(refused, 2, args=(use,))
    assert all(USES[use][1] in message for message in told), told


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        del ctx, grad
        raise ArithmeticError


def gradients_after_a_failure(rank: int, world_size: int) -> None:
    """A backward pass that fails leaves nothing behind, without ``zero_grad`` too: its last layer had a gradient."""
    model, whole = made(), made(shard=False)
    xs = [
        torch.randn(4, SIDE, generator=torch.Generator().manual_seed(each)).to(device()) for each in range(world_size)
    ]
    with pytest.raises(ArithmeticError):
        model[2](model[1](Fails.apply(model[0](xs[rank])))).sum().backward()
    assert all(param.grad is None for param in model.parameters() if isinstance(param, etp.ETPShardedParam))
    model(xs[rank]).sum().backward()
    sum(whole(x).sum() for x in xs).backward()  # type: ignore[union-attr]
    for shard, weight in zip(model.parameters(), whole.parameters(), strict=True):
        if isinstance(shard, etp.ETPShardedParam):
            expected = (weight.grad / world_size).chunk(world_size)[rank]  # type: ignore[operator]
            torch.testing.assert_close(torch.Tensor(shard.grad), expected)


def test_a_failed_backward_pass_leaves_no_part_of_its_gradients() -> None:
    run_distributed(gradients_after_a_failure, 2)


def in_another_thread(rank: int, world_size: int) -> None:
    del rank, world_size
    model, found, x = made(), [], torch.ones(4, SIDE, device=device())

    def use() -> None:
        if x.is_cuda:
            torch.cuda.set_device(x.device)
        try:
            found.append(model(x))
        except etp.EtpStateError as error:
            found.append(error)

    def use_elsewhere(*_: object) -> None:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()

    use_elsewhere()
    assert torch.equal(found.pop(), model(x)), "one thread after the other"
    model[1].register_forward_hook(use_elsewhere)
    model(x)
    assert "used by two threads at a time" in str(found.pop())


def test_threads_take_turns() -> None:
    run_distributed(in_another_thread, 2)


def in_a_child(rank: int, world_size: int) -> None:
    del rank, world_size
    model = made()
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            model(torch.ones(4, SIDE))
        except etp.EtpStateError as error:
            os.write(sending, str(error).encode())
        os._exit(0)
    os.close(sending)
    assert "Run the model in the main process, not in a DataLoader's worker" in os.read(receiving, 4096).decode()
    os.waitpid(child, 0)


@pytest.mark.cpu_only("CUDA cannot be used in a forked process")
def test_a_child_process_does_not_wait_for_peers_that_never_come() -> None:
    run_distributed(in_a_child, 2)


def uneven_batches(rank: int, world_size: int) -> None:
    """Each rank evaluates one batch more than its peer in one of two loops."""
    del world_size
    model, whole = made(), made(shard=False)
    x = torch.randn(4, SIDE, generator=torch.Generator().manual_seed(rank)).to(device())
    model(x).sum().backward()
    model.eval()
    with torch.no_grad():
        for loop in range(2):
            for step in range(3 + (rank == loop)):
                assert torch.equal(model(x + step), whole(x + step)), step


def test_uneven_evaluations_that_end_even_are_right() -> None:
    run_distributed(uneven_batches, 2)


def a_batch_too_many(rank: int, world_size: int, last: int) -> str:
    """Rank 0 evaluates once more while rank 1 trains: each waits for the other, rank ``last`` a second later."""
    del world_size
    model, x = made(timeout_s=2.0), torch.ones(4, SIDE)
    model(x).sum().backward()
    with torch.no_grad():
        for _ in range(3):
            model.eval()(x)
    if rank == last:
        model[2].register_forward_hook(lambda *_: time.sleep(1.0))
    try:
        with torch.set_grad_enabled(rank == 1):
            result = model.train(rank == 1)(x)
        result.sum().backward()
    except etp.EtpCommunicationError as error:
        return str(error)
    return "no error"


@pytest.mark.cpu_only("with streams the host does not wait: a time-out ends the process")
@pytest.mark.parametrize("last", [0, 1])
def test_an_evaluation_of_more_batches_than_a_peer_has_ends_in_an_error_that_says_so(last: int) -> None:
    said = run_distributed(a_batch_too_many, 2, args=(last,), fresh=True)
    assert "it has no more batches (all ranks need equally many, also in an evaluation)" in said[1 - last]
    assert "has most likely ended or given up" in said[last], "the rank that waited longest closes the connections"
    for rank in (0, 1):
        assert f"failed on rank {rank}" in said[rank]


def evaluated_in_inference_mode(rank: int, world_size: int) -> bool:
    del world_size
    x = torch.randn(4, SIDE, generator=torch.Generator().manual_seed(rank)).to(device())
    with torch.inference_mode():
        model, whole = made(), made(shard=False)
        return all(torch.equal(model(x), whole(x)) for _ in range(2))


def test_a_model_that_is_built_and_sharded_in_inference_mode_evaluates() -> None:
    assert all(run_distributed(evaluated_in_inference_mode, 2))
