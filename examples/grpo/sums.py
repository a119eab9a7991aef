"""Defines the task of ``make grpo``: a sheet with several sums per line, and single sums as problems for GRPO.

A model pretrained on the sheet answers a sum, but mostly continues with the next one, as the sheet does, so its last
number is wrong. GRPO teaches it to stop and to add better. The held-out sums are also on the sheet, but GRPO never uses
them as prompts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

HELD_OUT = 6
LAST_OF_LINE = 0.25  # probability that a sum ends its line
_NUMBERS = range(1, 7)

Sum = tuple[int, int]


def split(seed: int) -> tuple[list[Sum], list[Sum]]:
    """The sums that GRPO trains on, and the held-out ones."""
    sums = [(a, b) for a in _NUMBERS for b in _NUMBERS]
    random.Random(seed).shuffle(sums)  # noqa: S311
    return sums[HELD_OUT:], sums[:HELD_OUT]


def sheet(number: int, seed: int) -> bytes:
    """The pretraining text, with lines such as ``6+5=11 3+3=6``, with ``number`` sums in all."""
    draw = random.Random(seed)  # noqa: S311
    written = []
    for _ in range(number):
        a, b = draw.choice(_NUMBERS), draw.choice(_NUMBERS)
        written.append(f"{a}+{b}={a + b}" + ("\n" if draw.random() < LAST_OF_LINE else " "))
    return "".join(written).encode()


def write_problems(path: Path, sums: Sequence[Sum]) -> None:
    """Write the file that ``--grpo-prompts`` reads. Each prompt starts like a line of the pretraining text."""
    lines = [json.dumps({"prompt": f"\n{a}+{b}=", "answer": str(a + b)}) for a, b in sums]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
