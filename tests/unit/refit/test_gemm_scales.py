"""What a trainer in FP8 sends in block FP8, compared with what its own GEMMs multiply."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from etp.te import FP32_SCALES_VARIABLE
from megatron_patches import refit_training
from megatron_patches.arguments import UnsupportedConfigurationError
from megatron_patches.refit import WeightPublisher
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.trainer.session import Fate, OnEngineFailure, RefitOptions, RefitSession
from tests.support import plain_engine
from tests.support.plain_engine import PlainEngine
from tests.unit.refit.test_mapping_files import TOKENS, ToyModel

RECIPES = "transformer_engine.common.recipe"
POWERS = (
    r"weight_format is fp8_block_fp32_scales, and with fp8_recipe blockwise the trainer's GEMMs have scales that are "
    r"powers of two: .*; use fp8_block, or train with NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 in every rank's environment"
)
FP32 = (
    r"weight_format is fp8_block, and with fp8_recipe blockwise the trainer's GEMMs have fp32 scales: .*; use "
    r"fp8_block_fp32_scales, or train without NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 in every rank's environment"
)
WRONG = [
    pytest.param("fp8_block_fp32_scales", None, POWERS, id="fp32-unset"),
    pytest.param("fp8_block_fp32_scales", "0", POWERS, id="fp32-0"),
    pytest.param("fp8_block", "1", FP32, id="powers-1"),
]
RIGHT = [("fp8_block", None), ("fp8_block_fp32_scales", "1"), ("trained", None), ("trained", "1")]


@pytest.fixture(autouse=True)
def without_te(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Transformer Engine has not been imported yet."""
    monkeypatch.delitem(sys.modules, RECIPES, raising=False)
    monkeypatch.delenv(FP32_SCALES_VARIABLE, raising=False)


