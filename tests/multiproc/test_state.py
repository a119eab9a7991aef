"""Full states go between sharded models of any size and plain ones; bad ones change nothing."""

from __future__ import annotations

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
