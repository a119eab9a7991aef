"""Adapters: what is refused at the trainer and at the engine, how versions are written, and which files are kept."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from safetensors.torch import load_file

from megatron_patches.refit.control.adapter_names import FACTOR_A, FACTOR_B, SCALE, session_folder
from megatron_patches.refit.control.messages import StateLog
from megatron_patches.refit.errors import (
    ModelMismatchError,
    PartyFailedError,
    RefitError,
    StaleVersionError,
    TransferError,
)
from megatron_patches.refit.layout.boxes import TensorSpec
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.layout.weight_format import WeightFormat, quantized_weights
from megatron_patches.refit.memory.ports import Memory
from megatron_patches.refit.parties.terms import LinkOptions, MemoryMode
from megatron_patches.refit.trainer.adapters import AdapterPublisher
from megatron_patches.refit.trainer.engine_client import AdapterEngine
from megatron_patches.refit.trainer.engines import HttpEngine, check_given_once
from megatron_patches.refit.trainer.push_options import RefitOptions
from tests.support.full_disk import files_of

if TYPE_CHECKING:
    from megatron_patches.refit.vllm.adapter_session import AdapterSession
    from megatron_patches.refit.vllm.refit_call import RefitCall

NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
NEEDS_PEFT = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="PEFT is not installed")
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def scale_in(memory: Any) -> float:
    """The number in the memory of a scale."""
    return float(memory[0])


@NEEDS_PEFT
def test_scales_and_ranks_are_those_with_which_peft_computes() -> None:
    from megatron_patches.refit.source.adapter import AdapterSource
    from tests.multiproc.bodies_adapters import ALPHA, RANK, adapted

    usual = ALPHA / RANK
    patterns = {"rank_pattern": {"up": 3}, "alpha_pattern": {"layers.1.down": 7}}
    for settings, expected in (
        ({}, [(RANK, usual)] * 4),
        ({"use_rslora": True}, [(RANK, ALPHA / math.sqrt(RANK))] * 4),
        (patterns, [(3, ALPHA / 3), (RANK, usual), (3, ALPHA / 3), (RANK, 7 / RANK)]),
        ({"target_modules": r".*layers\.1\.up"}, [(RANK, usual)]),
    ):
        source = AdapterSource(adapted(**settings))
        shapes, memory = source.describe(0).shapes, source.look_up()
        ranks = [shape[0] for name, shape in shapes.items() if name.endswith(FACTOR_A)]
        scales = [scale_in(memory[name]) for name in shapes if name.endswith(SCALE)]
        assert list(zip(ranks, scales, strict=True)) == expected


@NEEDS_PEFT
def test_a_changed_scale_is_of_the_next_version() -> None:
    from megatron_patches.refit.source.adapter import AdapterSource
    from tests.multiproc.bodies_adapters import adapted

    model = adapted(target_modules=["layers.0.up"])
    source = AdapterSource(model)
    source.describe(0)
    layer = model.base_model.model.layers[0].up
    layer.set_scale("default", 0.5)
    (scale,) = [scale_in(memory) for name, memory in source.look_up().items() if name.endswith(SCALE)]
    assert scale == layer.scaling["default"] == 0.5 * 12 / 5


@NEEDS_PEFT
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "has a variant of LoRA"),
        ({"lora_bias": True, "target_modules": ["up"]}, "has a bias beside its factors"),
        ({"bias": "all"}, "was made with bias='all', which is not served by vLLM"),
        ({"modules_to_save": ["down"], "target_modules": ["up"]}, "modules_to_save=.*which is not served by vLLM"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which changes the base model's weights"),
    ],
)
def test_what_vllm_would_leave_out_is_refused(settings: dict[str, Any], message: str) -> None:
    from megatron_patches.refit.source.adapter import AdapterSource
    from tests.multiproc.bodies_adapters import adapted

    with pytest.raises(RefitError, match=message):
        AdapterSource(adapted(**settings))


@NEEDS_PEFT
def test_an_adapter_that_is_not_there_or_is_merged_is_refused() -> None:
    from megatron_patches.refit.source.adapter import AdapterSource
    from tests.multiproc.bodies_adapters import Model, adapted

    model = adapted()
    with pytest.raises(RefitError, match="the model has no LoRA adapter 'other' of PEFT; it has 'default'"):
        AdapterSource(model, "other")
    with pytest.raises(RefitError, match="it has none"):
        AdapterSource(Model())
    source = AdapterSource(model)
    model.merge_adapter()
    with pytest.raises(RefitError, match=r"layers.0.up has the adapter 'default' merged into its weight; call unmerge"):
        source.check()


@NEEDS_PEFT
@pytest.mark.parametrize("merged", [False, True])
def test_weights_beside_an_adapter_are_not_published_as_if_there_were_none(merged: bool) -> None:
    """Not even if an engine knew their names; those of a model into which it is merged for good are."""
    from megatron_patches.refit.source.modules import ModuleSource
    from tests.multiproc.bodies_adapters import adapted

    model = adapted()
    if merged:
        model.merge_adapter()
    with pytest.raises(RefitError, match=r"layers\.0\.up\.base_layer\.weight is a weight beside an adapter of PEFT;"):
        ModuleSource(model, {}).describe(0)
    if merged:
        model.unmerge_adapter()
    assert "layers.0.up.weight" in ModuleSource(model.merge_and_unload(), {}).describe(0).shapes


def factors(scale: float = 2.6) -> dict[str, torch.Tensor]:
    return {
        Q + FACTOR_A: torch.randn(3, 8),
        Q + FACTOR_B: torch.randn(6, 3),
        Q + SCALE: torch.tensor([scale], dtype=torch.float64),
    }


@NEEDS_VLLM
def test_a_version_is_written_as_vllm_computes_with_it(tmp_path: Path) -> None:
    from megatron_patches.refit.vllm.adapter_files import tensors_of_peft, write_adapter

    tensors = factors()
    write_adapter(tmp_path, tensors_of_peft(tensors, torch.bfloat16))
    found = load_file(tmp_path / "adapter_model.safetensors")
    b = tensors[Q + FACTOR_B].bfloat16()
    b *= 2.6  # as vLLM does in place
    assert torch.equal(found[Q + FACTOR_A], tensors[Q + FACTOR_A].bfloat16())
    assert torch.equal(found[Q + FACTOR_B], b)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 3, ["q_proj"])
    with pytest.raises(RefitError, match=f"the scale of {Q} is nan"):
        tensors_of_peft(factors(math.nan), torch.bfloat16)


@NEEDS_VLLM
def test_files_stay_until_nothing_has_referred_to_them_twice(tmp_path: Path) -> None:
    from megatron_patches.refit.vllm.adapter_files import AdapterFiles, StagedAdapter, tensors_of_peft

    files, session = AdapterFiles(), session_folder(str(tmp_path), "0" * 64)

    def write(version: int, adapter: str = "math") -> None:
        files.check_new(adapter, version)
        staged = StagedAdapter(files, session, adapter, version, tensors_of_peft(factors(), torch.float32))
        staged.write()
        staged.apply()
        staged.forget()

    def there() -> list[str]:
        return sorted(path.name for path in session.iterdir())

    for version in (1, 2, 3):
        write(version)
    write(1, "other")
    files.keep("math", [2, 3])
    assert there() == ["math@1", "math@2", "math@3", "other@1"]
    files.keep("math", [3])
    assert there() == ["math@2", "math@3", "other@1"]
    files.keep("math", [2, 3])  # a request has come to light
    files.keep("math", [3])
    assert there() == ["math@2", "math@3", "other@1"]
    with pytest.raises(StaleVersionError, match="this engine has served another math@1"):
        write(1)
    undone = StagedAdapter(files, session, "math", 4, tensors_of_peft(factors(), torch.float32))
    undone.write()
    undone.apply()
    undone.undo()
    write(4)
    assert session.stat().st_mode & 0o777 == 0o700
    files.close()
    assert not list(tmp_path.iterdir())


@NEEDS_VLLM
def test_a_folder_that_others_can_use_is_not_written_to(tmp_path: Path) -> None:
    from megatron_patches.refit.vllm.adapter_files import AdapterFiles, StagedAdapter, tensors_of_peft

    session = tmp_path / "session"
    session.mkdir(mode=0o755)
    with pytest.raises(RefitError, match="is not a folder that only user"):
        StagedAdapter(AdapterFiles(), session, "math", 1, tensors_of_peft(factors(), torch.float32)).write()
    assert not list(session.iterdir())


@NEEDS_VLLM
def test_a_full_disk_leaves_nothing_of_a_version_and_all_of_the_one_before(tmp_path: Path) -> None:
    from megatron_patches.refit.vllm.adapter_files import AdapterFiles, StagedAdapter, tensors_of_peft

    files, session = AdapterFiles(), session_folder(str(tmp_path), "0" * 64)
    versions = [StagedAdapter(files, session, "math", n, tensors_of_peft(factors(), torch.float32)) for n in (1, 2)]
    versions[0].write()
    versions[0].apply()
    before = {path: path.read_bytes() for path in session.rglob("*") if path.is_file()}
    with files_of(100), pytest.raises(RefitError) as failure:
        versions[1].write()
    assert f"cannot write math@2 to {session} (" in str(failure.value)
    assert "File too large" in str(failure.value) or "os error 27" in str(failure.value)
    assert str(failure.value).endswith("make room there, or publish with another folder")
    assert {path: path.read_bytes() for path in session.rglob("*") if path.is_file()} == before
    versions[1].write()
    versions[1].apply()
    assert sorted(path.name for path in session.iterdir()) == ["math@1", "math@2"]


class Models:
    """A server's list of models, as far as the route knows it."""

    def __init__(self, running: list[str | None]) -> None:
        self.lora_requests: dict[str, str] = {}
        requests = {str(number): SimpleNamespace(lora_name=name) for number, name in enumerate(running)}
        output = SimpleNamespace(request_states=requests)
        self.app = SimpleNamespace(
            state=SimpleNamespace(openai_serving_models=self, engine_client=SimpleNamespace(output_processor=output))
        )

    async def load_lora_adapter(self, request: Any) -> Any:
        if request.lora_name in self.lora_requests:
            return SimpleNamespace(error=SimpleNamespace(message="it has already been loaded"))
        self.lora_requests[request.lora_name] = request.lora_path
        return "Success"

    async def unload_lora_adapter(self, request: Any) -> str:
        del self.lora_requests[request.lora_name]
        return "Success"

    def ask(self, **content: Any) -> tuple[int, dict[str, Any]]:
        """What the route answers."""
        from megatron_patches.refit.vllm.guard import add_adapter

        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps(content).encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(add_adapter({"app": self.app}, receive, send))
        return sent[0]["status"], json.loads(sent[1]["body"])