def set_variable(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is not None:
        monkeypatch.setenv(FP32_SCALES_VARIABLE, value)


def megatron_model(**trained: str) -> nn.Module:
    """As much of a GPTModel as is read, wrapped, with fields of its configuration that say how it is trained."""
    model: Any = ToyModel(layernorm_zero_centered_gamma=False)
    for layer in model.decoder.layers:
        del layer.behind
    vars(model.config).update(trained)
    wrapper = nn.Module()
    wrapper.module = model
    return wrapper


def options(weight_format: Any) -> RefitOptions:
    return RefitOptions(weight_format=weight_format, on_engine_failure=OnEngineFailure.DROP)


def prepare(model: nn.Module, weight_format: str, times: int = 1) -> None:
    session = RefitSession(model, [], vocab_size=TOKENS, options=options(weight_format))
    try:
        for _ in range(times):
            session.prepare()
    finally:
        session.close()


@pytest.mark.parametrize(("weight_format", "variable", "message"), WRONG)
def test_other_scales_than_those_of_the_gemms_are_refused_before_anything_is_sent(
    weight_format: str, variable: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variable(monkeypatch, variable)
    model = megatron_model(fp8="e4m3", fp8_recipe="blockwise")
    with pytest.raises(PartyFailedError, match=rf"^cannot start the refit: trainer rank 0: {message}$"):
        prepare(model, weight_format)
    with (
        WeightPublisher(model, vocab_size=TOKENS, options=options(weight_format)) as publisher,
        pytest.raises(PartyFailedError, match=message),
    ):
        publisher.publish(0)


@pytest.mark.slow
def test_an_engine_keeps_its_weights_when_other_scales_are_refused(tmp_path: Path) -> None:
    model, address = megatron_model(fp8="e4m3", fp8_recipe="blockwise"), str(tmp_path / "engine.sock")
    process, engine = plain_engine.start(address), PlainEngine("engine", address)
    try:
        with WeightPublisher(model, vocab_size=TOKENS, options=options("fp8_block")) as publisher:
            publisher.attach(engine)
            assert publisher.publish(3).result().engines["engine"].fate is Fate.SERVES
        served = engine.run("content")
        with WeightPublisher(model, vocab_size=TOKENS, options=options("fp8_block_fp32_scales")) as publisher:
            publisher.attach(engine)
            with pytest.raises(PartyFailedError, match=POWERS) as refused:
                publisher.publish(4)
        assert "\n" not in str(refused.value)
        assert engine.run("content") == served
        assert served[0] == 3
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("weight_format", "variable"), RIGHT)
def test_the_scales_of_the_gemms_are_sent_without_a_word(
    weight_format: str, variable: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_variable(monkeypatch, variable)
    prepare(megatron_model(fp8="e4m3", fp8_recipe="blockwise"), weight_format)
    assert "GEMMs" not in caplog.text


@pytest.mark.parametrize("weight_format", ["fp8_block", "fp8_block_fp32_scales", "trained"])
@pytest.mark.parametrize("variable", [None, "1"])
def test_a_trainer_in_bf16_sends_either_kind_of_scales(
    weight_format: str, variable: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Megatron's configuration names a recipe even then."""
    set_variable(monkeypatch, variable)
    prepare(megatron_model(fp8_recipe="blockwise"), weight_format)
    assert "GEMMs" not in caplog.text


@pytest.mark.parametrize("fp32", [False, True])
def test_what_transformer_engine_has_read_counts_and_not_what_the_variable_has_become(
    fp32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = SimpleNamespace(power_2_scale=not fp32)
    recipes = SimpleNamespace(Float8BlockScaling=SimpleNamespace(fp8_quant_fwd_weight=weight))
    monkeypatch.setitem(sys.modules, RECIPES, recipes)
    monkeypatch.setenv(FP32_SCALES_VARIABLE, "0" if fp32 else "1")
    model = megatron_model(fp8="e4m3", fp8_recipe="blockwise")
    wrong, right = ("fp8_block", "fp8_block_fp32_scales")[:: 1 if fp32 else -1]
    prepare(model, right)
    with pytest.raises(PartyFailedError, match=FP32 if fp32 else POWERS):
        prepare(model, wrong)


@pytest.mark.parametrize("weight_format", ["fp8_block", "fp8_block_fp32_scales", "trained"])
@pytest.mark.parametrize(
    ("trained", "recipe"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "fp8_recipe tensorwise"),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "fp8_recipe delayed"),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "fp8_recipe mxfp8"),
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp8_recipe": "blockwise"}, "fp4_recipe nvfp4"),
    ],
)
def test_gemms_in_no_blocks_of_128_are_told_once(
    trained: dict[str, str], recipe: str, weight_format: str, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(megatron_model(**trained), weight_format, times=2)
    told = [one for one in caplog.records if "GEMMs" in one.getMessage()]
    if weight_format == "trained":
        assert told == []
        return
    (one,) = told
    assert one.levelno == logging.WARNING
    assert one.getMessage() == (
        f"refit: weight_format is {weight_format}, and with {recipe} the trainer's GEMMs quantize weights otherwise; "
        "engines compute with slightly different weights"
    )


def script(weight_format: str, *engines: str, **trained: str) -> argparse.Namespace:
    parser = refit_training.add_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--refit-weight-format", weight_format, *engines])
    vars(args).update(trained)
    return args


@pytest.mark.parametrize(("weight_format", "variable", "message"), WRONG)
def test_a_training_script_refuses_other_scales_at_its_start(
    weight_format: str, variable: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variable(monkeypatch, variable)
    for engines in ((), ("--refit-engines", "http://a")):  # as other flags, it may not wait for the day of engines
        args = script(weight_format, *engines, fp8="e4m3", fp8_recipe="blockwise")
        with pytest.raises(UnsupportedConfigurationError, match=f"^--refit-{message.replace('_', '.', 1)}$"):
            refit_training.check(args)


@pytest.mark.parametrize(("weight_format", "variable"), RIGHT)
def test_a_training_script_takes_the_scales_of_its_gemms(
    weight_format: str, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variable(monkeypatch, variable)
    refit_training.check(script(weight_format, fp8="e4m3", fp8_recipe="blockwise"))
    refit_training.check(script(weight_format, fp8="hybrid", fp8_recipe="tensorwise"))
    refit_training.check(script(weight_format, fp8=None, fp8_recipe="blockwise"))
