"""Reads fields of a ``config.json``, and refuses values that have no sense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_patches.refit.errors import UnsupportedModelError


def check_given(config: Mapping[str, object], architecture: str, fields: Sequence[str]) -> None:
    """Refuses a configuration without fields that nobody leaves out on purpose.

    Such fields shape tensors, and transformers takes the value of one large model for them.

    Raises:
        UnsupportedModelError: naming those that are missing.
    """
    missing = [field for field in fields if field not in config]
    if missing:
        raise UnsupportedModelError(
            f"the configuration of this {architecture} does not say {', '.join(missing)}, for which transformers has "
            "values of its own; write down what the model has"
        )


def integer(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    """A positive number; ``default`` where it is missing or null.

    Raises:
        UnsupportedModelError: if it is something else.
    """
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"{name} is {value!r} in the configuration; it must be a positive integer")
    return value


def count(config: Mapping[str, object], name: str) -> int:
    """A number that may be 0, or missing, which counts as 0.

    Raises:
        UnsupportedModelError: if it is something else.
    """
    value = config.get(name) or 0
    if not isinstance(value, int) or value < 0:
        raise UnsupportedModelError(f"{name} is {value!r} in the configuration; it must be 0 or a positive integer")
    return value


def number(config: Mapping[str, object], name: str, default: float) -> float:
    """A number; what is rotary may be where releases of transformers from 5.0 on keep it.

    Raises:
        UnsupportedModelError: if it is something else.
    """
    nested = config.get("rope_parameters")
    value = config.get(name, nested.get(name, default) if isinstance(nested, Mapping) else default)
    if not isinstance(value, int | float):
        raise UnsupportedModelError(f"{name} is {value!r} in the configuration; it must be a number")
    return float(value)


def flag(config: Mapping[str, object], name: str, default: bool = False) -> bool:
    """True or false; ``default`` where it is missing, and false where it is null.

    Raises:
        UnsupportedModelError: if it is something else.
    """
    value = config.get(name, default)
    if not isinstance(value, bool | None):
        raise UnsupportedModelError(f"{name} is {value!r} in the configuration; it must be true or false")
    return bool(value)