@NEEDS_VLLM
def test_the_oldest_versions_are_dropped_and_those_in_use_are_told() -> None:
    models = Models(running=["math@2", None, "maths@1"])
    models.lora_requests |= {"maths@1": "/theirs", "math@best": "/theirs"}
    asked = {"adapter": "math", "folder": "/versions", "keep": 2}
    assert models.ask(version=1, **asked) == (200, {"versions": [1, 2]})
    assert models.ask(version=2, **asked) == (200, {"versions": [1, 2]})
    assert models.ask(version=3, **asked) == (200, {"versions": [2, 3]})
    assert models.ask(version=10, **asked) == (200, {"versions": [2, 3, 10]})
    assert list(models.lora_requests) == ["maths@1", "math@best", "math@3", "math@10"]
    assert models.ask(version=10, **asked) == (409, {"error": "vLLM does not add math@10: it has already been loaded"})
    for wrong in ({"keep": 0}, {"adapter": "a/b"}, {"folder": "here"}, {"version": -1}, {"more": 1}):
        assert models.ask(**{**asked, "version": 11, **wrong})[0] == 400
    assert list(models.lora_requests) == ["maths@1", "math@best", "math@3", "math@10"]


def specs(shapes: Mapping[str, tuple[int, int, int]]) -> list[TensorSpec]:
    """Those of an adapter: rank, inputs and outputs of each module."""
    found = []
    for path, (rank, inputs, outputs) in shapes.items():
        name = f"base_model.model.{path}"
        found += [
            TensorSpec(name + FACTOR_A, (rank, inputs), "float32"),
            TensorSpec(name + FACTOR_B, (outputs, rank), "float32"),
            TensorSpec(name + SCALE, (1,), "float64"),
        ]
    return found


