"""EtpConfig: what is accepted, and how the rest is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest

from etp.config import EtpConfig, GradReduction, TransportName


def test_defaults() -> None:
    config = EtpConfig()
    assert dataclasses.asdict(config) == {
        "transport": TransportName.AUTO,
        "prefetch_depth": 1,
        "resident_bytes": 0,
        "pad_for_alignment": 16,
        "grad_reduction": GradReduction.MEAN,
        "fp32_accumulation": True,
        "reduce_once_per_iteration": False,
        "reuse_across_forwards": False,
        "timeout_s": None,
    }


def test_names_become_enum_members() -> None:
    config = EtpConfig(transport="c10d", grad_reduction="sum")  # type: ignore[arg-type]
    assert config.transport is TransportName.C10D
    assert config.grad_reduction is GradReduction.SUM


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "transport",
            "nccl",
            "EtpConfig.transport is 'nccl'; choose one of 'auto', 'c10d', 'copy_engine', 'hierarchical'",
        ),
        ("grad_reduction", "max", "EtpConfig.grad_reduction is 'max'; choose one of 'mean', 'sum'"),
        ("prefetch_depth", -1, "EtpConfig.prefetch_depth is -1; it must be an integer >= 0"),
        ("prefetch_depth", 1.5, "EtpConfig.prefetch_depth is 1.5; it must be an integer >= 0"),
        ("prefetch_depth", True, "EtpConfig.prefetch_depth is True; it must be an integer >= 0"),
        ("resident_bytes", -4096, "EtpConfig.resident_bytes is -4096; it must be an integer >= 0"),
        ("pad_for_alignment", "16", "EtpConfig.pad_for_alignment is '16'; it must be an integer >= 0"),
        ("timeout_s", 0, "EtpConfig.timeout_s is 0; it must be > 0 seconds and finite, or None"),
        ("timeout_s", -3.0, "EtpConfig.timeout_s is -3.0; it must be > 0 seconds and finite, or None"),
        ("timeout_s", math.inf, "EtpConfig.timeout_s is inf; it must be > 0 seconds and finite, or None"),
        ("timeout_s", math.nan, "EtpConfig.timeout_s is nan; it must be > 0 seconds and finite, or None"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=r"^EtpConfig\.") as error:
        EtpConfig(**{field: value})  # type: ignore[arg-type]
    assert str(error.value) == message


def test_is_frozen_and_takes_keywords_only() -> None:
    config = EtpConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.prefetch_depth = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        EtpConfig(TransportName.C10D)  # type: ignore[call-arg]
