"""Reads fields of a ``config.json``, and refuses invalid values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_patches.refit.errors import UnsupportedModelError

_ROTARY = ("rope_parameters", "rope_scaling")  # fields that hold fields of rotary positions


def check_given(config: Mapping[str, object], architecture: str, fields: Sequence[str]) -> None:
    """Refuses a configuration without fields that are never left out on purpose.

    Such fields shape tensors, and transformers' defaults for them are those of one large model.

    Raises:
        UnsupportedModelError: with the missing fields.
    """
    missing = [field for field in fields if field not in config]
    if missing:
        raise UnsupportedModelError(
            f"the configuration of this {architecture} does not say {', '.join(missing)}, for which transformers has "
            "values of its own; write down what the model has"
        )


def integer(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    """A positive integer; ``default`` if it is missing or null.

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
    """A non-negative integer; 0 if it is missing or null.

    Raises:
        UnsupportedModelError: if it is something else.
    """
    value = config.get(name) or 0
    if not isinstance(value, int) or value < 0:
        raise UnsupportedModelError(f"{name} is {value!r} in the configuration; it must be 0 or a positive integer")
    return value


def number(config: Mapping[str, object], name: str, default: float) -> float:
    """A number. Rotary fields may be in ``rope_parameters`` or ``rope_scaling``, where transformers 5 reads them.

    Raises:
        UnsupportedModelError: if it is something else, or differs between these places.
    """
    places = [config, *(entry for entry in map(config.get, _ROTARY) if isinstance(entry, Mapping))]
    values = [place[name] for place in places if name in place] or [default]
    for value in values:
        if not isinstance(value, int | float):
            raise UnsupportedModelError(f"{name} is {value!r} in the configuration; it must be a number")
        if value != values[0]:
            raise UnsupportedModelError(
                f"{name} is {values[0]!r} in the configuration and {value!r} in its {' or '.join(_ROTARY)}; releases "
                "of transformers differ in which they read, so write one value"
            )
    return float(values[0])


def flag(config: Mapping[str, object], name: str, default: bool = False) -> bool:
    """True or false; ``default`` if it is missing, and false if it is null.

    Raises:
        UnsupportedModelError: if it is something else.
    """
    value = config.get(name, default)
    if not isinstance(value, bool | None):
        raise UnsupportedModelError(f"{name} is {value!r} in the configuration; it must be true or false")
    return bool(value)
