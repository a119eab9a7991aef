"""Scores answers that can be verified: the last number of a text against the right one."""

from __future__ import annotations

import re
from decimal import Decimal

_TRACE = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_NUMBER = re.compile(
    r"""
    (?:(?<![\w)])[-+])?                      # a sign, but not the minus of 12-7
    (?:
        [0-9]{1,3}(?:,[0-9]{3})+(?![0-9])    # 1,234,567
        | [0-9]+
    )
    (?:\.[0-9]+)?
    """,
    re.VERBOSE,
)


def last_number(text: str) -> Decimal | None:
    """The last number of a text, however it is written: ``1,234``, ``+72`` and ``72.0`` are 1234, 72 and 72.

    What stands between ``<think>`` and ``</think>`` does not count, nor what follows a ``<think>`` without an end.

    Returns:
        The number; None if there is none.
    """
    numbers = _NUMBER.findall(_TRACE.sub(" ", text).replace("\u2212", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def exact_number(text: str, answer: str) -> float:
    """1 if the last number of ``text`` is ``answer``, else 0.

    Raises:
        ValueError: if ``answer`` holds no number, so that nothing could be right.
    """
    right = last_number(answer)
    if right is None:
        raise ValueError(f"the answer {answer!r} of a prompt holds no number")
    return float(last_number(text) == right)
