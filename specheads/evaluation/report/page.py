"""What a page consists of, and how it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .tokens import TextView


@dataclass(frozen=True)
class Verdict:
    """What the result says, in words.

    Args:
        tone: `"good"`, `"bad"` or `"open"`.
        headline: One sentence.
        sentences: What goes with it.
    """

    tone: str
    headline: str
    sentences: Sequence[str] = ()


@dataclass(frozen=True)
class Figure:
    """A figure that is to be seen at first sight.

    Args:
        value: With its unit.
        label: What it is.
        note: Its interval, or what it is made of.
    """

    value: str
    label: str
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart.

    Args:
        title: What it shows.
        svg: The drawing.
        legend: Its series: the name of the colour (`s1`, `s2`, ...) and the name.
        note: How to read it.
    """

    title: str
    svg: str
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table; its first column is text, the others are figures.

    Args:
        title: What it shows.
        columns: Their heads.
        rows: The cells.
        note: How to read it.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass
class Page:
    """A report.

    Args:
        title: What was measured.
        subtitle: Of which model, on what.
        verdict: What came out.
        figures: What is to be seen at first sight.
        tables: The figures of all variants.
        charts: The drawings.
        texts: Texts with their drafts.
        provenance: Where the result comes from.
    """

    title: str
    subtitle: str
    verdict: Verdict
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    texts: list[TextView] = field(default_factory=list)
    provenance: list[Mapping[str, str]] = field(default_factory=list)


def render(page: Page) -> str:
    """The page as HTML."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["drawing"] = Markup  # drawn here, its texts escaped by matplotlib
    here = files(__package__)
    template = environment.from_string(here.joinpath("page.html.jinja").read_text(encoding="utf-8"))
    style = here.joinpath("style.css").read_text(encoding="utf-8")
    arguments: dict[str, Any] = {"page": page, "style": Markup(style)}
    return template.render(**arguments)
