"""Draws a training's loss, in the terminal and as a picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def in_terminal(losses: Sequence[float], width: int = 60, height: int = 8) -> str:
    """The curve as text: a column shows the mean of the steps that share it, to an eighth of a line.

    Args:
        losses: of steps 1, 2 and so on; at least one.
        width: columns of the curve, without the axis.
        height: lines of the curve, without the axis.
    """
    columns = min(width, len(losses))
    edges = [round(column * len(losses) / columns) for column in range(columns + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = math.floor(min(means)), max(math.ceil(max(means)), math.floor(min(means)) + 1)
    eighths = [max(1, round((mean - low) / (high - low) * height * 8)) for mean in means]
    lines = []
    for line in range(height - 1, -1, -1):
        label = f"{high:>6}" if line == height - 1 else f"{low:>6}" if line == 0 else " " * 6
        bars = "".join(_EIGHTHS[min(8, max(0, value - 8 * line))] for value in eighths)
        lines.append(f"{label} │{bars}")
    lines += [f"{'':6} └{'─' * columns}", f"{'loss':>6}  steps 1 to {len(losses)}"]
    return "\n".join(lines)


def draw(losses: Sequence[float], validation: float, path: Path) -> None:
    """Draws the curve as a picture.

    Args:
        losses: of steps 1, 2 and so on.
        validation: loss on held-out data after the last step; not drawn if it is not a number.
        path: where the picture goes; the suffix says the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained", facecolor="white")
    axis = figure.subplots()
    axis.plot(range(1, len(losses) + 1), losses, linewidth=1.2, label="training")
    if not math.isnan(validation):
        axis.plot(len(losses), validation, "o", label=f"held-out files: {validation:.3f}")
    axis.set_title("Quick start: loss of each step", fontsize=10)
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats per byte")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=150)
