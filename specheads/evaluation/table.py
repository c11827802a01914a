"""Tables: through `rich` on a terminal where that is installed, else plain, as wide as they need."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """Prints a table; the first column is text, the others are figures.

    Args:
        title: Above it.
        columns: The heads.
        rows: The cells.
        caption: Below it.
    """
    if not sys.stdout.isatty() or find_spec("rich") is None:
        print(plain_table(title, columns, rows, caption))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    if caption:
        console.print(caption, style="dim", highlight=False, markup=False)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """The same as text.

    Args:
        title: Above it.
        columns: The heads.
        rows: The cells.
        caption: Below it.
    """
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    printed = [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([title, printed[0], "-" * len(printed[0]), *printed[1:], *([caption] if caption else [])])


def interval_cell(interval: Mapping[str, Any]) -> str:
    """A figure with its interval, as the results hold it."""
    value, low, high = (interval[key] for key in ("value", "low", "high"))
    return f"{value:.2f}" if low is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"
