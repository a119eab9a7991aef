"""Full states go between sharded models of any size and plain ones; bad ones change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiproc import bodies_state as bodies
from tests.support.launch import run_distributed

pytestmark = pytest.mark.multiproc


def test_full_states_go_between_world_sizes_and_plain_modules() -> None:
    states = run_distributed(bodies.state_out, 2)
    for world_size in (1, 2, 3):
        run_distributed(bodies.state_in, world_size, args=(states[1],))


def test_bad_states_change_nothing() -> None:
    expected = {
        "unexpected": "ValueError: the state does not fit the module: unexpected stranger",
        "missing": "ValueError: the state does not fit the module: missing norm.bias",
        "shape": "ValueError: the state does not fit the module: blocks.0.up.weight has shape (32, 12) instead of",
        "no tensor": "ValueError: the state does not fit the module: head.weight is a str instead of a tensor",
        "sharded differs": "PeerMismatchError: load_full_state_dict: ranks [0, 1] hold different values of head.weight",
        "replicated differs": "PeerMismatchError: load_full_state_dict: ranks [0, 1] hold different values of norm",
        "dtype differs": "PeerMismatchError: load_full_state_dict: rank 1 has norm.bias [12] torch.bfloat16",
    }
    for messages in run_distributed(bodies.bad_states, 2):
        assert set(messages) == set(expected)
        for name, start in expected.items():
            assert messages[name].startswith(start), messages[name]


def test_hooks_that_hide_shards_are_refused() -> None:
    for messages in run_distributed(bodies.hidden_shards, 2):
        assert len(messages) == 2
        assert all(message.startswith("embedding.weight: a hook of the module's state dict") for message in messages)


def test_a_copy_of_a_state_says_whose_shards_it_holds(tmp_path: Path) -> None:
    for rank, answers in enumerate(run_distributed(bodies.copied_states, 2, args=(str(tmp_path),))):
        another = "embedding.weight: the state holds shard 0 of 2 of a weight of 23 rows, and this rank needs shard 1"
        for name, answer in answers.items():
            if name.startswith("dcp"):
                assert "is this rank's shard, and torch.distributed.checkpoint would take" in answer, (name, answer)
            elif name.startswith("safetensors"):
                assert answer.startswith("embedding.weight: the state does not say which of the 2 ranks' shards"), name
                assert "load etp.mark_own_shards(module, state)" in answer
            else:
                assert answer.startswith(another if rank else "no error"), (name, answer)
        assert len(answers) == 7 * 2 + 3


def test_a_state_dict_says_once_what_it_holds() -> None:
    first, second = run_distributed(bodies.what_a_state_dict_says, 2)
    assert len(first) == 1
    assert first[0].startswith("state_dict() of a sharded module holds this rank's shards only: save it on every rank")
    assert not second  # one rank says it for all


def test_the_optimizer_state_of_another_rank_is_refused() -> None:
    first, second = run_distributed(bodies.optimizer_states, 2)
    assert first == {}
    assert second.keys() == {"new", "used"}
    start = "the state of AdamW that was loaded is of shard 0 of 2, and this rank has shard 1 of 2 of these weights: "
    assert all(answer.startswith(start) for answer in second.values())
