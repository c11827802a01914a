"""Results as a page: one HTML file that needs no network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ..prompts import InputError

PACKAGES = ("jinja2", "matplotlib")


def write_report(results: Sequence[Path], output: Path) -> None:
    """Makes a page of measured results.

    Args:
        results: JSON files of `eval/speed.py`, `eval/acceptance.py` or `eval/exactness.py`, all of one kind. Of several speed
            measurements the speed-up is shown against their draft lengths.
        output: The HTML file. It appears whole or not at all.

    Raises:
        InputError: if a package is missing, or a file holds no such result.
        OSError: if the page cannot be written.
    """
    check_packages(output)
    from .page import render
    from .reading import page_of, read_results

    html = render(page_of(read_results(results)))
    if output.is_dir():
        raise InputError(f"The report goes into a file, and {output} is a folder; name a file in it.")
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f"{output.name}.unfinished")
    unfinished.write_text(html, encoding="utf-8")
    os.replace(unfinished, output)


def check_packages(report: Path | None) -> None:
    """Raises `InputError` if a report is wanted and a package for it is missing."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if report is not None and missing:
        raise InputError(f'A report needs {" and ".join(missing)}: run `pip install "specheads[report]"`.')
