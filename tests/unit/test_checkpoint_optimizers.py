"""Settings of optimizers in a checkpoint whose run had another number of optimizers."""

from __future__ import annotations

from typing import Any
from unittest import mock

from tests.support.launch import run_distributed

# Importing Megatron warns, and patches torch: it runs in a worker process.


def part(optimizer: str | None, *, experts: bool = False, step: int | None = None) -> dict[str, Any]:
    """State of one optimizer of one group, without tensors."""
    group = {"optimizer": optimizer, "is_expert_parallel": experts, "lr": 0.1, "params": [0]}
    return {"state": {} if step is None else {"common_step": step}, "param_groups": [group]}


def loaded_steps(rank: int, world_size: int, saved: dict[int, Any]) -> list[int | None]:
    """The step of each optimizer of a run with Muon whose experts have optimizers of their own."""
    del rank, world_size
    from megatron.core.dist_checkpointing import serialization

    from megatron_patches.checkpoint.optimizer_groups import wrap_load_of_optimizers

    requested = {0: part(None), 1: part("adam"), 2: part(None, experts=True), 3: part("adam", experts=True)}
    with mock.patch.object(serialization, "load_common_state_dict", return_value={"optimizer": saved}):
        answer = wrap_load_of_optimizers(lambda state, _: dict(state))({"optimizer": requested}, "folder")["optimizer"]
    return [answer[number]["state"].get("common_step") for number in sorted(answer)]


def test_muon_gets_no_step_and_adam_its_own() -> None:
    """A step in Muon's state would be saved with it, as old as the load, and read by the next such load as Adam's."""
    for stale in (None, 3):
        saved = {0: part(None, step=stale), 1: part("adam", step=6)}
        (steps,) = run_distributed(loaded_steps, 1, backend=None, args=(saved,))
        assert steps[1::2] == [6, 6]
        assert steps[0::2] == [stale, stale]


def loaded_groups(rank: int, world_size: int, saved: dict[int, Any]) -> list[dict[str, Any]]:
    """The groups of both optimizers of a run whose experts have their own."""
    del rank, world_size
    from megatron.core.dist_checkpointing import serialization

    from megatron_patches.checkpoint.optimizer_groups import wrap_load_of_optimizers

    requested = {0: part(None), 1: part(None, experts=True)}

    def load(state: dict[str, Any], _: str) -> dict[str, Any]:
        """As Megatron's: what is saved under the requested key is merged into what is requested."""
        found = {}
        for key, parts in state.items():
            found[key] = {n: {**parts[n], **saved[n]} if key == "optimizer" else parts[n] for n in parts}
        return found

    with mock.patch.object(serialization, "load_common_state_dict", return_value={"optimizer": saved}):
        answer = wrap_load_of_optimizers(load)({"optimizer": requested}, "folder")["optimizer"]
    return [answer[number]["param_groups"][0] for number in sorted(answer)]


def test_experts_keep_the_step_of_transformer_engine_if_the_first_stage_has_none() -> None:
    """Its optimizers count in their groups, from one again where a group has no step."""
    for of_experts, expected in ((None, 6), (5, 5)):
        saved = {0: part(None), 1: part(None, experts=True)}
        saved[0]["param_groups"][0]["step"] = 6
        if of_experts is not None:
            saved[1]["param_groups"][0]["step"] = of_experts
        ((dense, experts),) = run_distributed(loaded_groups, 1, backend=None, args=(saved,))
        assert (dense["step"], experts["step"]) == (6, expected)
        assert (dense["is_expert_parallel"], experts["is_expert_parallel"]) == (False, True)


def loaded_states(rank: int, world_size: int) -> list[Any]:
    """The states of SGD's two optimizers, of which one has nothing to step, from a checkpoint of one."""
    del rank, world_size
    from megatron.core.dist_checkpointing import serialization

    from megatron_patches.checkpoint.optimizer_groups import wrap_load_of_optimizers

    saved = {"state": {}, "param_groups": [part(None)["param_groups"][0], part(None, experts=True)["param_groups"][0]]}
    requested = {0: {**part(None), "state": {0: {"momentum_buffer": "tensor"}}}, 1: part(None, experts=True)}

    def load(state: dict[str, Any], _: str) -> dict[str, Any]:
        """As Megatron's, which leaves out what is empty."""
        return {key: {0: {"state": parts[0]["state"]}} for key, parts in state.items()}

    with mock.patch.object(serialization, "load_common_state_dict", return_value={"optimizer": saved}):
        answer = wrap_load_of_optimizers(load)({"optimizer": requested}, "folder")["optimizer"]
    return [answer[number]["state"] for number in sorted(answer)]


def test_an_optimizer_with_nothing_to_step_has_a_state() -> None:
    """Without a step, as of SGD, nothing else would bring one, which Megatron's optimizers read."""
    assert run_distributed(loaded_states, 1, backend=None) == [[{0: {"momentum_buffer": "tensor"}}, {}]]


def requested_momentum(rank: int, world_size: int, momentum: float) -> list[str]:
    """The tensors that a load into SGD asks for."""
    del rank, world_size
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer.optimizer import FP32Optimizer

    from megatron_patches.checkpoint.optimizer_state import wrap_state_of_sgd

    weight = torch.nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
    optimizer = object.__new__(FP32Optimizer)  # whose constructor needs CUDA
    vars(optimizer).update(optimizer=sgd, config=None, init_state_fn=None, is_stub_optimizer=False)
    model = {"weight": ShardedTensor.from_rank_offsets("weight", weight)}
    state = wrap_state_of_sgd(FP32Optimizer.sharded_state_dict)(optimizer, model, True)
    return [tensor.key for entries in state["state"].values() for tensor in entries.values()]


def test_the_momentum_of_sgd_is_loaded() -> None:
    """Megatron calls None before it loads the state of SGD."""
    for momentum, keys in ((0.9, ["optimizer.state.momentum_buffer.weight"]), (0.0, [])):
        assert run_distributed(requested_momentum, 1, backend=None, args=(momentum,)) == [keys]