@NEEDS_VLLM
def test_each_module_must_be_in_the_engine_in_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_patches.refit.vllm import adapter_session

    class Layer:
        input_size, output_size = 8, 6

    monkeypatch.setattr(adapter_session, "LinearBase", Layer)
    manager = SimpleNamespace(
        modules={"layers.0.o_proj": SimpleNamespace(base_layer=Layer())},
        packed_modules={},
        model=SimpleNamespace(),
        lora_config=SimpleNamespace(max_lora_rank=8),
    )
    adapter_session.check_adapter(manager, specs({"layers.0.o_proj": (8, 8, 6)}))
    for path, shape, message in (
        ("layers.1.o_proj", (8, 8, 6), "the engine has no module layers.1.o_proj to which an adapter can be added"),
        ("layers.0.o_proj", (9, 8, 6), "layers.0.o_proj has rank 9, and the engine takes at most 8"),
        ("layers.0.o_proj", (2, 8, 5), "8 inputs and 5 outputs in the trainer, 8 inputs and 6 outputs in the engine"),
    ):
        with pytest.raises(ModelMismatchError, match=message):
            adapter_session.check_adapter(manager, specs({path: shape}))


def test_a_server_is_attached_once() -> None:
    first, second = (AdapterEngine(HttpEngine("http://127.0.0.1:1"), name, 1, "/tmp") for name in "ab")  # noqa: S108
    with pytest.raises(ValueError, match="is given 2 times"):
        check_given_once([first, second])
    with pytest.raises(TypeError, match="has no method add_adapter"):
        AdapterEngine(SimpleNamespace(name="an engine"), "a", 1, "/tmp")  # noqa: S108


