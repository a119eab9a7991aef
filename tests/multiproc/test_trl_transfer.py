"""EtpWeightTransfer, called as TRL calls it, and what it refuses."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_patches.refit import OnEngineFailure, RefitOptions, trl
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.trainer.engine_client import PauseMode
from megatron_patches.refit.trl import EtpWeightTransfer, module_of
from tests.multiproc import bodies_trl as bodies
from tests.support.launch import run_distributed
from tests.support.plain_engine import PlainEngine, running

pytestmark = [pytest.mark.multiproc, pytest.mark.cpu_only("the engine of these tests keeps weights in host memory")]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainEngine]:
    """One for all tests, each of which is another training."""
    with running("engine", tmp_path_factory.mktemp("engine")) as one:
        yield one


def tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """With names of nn.Module's own attributes, and one that is the beginning of another."""
    torch.manual_seed(0)
    shapes = {"type.weight": (5, 3), "type": (2,), "layers.0.forward.bias": (7,), "scale": ()}
    return {name: torch.randn(shape) * scale for name, shape in shapes.items()}


def sync(transfer: EtpWeightTransfer, what: dict[str, torch.Tensor]) -> None:
    transfer.pause()
    transfer.send_weights(iter(what.items()))
    transfer.resume()


def test_the_main_process_of_two_sends_each_version_whole(engine_folder: str) -> None:
    found, others = run_distributed(bodies.synced, 2, "gloo", args=(engine_folder,))
    assert others == []
    assert [was[0] for _, _, was in found] == [7, 8, 9, 10]
    for before, after, was in found:
        assert after == was
        assert before[0] in {was[0] - 1 if was[0] > 7 else -1, was[0]}
    assert len({tuple(was[1].values()) for _, _, was in found}) == 4


def test_copies_stay_where_they_are_and_are_contiguous(engine: PlainEngine) -> None:
    transfer = EtpWeightTransfer([engine], options=bodies.OPTIONS)
    assert transfer.version == 0
    addresses = []
    for number in (1, 2):
        sent = tensors(number)
        sent["type.weight"] = sent["type.weight"].t().contiguous().t()  # as a transposed weight
        sync(transfer, sent)
        assert engine.run("content") == (number, bodies.content(sent))
        addresses.append({name: copy.data_ptr() for name, copy in transfer._copies.tensors.items()})
    assert addresses[0] == addresses[1]
    assert not addresses[0].items() & {name: tensor.data_ptr() for name, tensor in sent.items()}.items()
    transfer.destroy()
    assert transfer._copies.tensors == {}


def test_a_module_of_tensors_has_their_names() -> None:
    given = tensors()
    state = module_of(given).state_dict()
    assert sorted(state) == sorted(given)
    assert {name: tensor.data_ptr() for name, tensor in state.items()} == {n: t.data_ptr() for n, t in given.items()}


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in tensors().items() if key != name}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({}, r"there are no tensors to send \(TRL leaves out frozen parameters\)"),
        (without("scale"), "scale was in the first sync and is no more; 1 in all are missing"),
        (tensors() | {"more": torch.ones(2)}, r"more is torch.float32 \(2,\); in the first sync it was absent"),
        (
            tensors() | {"type": torch.ones(3)},
            r"type is torch.float32 \(3,\); in the first sync it was torch.float32 \(2,\), and it must stay the same",
        ),
        (
            tensors() | {"type": torch.ones(2).double()},
            r"type is torch.float64 \(2,\); in the first sync it was torch.float32 \(2,\), and",
        ),
    ],
)
def test_tensors_that_change_are_refused(second: dict[str, torch.Tensor], message: str, engine: PlainEngine) -> None:
    transfer = EtpWeightTransfer([engine], options=bodies.OPTIONS)
    sync(transfer, tensors())
    with pytest.raises(RefitError, match=message) as error:
        transfer.send_weights(iter(second.items()))
    assert "\n" not in str(error.value)
    assert engine.run("content") == (1, bodies.content(tensors()))
    sync(transfer, tensors(3.0))
    assert engine.run("content") == (2, bodies.content(tensors(3.0)))
    transfer.destroy()


