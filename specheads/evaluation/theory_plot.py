"""A picture of the founding formulas: `python -m specheads.evaluation.theory_plot docs/images/theory.svg`.

The same values give the same file, byte by byte, as long as matplotlib is the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from ..theory import best_draft_length, expected_tokens, speedup

LENGTHS = range(17)  # K
RATES = (0.5, 0.6, 0.7, 0.8, 0.9)  # α
RATE, COSTS = 0.8, (0.01, 0.05, 0.1, 0.3)  # of the second chart: α, and c
COLOURS = ("#0b6e99", "#c2570c", "#2f7d32", "#7b3fa0", "#a3123a")
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "specheads", "font.family": "sans-serif", "font.size": 10, "axes.grid": True,
    "grid.color": "#d9d9d9", "grid.linewidth": 0.7, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "figure.constrained_layout.use": True, "lines.linewidth": 1.8,
}  # fmt: skip


def tokens_by_length() -> dict[float, list[float]]:
    """Per acceptance rate α, the tokens of a round for each K of `LENGTHS`."""
    return {alpha: [expected_tokens(alpha, k) for k in LENGTHS] for alpha in RATES}


def speed_by_length() -> dict[float, list[float]]:
    """Per cost c of a drafted token, the speed-up at α = `RATE` for each K of `LENGTHS`."""
    return {c: [speedup(RATE, k, c) for k in LENGTHS] for c in COSTS}


def draw() -> bytes:
    """The picture, as SVG."""
    with rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.4), facecolor="white")
        left, right = figure.subplots(1, 2)
        _lines(left, tokens_by_length(), "α = {:g}")
        left.set(xlabel="K, tokens drafted", ylabel="tokens per round", title="What a round emits")
        _lines(right, speed_by_length(), "c = {:g}")
        right.axhline(1, color="#555555", linewidth=0.8, linestyle="--")
        best = [min(best_draft_length(RATE, c), LENGTHS[-1]) for c in COSTS]
        right.scatter(best, [speedup(RATE, k, c) for k, c in zip(best, COSTS, strict=True)], color="black", zorder=3, s=22)
        right.set(xlabel="K, tokens drafted", ylabel="speed against plain", title=f"What it brings, α = {RATE:g}")
        written = BytesIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return written.getvalue()


def _lines(axes: Any, curves: Mapping[float, Sequence[float]], label: str) -> None:
    for colour, (value, points) in zip(COLOURS, curves.items(), strict=False):
        axes.plot(LENGTHS, points, color=colour)
        axes.annotate(
            label.format(value), (LENGTHS[-1], points[-1]), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9,
            color=colour,
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, LENGTHS[-1] + 3.5)
    axes.set_xticks(LENGTHS[::4])


def main(path: Path) -> None:
    """Writes the picture.

    Args:
        path: The file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(draw())
    os.replace(unfinished, path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Name the file to write: python -m specheads.evaluation.theory_plot theory.svg")
    main(Path(sys.argv[1]))