@pytest.mark.parametrize("weight_format", ["fp8_block", "fp8_block_fp32_scales"])
def test_factors_are_sent_as_they_are_trained(weight_format: str) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert quantized_weights({name: (8, 16)})  # workers would write its numbers without their scales
    options = RefitOptions(weight_format=WeightFormat(weight_format))
    with pytest.raises(ValueError, match=f"weight_format is {weight_format}; an adapter's factors are sent as"):
        AdapterPublisher(torch.nn.Linear(1, 1), "a", options=options)


def test_engines_send_each_other_no_adapters() -> None:
    with pytest.raises(ValueError, match="fan_out is on; engines send each other no adapters"):
        AdapterPublisher(torch.nn.Linear(1, 1), "a", options=RefitOptions(fan_out=True))


class AdapterParty:
    """A party of an adapter's session, which cannot join, or receives once it may; notes what it tells."""

    rank, beside_bytes = 0, 0

    def __init__(self, *_: object) -> None:
        self.joins, self.may_receive, self.told = True, threading.Event(), list[str | None]()
        self.memory: MemoryMode | None = None

    def made(self, _: object, options: LinkOptions) -> AdapterParty:
        self.memory = options.memory
        return self

    def prepare(self, _: object) -> Manifest:
        if not self.joins:
            raise PartyFailedError("describing the trainer's weights failed: no adapter")
        return Manifest(0, "here", (), ())

    def receive(self, _version: int, _step: int, _linked: bool, make: Callable[[], Memory]) -> Memory:
        made = make()
        assert self.may_receive.wait(10.0)
        return made

    def post_commit(self, _version: int, reason: str | None) -> None:
        self.told.append(reason)

    def leave(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def adapter_session(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    party: AdapterParty,
    timeout_s: float = 10.0,
    memory: MemoryMode = MemoryMode.BESIDE,
) -> AdapterSession:
    from megatron_patches.refit.vllm import adapter_session, all_or_none
    from megatron_patches.refit.vllm.adapter_files import AdapterFiles, tensors_of_peft
    from megatron_patches.refit.vllm.refit_call import RefitCall
    from megatron_patches.refit.vllm.worker_session import ServingModel

    monkeypatch.setattr(adapter_session, "Assembly", lambda *_: SimpleNamespace(most_silence_s=None))
    monkeypatch.setattr(adapter_session, "DestinationParty", party.made)
    monkeypatch.setattr(adapter_session, "tensors_of_peft", lambda *_: tensors_of_peft(factors(), torch.float32))
    monkeypatch.setattr(all_or_none, "get_world_group", lambda: SimpleNamespace(world_size=1))
    config = SimpleNamespace(
        additional_config={},
        parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, world_size_across_dp=1, rank=0),
    )
    call = RefitCall(
        call="join",
        host="here",
        port=1,
        token="ab" * 32,
        timeout_s=timeout_s,
        sources=1,
        memory=memory,
        adapter="math",
        folder=str(folder),
    )
    serving = ServingModel(torch.nn.Linear(1, 1), cast(Any, config), torch.device("cpu"))
    return adapter_session.AdapterSession(call, serving, AdapterFiles(), StateLog("a trainer", logging.DEBUG))