def test_a_tensor_that_is_given_twice_is_refused() -> None:
    transfer = EtpWeightTransfer("http://127.0.0.1:9", options=bodies.OPTIONS)
    with pytest.raises(RefitError, match="scale was given twice"):
        transfer.send_weights([*tensors().items(), ("scale", torch.ones(()))])
    transfer.destroy()


def test_an_engine_that_is_not_up_is_named_after_a_while() -> None:
    transfer = EtpWeightTransfer("http://127.0.0.1:9", startup_s=0.2)
    with pytest.raises(RefitError, match=r"http://127.0.0.1:9 was not up within 0.2 s: .*refused") as error:
        transfer.init_weight_transfer()
    assert "\n" not in str(error.value)
    with pytest.raises(PartyFailedError, match=r"cannot start the refit: .*http://127.0.0.1:9.*") as failed:
        transfer.send_weights(tensors().items())
    assert "\n" not in str(failed.value)
    transfer.resume()  # there is nothing to wait for
    transfer.destroy()


class _Starting:
    """A program's own client of an engine that comes up with the second call."""

    name, calls = "own", 0

    def check_up(self) -> None:
        self.calls += 1
        if self.calls == 1:
            raise ConnectionRefusedError("not yet")


def test_an_engine_whose_client_raises_errors_of_its_own_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "_POLL_S", 0.01)
    engine: Any = _Starting()
    EtpWeightTransfer([engine], startup_s=30.0).init_weight_transfer()
    assert engine.calls == 2


def test_an_engine_of_another_model_refuses_and_keeps_what_it_serves(engine: PlainEngine) -> None:
    before = engine.run("content")
    engine.run("know", {"type": "float32"})
    transfer = EtpWeightTransfer([engine], options=bodies.OPTIONS)
    with pytest.raises(PartyFailedError, match=r"cannot start the refit: .*the engine has no ") as error:
        transfer.send_weights(tensors().items())
    engine.run("know", None)
    assert "\n" not in str(error.value)
    assert engine.run("content") == before
    transfer.destroy()


@pytest.mark.slow
def test_an_engine_that_dies_ends_the_training(engine: PlainEngine, tmp_path: Path) -> None:
    with running("another", tmp_path) as another:
        transfer = EtpWeightTransfer([engine, another], options=bodies.OPTIONS)
        sync(transfer, tensors())
        another.run("fail_in", "sending", signal.SIGKILL)
        with pytest.raises(PartyFailedError) as error:
            sync(transfer, tensors(2.0))
        assert (error.value.engines, "\n" in str(error.value)) == (("another",), False)
        deadline = time.monotonic() + 30.0  # the other engine's commit goes on meanwhile
        while engine.run("content")[0] != 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert engine.run("content") == (2, bodies.content(tensors(2.0)))
        transfer.destroy()


@pytest.mark.slow
def test_with_drop_the_training_ends_once_no_engine_serves(tmp_path: Path) -> None:
    options = RefitOptions(timeout_s=20.0, staging_bytes=1 << 14, on_engine_failure=OnEngineFailure.DROP)
    with running("one", tmp_path) as one, running("two", tmp_path) as two:
        transfer = EtpWeightTransfer([one, two], options=options)
        sync(transfer, tensors())
        two.run("fail_in", "sending", signal.SIGKILL)
        sync(transfer, tensors(2.0))
        assert one.run("content") == (2, bodies.content(tensors(2.0)))
        one.run("fail_in", "sending", signal.SIGKILL)
        with pytest.raises(PartyFailedError, match=r"version 3 does not serve: .*one: ") as error:
            sync(transfer, tensors(3.0))
        assert "one" in error.value.engines
        transfer.destroy()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engines": []}, r"engines is \[\]; it must name at least one server"),
        ({"engines": ["http://a:1", "http://a:1/"]}, r"engines is .*, and each once"),
        ({"engines": "a:1"}, "a:1"),
        ({"engines": "http://a:1", "first_version": -1}, "first_version is -1; versions begin with 0"),
        ({"engines": "http://a:1", "options": RefitOptions(pause=PauseMode.ABORT)}, "options.pause is abort, and TRL"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EtpWeightTransfer(**arguments)
