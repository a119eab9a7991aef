"""Scores verifiable answers: compares the last number of a text with the correct one."""

from __future__ import annotations

import re
from decimal import Decimal

_TRACE = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_NUMBER = re.compile(
    r"""
    (?:(?<![\w)])[-+]\$?)?                   # a sign, but not the minus of 12-7
    (?:
        (?:
            [0-9]{1,3}(?:,[0-9]{3})+(?![0-9])    # 1,234,567
            | [0-9]+
        )
        (?:\.[0-9]+)?
        | (?<![\w.])\.[0-9]+                 # .5, but not the end of a sentence or an ellipsis before a number
    )
    (?:[eE][-+]?[0-9]{1,3}(?![0-9]))?        # 1.5e3
    """,
    re.VERBOSE,
)


def last_number(text: str) -> Decimal | None:
    """The last number of a text in any notation: ``1,234``, ``+72``, ``72.0``, ``.5``, ``-$3``, ``2e3``.

    Text between ``<think>`` and ``</think>`` is ignored, and so is text after an unclosed ``<think>``, and text before
    a ``</think>`` whose ``<think>`` is in the prompt.

    Returns:
        The number; None if there is none.
    """
    said = _TRACE.sub(" ", text).rpartition("</think>")[2]
    numbers = _NUMBER.findall(said.replace("\u2212", "-"))
    return Decimal(re.sub("[,$]", "", numbers[-1])) if numbers else None


def exact_number(text: str, answer: str) -> float:
    """1 if the last number of ``text`` is ``answer``, otherwise 0.

    Raises:
        ValueError: if ``answer`` contains no number, so that no answer could be correct.
    """
    right = last_number(answer)
    if right is None:
        raise ValueError(f"the answer {answer!r} of a prompt holds no number")
    return float(last_number(text) == right)