@NEEDS_VLLM
def test_a_worker_that_could_not_join_says_why_whatever_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    party = AdapterParty()
    party.joins = False
    session = adapter_session(monkeypatch, tmp_path, party)
    why = "but joining failed (describing the trainer's weights failed: no adapter)"
    with pytest.raises(TransferError) as raised:
        session.commit(3)
    assert str(raised.value) == f"asked to commit version 3, {why}"
    assert party.told == [f"TransferError: asked to commit version 3, {why}"]
    with pytest.raises(RefitError) as refused:
        session.receive(receive_call(4))
    assert str(refused.value) == f"asked to receive version 4, {why}"
    session.end()


@NEEDS_VLLM
def test_a_worker_cuts_an_adapter_into_the_loads_that_its_trainer_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    party = AdapterParty()
    session = adapter_session(monkeypatch, tmp_path, party, memory=MemoryMode.IN_PLACE)  # which means nothing else here
    assert party.memory is MemoryMode.IN_PLACE
    session.end()


@NEEDS_VLLM
def test_an_adapter_that_is_written_too_late_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    party = AdapterParty()
    session = adapter_session(monkeypatch, tmp_path, party, timeout_s=1.0)
    session.receive(receive_call(3))
    with pytest.raises(TransferError, match="commit version 3, but refit-receive-math-3 did not end within 1 s"):
        session.commit(3)
    party.may_receive.set()
    with pytest.raises(TransferError, match="version 3 was ready only after its commit had failed"):
        session.commit(3)
    assert "internal error" not in caplog.text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    session.receive(receive_call(4))
    session.commit(4)
    assert party.told[-1] is None
    session.end()


def receive_call(version: int) -> RefitCall:
    from megatron_patches.refit.vllm.refit_call import RefitCall

    return RefitCall(call="receive", adapter="math", version=version)
