"""Tables: through `rich` on a terminal where that is installed, else plain, as wide as they need."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # rich is imported where it is used: without it, tables are plain
    from rich.table import Table

FRAME = 3  # what a column of rich takes beside its text: a line and a space on either side


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

    console = Console()
    console.print(framed_table(title, columns, rows, console.width))
    if caption:
        console.print(caption, style="dim", highlight=False, markup=False)


def framed_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> Table:
    """A table of rich that breaks lines between words, unless the words alone are too wide.

    Args:
        title: Above it.
        columns: The heads.
        rows: The cells.
        room: How wide it may be.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    widths = _widths(columns, rows, room - FRAME * len(columns) - 1)
    for place, (column, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(column, justify="left" if place == 0 else "right", overflow="fold", width=width)
    for row in rows:
        table.add_row(*row)
    return table


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> Sequence[int | None]:
    """How wide columns are in so much room; `None` leaves it to rich, which would break words in some that need not be."""
    from rich.cells import cell_len

    texts = [(column, *(row[place] for row in rows)) for place, column in enumerate(columns)]
    widths = [max(map(cell_len, column)) for column in texts]
    least = [max(cell_len(word) for text in column for word in text.split() or [""]) for column in texts]
    if sum(least) > room:
        return [None] * len(columns)
    while sum(widths) > room:
        # The first column has the names of the rows, which read best in one line.
        place = max(range(len(widths)), key=lambda place: (widths[place] > least[place], place > 0, widths[place]))
        widths[place] -= 1
    return widths


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
