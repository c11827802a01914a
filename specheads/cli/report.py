"""`specheads report`: results as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[
        list[Path], typer.Argument(help="JSON files of `specheads eval`; several of one kind are put together.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Make an HTML page of measured results: one file, which needs no network."""
    from ..evaluation.report import write_report

    write_report(results, output)
    typer.echo(f"Written to {output}")
