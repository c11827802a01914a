"""Charts as SVG to be put into a page: their colours are those of the page, light or dark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import StringIO
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

SERIES = 6
MARKERS = "osD^vP"
# Colours that stand for those of the page until the drawing is written.
TEXT, GRID = "#010203", "#040506"
COLOURS = tuple(f"#0a0b{number:02x}" for number in range(SERIES))
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "specheads", "font.family": "sans-serif", "font.size": 11, "text.color": TEXT,
    "axes.labelcolor": TEXT, "axes.edgecolor": GRID, "xtick.color": TEXT, "ytick.color": TEXT, "axes.grid": True,
    "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "figure.constrained_layout.use": True, "lines.linewidth": 1.8, "lines.markersize": 5, "axes.titlesize": 10,
}  # fmt: skip
WIDTH, HEIGHT = 4.7, 3.0  # inches; a page shows them about so large


@dataclass(frozen=True)
class Points:
    """A line of a chart, or a set of bars.

    Args:
        name: Of the series.
        x: Where the points are: numbers, or for bars the names of the places.
        y: The values.
        low: The lower ends of their intervals; `None` where there is none.
        high: The upper ends.
    """

    name: str
    x: Sequence[Any]
    y: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


def legend_of(series: Sequence[Points]) -> list[tuple[str, str]]:
    """The colours and names of some series; none if there is but one."""
    return [(f"s{place % SERIES + 1}", points.name) for place, points in enumerate(series)] if len(series) > 1 else []


def lines(
    series: Sequence[Points],
    x_label: str,
    y_label: str,
    *,
    percent: bool = False,
    level: float | None = None,
    zero: bool = True,
) -> str:
    """Lines over whole numbers.

    Args:
        series: The lines.
        x_label: What the numbers are.
        y_label: What is measured, with its unit.
        percent: Whether values are shares.
        level: Where to draw a line across.
        zero: Whether the axis begins at 0.
    """
    with rc_context(STYLE):
        figure, axes = _figure(HEIGHT)
        places = sorted({number for points in series for number in points.x})
        has_whiskers = any(end is not None for points in series for end in points.low)
        step = 0.012 * (places[-1] - places[0]) if has_whiskers else 0.0  # else they would hide one another
        for place, points in enumerate(series):
            colour, marker = COLOURS[place % SERIES], MARKERS[place % SERIES]
            at = [number + step * (place - (len(series) - 1) / 2) for number in points.x]
            axes.plot(at, points.y, color=colour, marker=marker)
            _whiskers(axes, points, at, colour, upright=True)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_xticks(places)
        axes.grid(axis="x", visible=False)
        if percent:
            axes.set_ylim(0, 1.02)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        elif zero:
            axes.set_ylim(bottom=0)
        if level is not None:
            axes.set_ylim(top=max(axes.get_ylim()[1], 1.08 * level))  # in sight also where all values are below it
            axes.axhline(level, color=TEXT, linewidth=1, linestyle=(0, (4, 3)))
        return _drawing(figure)


def columns(series: Sequence[Points], x_label: str, y_label: str) -> str:
    """Upright bars over whole numbers, side by side; values are shares."""
    with rc_context(STYLE):
        figure, axes = _figure(HEIGHT)
        width = 0.8 / len(series)
        for place, points in enumerate(series):
            left = [number - 0.4 + width * (place + 0.5) for number in points.x]
            axes.bar(left, points.y, width * 0.92, color=COLOURS[place % SERIES])
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_xticks(sorted({number for points in series for number in points.x}))
        axes.grid(axis="x", visible=False)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        return _drawing(figure)


def bars(series: Sequence[Points], x_label: str, *, level: float | None = None, digits: int = 2) -> str:
    """Lying bars, one group for each name, with the intervals and the values.

    Args:
        series: Their `x` are the names.
        x_label: What is measured, with its unit.
        level: Where to draw a line across.
        digits: After the point.
    """
    names = list(dict.fromkeys(name for points in series for name in points.x))
    with rc_context(STYLE):
        figure, axes = _figure(0.9 + 0.24 * len(names) * len(series) + 0.16 * len(names))
        height = 0.84 / len(series)
        for place, points in enumerate(series):
            at = [names.index(name) - 0.42 + height * (place + 0.5) for name in points.x]
            axes.barh(at, points.y, height * 0.9, color=COLOURS[place % SERIES])
            _whiskers(axes, points, at, TEXT, upright=False)
            ends = [max(value, high or 0.0) for value, high in zip(points.y, points.high or points.y, strict=True)]
            for row, value, end in zip(at, points.y, ends, strict=True):
                axes.annotate(f"{value:.{digits}f}", (end, row), (4, 0), textcoords="offset points", va="center", fontsize=10)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel(x_label)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.14)
        axes.set_xlim(left=0)
        if level is not None:
            axes.axvline(level, color=TEXT, linewidth=1, linestyle=(0, (4, 3)))
        return _drawing(figure)


def shares(names: Sequence[str], parts: Mapping[str, Sequence[float]], x_label: str) -> str:
    """Lying bars of which each is a whole, divided into parts."""
    with rc_context(STYLE):
        figure, axes = _figure(0.9 + 0.36 * len(names))
        left = [0.0] * len(names)
        for place, values in enumerate(parts.values()):
            axes.barh(range(len(names)), values, 0.66, left=left, color=COLOURS[place % SERIES])
            left = [start + value for start, value in zip(left, values, strict=True)]
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_xlabel(x_label)
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        return _drawing(figure)


def dots(series: Sequence[Points], x_label: str, *, level: float, least: float) -> str:
    """Points on a logarithmic axis, one line of them for each series.

    Args:
        series: Their `y` are the values; what is below `least` stands there.
        x_label: What is measured.
        level: Where to draw a line across.
        least: Where the axis begins.
    """
    with rc_context(STYLE):
        figure, axes = _figure(0.9 + 0.36 * len(series))
        for row, points in enumerate(series):
            values = [max(least, value) for value in points.y]
            axes.plot(values, [row] * len(values), "o", color=COLOURS[row % SERIES], markersize=6, alpha=0.75)
        axes.set_yticks(range(len(series)), [points.name for points in series])
        axes.set_ylim(len(series) - 0.5, -0.5)
        axes.set_xscale("log")
        axes.set_xlim(least * 0.7, 1.4)
        axes.set_xlabel(x_label)
        axes.grid(axis="y", visible=False)
        axes.axvline(level, color=TEXT, linewidth=1, linestyle=(0, (4, 3)))
        return _drawing(figure)


def _figure(height: float) -> tuple[Any, Any]:
    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.add_subplot()


def _whiskers(axes: Any, points: Points, at: Sequence[float], colour: str, *, upright: bool) -> None:
    ends = zip(at, points.y, points.low, points.high, strict=False)
    held = [(place, value, low, high) for place, value, low, high in ends if low is not None and high is not None]
    if not held:
        return
    places, values, lows, highs = zip(*held, strict=True)
    below = [max(0.0, value - low) for value, low in zip(values, lows, strict=True)]
    above = [max(0.0, high - value) for value, high in zip(values, highs, strict=True)]
    which = (
        {"x": places, "y": values, "yerr": (below, above)} if upright else {"x": values, "y": places, "xerr": (below, above)}
    )
    axes.errorbar(**which, fmt="none", ecolor=colour, elinewidth=1.2, capsize=2.5)


def _drawing(figure: Any) -> str:
    written = StringIO()
    figure.savefig(
        written, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1)
    svg = svg.replace("<svg ", '<svg aria-hidden="true" ', 1)
    # Several drawings stand in one page: their names must not be each other's.
    own = f"d{sha256(svg.encode()).hexdigest()[:8]}-"
    svg = re.sub(r'\bid="', f'id="{own}', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{own}", svg)
    stands_for = {TEXT: "var(--text)", GRID: "var(--grid)"}
    stands_for |= {colour: f"var(--s{number})" for number, colour in enumerate(COLOURS, start=1)}
    for placeholder, colour in stands_for.items():
        svg = svg.replace(placeholder, colour)
    return svg
