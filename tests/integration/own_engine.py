"""Runs the engine of docs/publish.md, from the module ``rollout``, and compares what it holds after each version.

Run as ``python -m tests.integration.own_engine`` in the folder of the module and its model.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from typing import Any

import torch

from megatron_patches.refit import PublishHandle, WeightPublisher
from tests.support.vllm_digests import bytes_of, digests_of

MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The parameters that vLLM makes of several of the model's, one below the other."""


class ComparingPublisher(WeightPublisher):
    """Compares the bytes of each version with those that the engine then holds."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._model = model
        self._engine: Any = None
        self._held: dict[str, str] = {}

    def attach(self, engine: Any) -> str:
        """As the base class."""
        self._engine = engine
        return super().attach(engine)

    def publish(self, version: int, **named: Any) -> PublishHandle:
        """As the base class."""
        handle = super().publish(version, **named)
        handle.result()
        (held,) = self._engine.ask("collective_rpc", digests_of)
        trained = served_form(dict(self._model.state_dict()))
        different = [name for name, content in trained.items() if held[name] != hashlib.sha256(content).hexdigest()]
        assert different == [], f"version {version}"
        assert {name.rpartition(".")[2] for name in held.keys() - trained.keys()} <= {"cos_sin_cache"}
        assert held != self._held, "nothing was trained"
        self._held = held
        sys.stdout.write(f"version {version}: {len(trained)} parameters are equal\n")
        return handle


def served_form(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """The content of each of vLLM's parameters, by name."""
    found = {name: bytes_of(tensor) for name, tensor in state.items()}
    for merged, parts in MERGED.items():
        for name in [name for name in found if f".{parts[0]}." in name]:
            names = [name.replace(parts[0], part) for part in parts]
            found[name.replace(parts[0], merged)] = b"".join(found.pop(one) for one in names)
    return found


if __name__ == "__main__":
    rollout: Any = importlib.import_module("rollout")
    rollout.WeightPublisher = ComparingPublisher
    rollout.main()
