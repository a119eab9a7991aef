"""Names and sizes of dtypes, without torch. Names are torch's (``bfloat16``); files use safetensors' codes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_TABLE: tuple[tuple[str, int, str], ...] = (
    ("bool", 1, "BOOL"),
    ("uint8", 1, "U8"),
    ("int8", 1, "I8"),
    ("float8_e4m3fn", 1, "F8_E4M3"),
    ("float8_e5m2", 1, "F8_E5M2"),
    ("float8_e8m0fnu", 1, "F8_E8M0"),
    ("uint16", 2, "U16"),
    ("int16", 2, "I16"),
    ("float16", 2, "F16"),
    ("bfloat16", 2, "BF16"),
    ("uint32", 4, "U32"),
    ("int32", 4, "I32"),
    ("float32", 4, "F32"),
    ("uint64", 8, "U64"),
    ("int64", 8, "I64"),
    ("float64", 8, "F64"),
)

ITEMSIZE: Mapping[str, int] = MappingProxyType({name: size for name, size, _ in _TABLE})
"""Bytes of one element, by dtype name."""

SAFETENSORS_CODE: Mapping[str, str] = MappingProxyType({name: code for name, _, code in _TABLE})
"""Code of the dtype in a safetensors header, by dtype name."""

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that weights of checkpoints may have, and be converted between."""

_EXACTLY_IN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "float8_e4m3fn": frozenset({"float16", "bfloat16", "float32", "float64"}),
        "float8_e5m2": frozenset({"float16", "bfloat16", "float32", "float64"}),
        "float8_e8m0fnu": frozenset({"bfloat16", "float32", "float64"}),
        "float16": frozenset({"float32", "float64"}),
        "bfloat16": frozenset({"float32", "float64"}),
        "float32": frozenset({"float64"}),
    }
)


_ENCODED = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8"})


def are_encoded_apart(dtype: str, other: str) -> bool:
    """Whether two dtypes differ, and one encodes weights together with scales.

    A conversion between them, exact or not, would make another number of a weight.
    """
    return dtype != other and not _ENCODED.isdisjoint((dtype, other))


def holds(dtype: str, other: str) -> bool:
    """Whether ``dtype`` can hold every value of ``other``, so that converting to it loses nothing."""
    return dtype == other or dtype in _EXACTLY_IN.get(other, ())


def itemsize(dtype: str) -> int:
    """Bytes of one element of ``dtype``.

    Raises:
        ValueError: if the dtype has no safetensors code, so that it can be neither written nor described.
    """
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        raise ValueError(f"unknown dtype {dtype!r}; known are {', '.join(ITEMSIZE)}") from None
