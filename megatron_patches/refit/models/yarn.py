"""YaRN's scaling of rotary positions: read from either side, written, and refused.

Beside latent attention, the implementations agree where both scales of attention are positive, or where ``mscale`` is 1
and ``mscale_all_dim`` is 0, their defaults. Elsewhere transformers scales the rotated rows as if ``mscale`` were 1, and
Megatron, vLLM and DeepSeek's own code do not. Without latent attention they agree on the defaults only: vLLM ignores
both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.models.config_fields import integer, number
from megatron_patches.refit.models.traits import YarnTraits

_FIELDS = frozenset(
    {
        "type",
        "rope_type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    }
)


def yarn_from_config(config: Mapping[str, object], *, latent: bool) -> YarnTraits | None:
    """YaRN's scaling in a ``config.json``; None if positions are not scaled, or in another way.

    Args:
        config: content of the file.
        latent: whether the model has latent attention.

    Raises:
        UnsupportedModelError: if the entry has a field that Megatron lacks, or a value that it does not compute with.
    """
    for name in ("rope_scaling", "rope_parameters"):
        entry = config.get(name)
        if isinstance(entry, Mapping) and entry.get("rope_type", entry.get("type")) == "yarn":
            found = _read({field: value for field, value in entry.items() if value is not None}, config)
            if clauses := list(_clauses(found, "mscale", "mscale_all_dim", latent=latent)):
                raise UnsupportedModelError(f"{'; '.join(clauses)} ({name})")
            return found
    return None


def yarn_from_megatron(config: Any) -> YarnTraits | None:
    """YaRN's scaling of a Megatron model with latent attention; None for plain positions."""
    return _of_megatron(config, "") if config.rope_type == "yarn" else None


def gpt_yarn_from_megatron(model: Any) -> YarnTraits | None:
    """YaRN's scaling of a GPTModel without latent attention; None for other positions."""
    return _of_megatron(model.config, "yarn_") if model.position_embedding_type == "yarn" else None


def _of_megatron(config: Any, prefix: str) -> YarnTraits:
    """The traits of Megatron's fields, whose names begin with ``prefix``."""
    return YarnTraits(
        factor=float(getattr(config, f"{prefix}rotary_scaling_factor")),
        original_positions=getattr(config, f"{prefix}original_max_position_embeddings"),
        beta_fast=float(getattr(config, f"{prefix}beta_fast")),
        beta_slow=float(getattr(config, f"{prefix}beta_slow")),
        mscale=float(getattr(config, f"{prefix}mscale")),
        mscale_all_dim=float(getattr(config, f"{prefix}mscale_all_dim")),
    )


def yarn_refusals(config: Any) -> Iterator[str]:
    """One clause per setting of positions beside latent attention that ``config.json`` cannot express."""
    if (yarn := yarn_from_megatron(config)) is not None:
        yield from _clauses(yarn, "--mscale", "--mscale-all-dim", latent=True)
        return
    if config.rope_type != "rope" or float(config.rotary_percent) != 1.0:
        yield (
            f"its positions are {config.rope_type} over {config.rotary_percent} of a head's part; train with "
            "--rope-type rope or --rope-type yarn"
        )
    if config.mscale_all_dim and config.rotary_scaling_factor > 1:
        yield f"it scales attention by --mscale-all-dim {config.mscale_all_dim} without --rope-type yarn; train without"


def gpt_yarn_refusals(model: Any) -> Iterator[str]:
    """One clause per setting of a GPTModel's YaRN that ``config.json`` cannot express, or implementations differ on."""
    if (yarn := gpt_yarn_from_megatron(model)) is None:
        return
    yield from _clauses(yarn, "--mscale", "--mscale-all-dim", latent=False)
    if not model.config.yarn_correction_range_round_to_int:
        yield "it sets --no-yarn-correction-range-round-to-int; train without"


def yarn_entry(yarn: YarnTraits, *, latent: bool) -> Mapping[str, object]:
    """The entry ``rope_scaling`` of ``config.json``, with both scales of attention if attention is latent."""
    scales = {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    return {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        **(scales if latent else {}),
    }


def yarn_flags(yarn: YarnTraits, *, latent: bool) -> Iterator[str]:
    """Megatron's flags. Stock Megatron ignores the last three beside latent attention, so defaults are left out."""
    plain = YarnTraits(factor=1.0, original_positions=4096)
    yield from ("--rope-type" if latent else "--position-embedding-type", "yarn")
    yield from ("--rotary-scaling-factor", str(yarn.factor))
    if latent:
        yield from ("--mscale", str(yarn.mscale), "--mscale-all-dim", str(yarn.mscale_all_dim))
    if yarn.original_positions != plain.original_positions:
        yield from ("--yarn-original-max-position-embeddings", str(yarn.original_positions))
    if yarn.beta_fast != plain.beta_fast:
        yield from ("--yarn-beta-fast", str(yarn.beta_fast))
    if yarn.beta_slow != plain.beta_slow:
        yield from ("--yarn-beta-slow", str(yarn.beta_slow))


def _read(entry: Mapping[str, object], config: Mapping[str, object]) -> YarnTraits:
    """The traits of an entry, with transformers' defaults."""
    if more := sorted(entry.keys() - _FIELDS):
        raise UnsupportedModelError(
            f"YaRN with {more[0]} {entry[more[0]]!r}: no model here has such a setting; known are "
            f"{', '.join(sorted(_FIELDS - {'type', 'rope_type', 'rope_theta'}))}"
        )
    if "factor" not in entry:
        raise UnsupportedModelError("YaRN without factor in the configuration; write down what the model has")
    return YarnTraits(
        factor=number(entry, "factor", 1.0),
        original_positions=integer(
            entry, "original_max_position_embeddings", integer(config, "max_position_embeddings")
        ),
        beta_fast=number(entry, "beta_fast", 32.0),
        beta_slow=number(entry, "beta_slow", 1.0),
        mscale=number(entry, "mscale", 1.0),
        mscale_all_dim=number(entry, "mscale_all_dim", 0.0),
    )


def _clauses(yarn: YarnTraits, mscale: str, mscale_all_dim: str, *, latent: bool) -> Iterator[str]:
    """One clause per value on which implementations disagree. ``mscale`` and ``mscale_all_dim`` name the scales."""
    if yarn.factor < 1:
        yield f"YaRN shortens sequences (by a factor of {yarn.factor}), and transformers takes factors from 1"
    if (yarn.mscale, yarn.mscale_all_dim) == (1.0, 0.0):
        return
    given = f"YaRN with {mscale} {yarn.mscale} and {mscale_all_dim} {yarn.mscale_all_dim}"
    if not latent:
        yield f"{given}, which vLLM ignores without latent attention; they must be 1 and 0"
    elif min(yarn.mscale, yarn.mscale_all_dim) <= 0:
        yield (
            f"{given}, for which transformers and Megatron compute different positions; both must be positive, or 1 "
            "and 0"
        )
