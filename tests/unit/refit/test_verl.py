"""Which of verl's servers its checkpoint engine sends to, without verl and Ray."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_patches.refit.errors import RefitError

ENGINE = "megatron_patches.refit.verl"


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, with stand-ins for what it imports at its top."""
    registry = SimpleNamespace(register=lambda *_, **__: lambda kind: kind)
    for name, content in (
        ("ray", {}),
        ("verl", {}),
        ("verl.checkpoint_engine", {"CheckpointEngine": object, "CheckpointEngineRegistry": registry}),
        ("verl.workers", {}),
        ("verl.workers.engine", {"EngineRegistry": registry}),
        ("verl.workers.engine.fsdp", {"FSDPEngineWithLMHead": object}),
    ):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop(ENGINE, None)
    yield importlib.import_module(ENGINE)
    del sys.modules[ENGINE]


def test_servers_that_could_not_be_called_are_looked_for_again(
    verl: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next version would be sent to the servers before, and those of now would keep old weights."""
    connected: list[tuple[str, list[str]]] = []
    up = {"old"}

    def find(workers: list[Any]) -> list[str]:
        for worker in workers:
            if worker._actor_id not in up:
                raise RefitError(f"{worker._actor_id} cannot be called")
        return [worker._actor_id for worker in workers]

    engine = verl.EtpCheckpointEngine(1 << 20, is_master=True)
    monkeypatch.setattr(engine, "_find_servers", find)
    monkeypatch.setattr(engine._sender, "connect", lambda host, servers: connected.append((host, servers)))
    old, new = ([SimpleNamespace(_actor_id=name)] for name in ("old", "new"))
    engine.init_process_group(old, "here")
    with pytest.raises(RefitError, match="new cannot be called"):
        engine.init_process_group(new, "here")
    up.add("new")
    engine.init_process_group(new, "here")
    engine.init_process_group(new, "here")
    assert connected == [("here", ["old"]), ("here", ["new"])]
    engine.init_process_group(old, "here")
    assert connected[-1] == ("here", ["old"])
