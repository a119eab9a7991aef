"""The task of ``make grpo``: an exercise sheet with several sums a line, and single sums as problems for GRPO.

A model that has read the sheet answers a sum, and mostly goes on with the next one, as the sheet does. The last number
that it writes is wrong then. GRPO teaches it to stop, and better sums. Those that are held out are on the sheet too;
GRPO never asks them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

HELD_OUT = 6
LAST_OF_LINE = 0.35  # probability of a sum to be that
_NUMBERS = range(1, 7)

Sum = tuple[int, int]


def split(seed: int) -> tuple[list[Sum], list[Sum]]:
    """The sums that GRPO asks, and those that are held out."""
    sums = [(a, b) for a in _NUMBERS for b in _NUMBERS]
    random.Random(seed).shuffle(sums)  # noqa: S311
    return sums[HELD_OUT:], sums[:HELD_OUT]


def sheet(number: int, seed: int) -> bytes:
    """The text to pretrain on, of lines such as ``6+5=11 3+3=6``, with ``number`` sums in all."""
    draw = random.Random(seed)  # noqa: S311
    written = []
    for _ in range(number):
        a, b = draw.choice(_NUMBERS), draw.choice(_NUMBERS)
        written.append(f"{a}+{b}={a + b}" + ("\n" if draw.random() < LAST_OF_LINE else " "))
    return "".join(written).encode()


def write_problems(path: Path, sums: Sequence[Sum]) -> None:
    """The file that ``--grpo-prompts`` reads. A prompt starts where a line does, as the model has learnt to read."""
    lines = [json.dumps({"prompt": f"\n{a}+{b}=", "answer": str(a + b)}) for a, b in sums]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
