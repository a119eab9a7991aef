"""Sizes in bytes as text, as users write them and as commands print them."""

from __future__ import annotations

import argparse
import re
import sys

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Bytes from a number with an optional unit: ``5GB``, ``512MiB``, ``1000``.

    Raises:
        argparse.ArgumentTypeError: if the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 5GB or 512MiB")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size > sys.maxsize:
        raise argparse.ArgumentTypeError(f"{text[:32]!r} is more than any memory has")
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than a byte")
    return int(size)


def size_text(nbytes: int) -> str:
    """A human-readable size."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} bytes"
