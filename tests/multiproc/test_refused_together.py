"""What one rank refuses reaches the others with its reason, before they wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import etp
from tests.support.launch import device, run_distributed

pytestmark = [pytest.mark.multiproc, pytest.mark.plain_layers]


def _hooked(model: nn.Sequential) -> nn.Module:
    model[0].weight.register_hook(lambda grad: grad)
    return model


def _with_gradient(model: nn.Sequential) -> nn.Module:
    model(torch.ones(1, 8, device=device())).sum().backward()
    return model


def _meta(model: nn.Sequential) -> nn.Module:
    return model.to("meta")


def _kept(model: nn.Sequential) -> nn.Module:
    model.kept = [model[0].weight]
    return model


class _Unreadable(nn.Linear):
    """A layer whose parameters are found in a way of its own, which fails."""

    def named_parameters(self, *args: object, **kwargs: object) -> Iterator[tuple[str, nn.Parameter]]:
        del args, kwargs
        raise OSError("cannot read 0.weight")


def _unreadable(model: nn.Sequential) -> nn.Module:
    model[0].__class__ = _Unreadable
    return model


def _wrapped(model: nn.Sequential) -> nn.Module:
    alone = [dist.new_group([peer], use_local_synchronization=True) for peer in (dist.get_rank(),)]
    return nn.Sequential(nn.parallel.DistributedDataParallel(model, process_group=alone[0]))


CASES: dict[str, tuple[Callable[[nn.Sequential], nn.Module], str, str]] = {
    "hooked": (_hooked, "ValueError", "0.weight has gradient hooks, which its shard would not have"),
    "gradient": (_with_gradient, "ValueError", "0.weight has a gradient already"),
    "meta": (_meta, "ValueError", "0.weight is on the meta device"),
    "kept": (_kept, "ValueError", "the module keeps 0.weight in its attribute kept"),
    "unreadable": (_unreadable, "OSError", "cannot read 0.weight"),
    "wrapped": (_wrapped, "ValueError", "0 is a DistributedDataParallel"),
}


def refused_by_one(rank: int, world_size: int, case: str, refusing: int) -> tuple[str, str]:
    """The error of each rank where one refuses; then all of them shard."""
    torch.manual_seed(2)

    def fresh() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device())

    spoilt = CASES[case][0](fresh()) if rank == refusing else fresh()
    try:
        etp.shard_module(spoilt, dist.group.WORLD)
    except (OSError, ValueError, etp.EtpError) as error:
        answer = type(error).__name__, str(error)
    if case == "unreadable" and rank == refusing:
        spoilt[0].__class__ = nn.Linear
    assert not any(isinstance(param, etp.ETPShardedParam) for param in spoilt.parameters())
    torch.manual_seed(2)
    model = fresh()
    etp.shard_module(model, dist.group.WORLD)
    model(torch.ones(1, 8, device=device())).sum().backward()
    return answer


@pytest.mark.parametrize("refusing", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_a_refusal_of_one_rank_is_told_on_all(case: str, refusing: int) -> None:
    _, kind, message = CASES[case]
    for rank, (found, text) in enumerate(run_distributed(refused_by_one, 2, args=(case, refusing))):
        if rank == refusing:
            assert found == kind
            assert text.startswith(message)
        else:
            assert found == "PeerMismatchError"
            assert text.startswith(f"shard_module: rank {refusing} refuses: {kind}: {message}")


def refused_across_groups(rank: int, world_size: int) -> tuple[str, str]:
    """Dense weights are shared by ranks 0 and 1, and by 2 and 3; experts by 0 and 2, and by 1 and 3. Rank 3 refuses."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    dense, experts = (group for ranks, group in made.items() if rank in ranks)
    torch.manual_seed(2)
    model = nn.ModuleDict({"dense": nn.Linear(8, 8), "experts": etp.GroupedLinear(2, 8, 8, etp_group=experts)})
    model.to(device())
    if rank == 3:
        model["dense"].weight.register_hook(lambda grad: grad)
    try:
        etp.shard_module(model, dense, experts)
    except (ValueError, etp.EtpError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_refusal_crosses_from_one_group_to_another() -> None:
    *answers, own = run_distributed(refused_across_groups, 4)
    assert own[0] == "ValueError"
    for kind, message in answers:
        assert kind == "PeerMismatchError"
        assert message.startswith("shard_module: rank 3 refuses: ValueError: dense.weight has gradient hooks")


class Unreadable(dict[str, torch.Tensor]):
    """A state that reads its entries when they are asked for, from a file that is gone."""

    def __getitem__(self, name: str) -> torch.Tensor:
        raise OSError(f"cannot read {name}")


def loaded_by_all_but_one(rank: int, world_size: int, refusing: int, readable: bool) -> tuple[str, str]:
    """The error of each rank where one's state lacks an entry, or cannot be read; then all of them load."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).to(device())
    etp.shard_module(model, dist.group.WORLD)
    state = {name: value + 1 for name, value in etp.full_state_dict(model).items()}
    incomplete = {name: value for name, value in state.items() if name != "1.bias"} if readable else Unreadable(state)
    try:
        etp.load_full_state_dict(model, incomplete if rank == refusing else state)
    except (OSError, ValueError, etp.EtpError) as error:
        answer = type(error).__name__, str(error)
    etp.load_full_state_dict(model, state)
    assert all(torch.equal(value, state[name]) for name, value in etp.full_state_dict(model).items())
    return answer


@pytest.mark.parametrize("refusing", [0, 1])
@pytest.mark.parametrize(
    ("readable", "reason"),
    [(True, "ValueError: the state does not fit the module: missing 1.bias"), (False, "OSError: cannot read 0.weight")],
)
def test_a_state_that_does_not_fit_on_one_rank_is_told_on_all(readable: bool, reason: str, refusing: int) -> None:
    for rank, (found, text) in enumerate(run_distributed(loaded_by_all_but_one, 2, args=(refusing, readable))):
        if rank == refusing:
            assert f"{found}: {text}" == reason
        else:
            assert found == "PeerMismatchError"
            assert text.startswith(f"load_full_state_dict: rank {refusing} refuses: {reason}")
