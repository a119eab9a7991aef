"""What vLLM's workers call: whatever comes, nothing is raised that would leave other workers' answers unread."""

from __future__ import annotations

import importlib.util
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from megatron_patches.refit.vllm import all_or_none
from megatron_patches.refit.vllm.engine import EtpWeightTransferEngine


def engine(workers: int) -> EtpWeightTransferEngine:
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=workers), model_config=None)
    return EtpWeightTransferEngine(cast(Any, None), cast(Any, config), torch.device("cpu"), nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"call": "fly"}, "call is 'fly'; it must be one of join, receive, commit, abandon"),
        ({"call": "receive", "version": 1}, "this engine has joined no session"),
        ({"call": "commit", "version": 1}, "asked to commit version 1, but this engine has joined no session"),
    ],
)
def test_a_call_that_cannot_be_carried_out_is_logged(
    call: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_or_none, "get_world_group", lambda: SimpleNamespace(world_size=1))
    under_test = engine(1)
    with caplog.at_level(logging.ERROR):
        under_test.init_transfer_engine(under_test.parse_init_info(call))
    assert f"refit: {call['call']} failed; version 0 serves on" in caplog.text
    assert message in caplog.text


@pytest.mark.parametrize("call", [{"call": "join", "novelty": 1}, {}])
def test_a_call_of_another_version_of_the_package_is_refused(
    call: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="Invalid init_info"):
        engine(1).parse_init_info(call)
    under_test = engine(2)
    with caplog.at_level(logging.ERROR):
        under_test.init_transfer_engine(under_test.parse_init_info(call))
    assert "Invalid init_info" in caplog.text


def test_what_needs_no_session_does_nothing() -> None:
    under_test = engine(1)
    under_test.init_transfer_engine(under_test.parse_init_info({"call": "abandon"}))
    under_test.shutdown()
    assert under_test.version == 0
