"""How values appear in a model card: whatever they hold, they stay text in their place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..evaluation.intervals import Interval

# What Markdown would take for its own, in running text and in table cells.
MARKDOWN = re.compile(r"([\\`*_\[\]|~$#!{}])")
NOTHING = "-"


def one_line(value: Any) -> str:
    """A value on one line, without control characters."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in str(value)).split())


def text(value: Any) -> str:
    """A value as plain text of a card; nothing for `None`."""
    if value is None:
        return ""
    escaped = one_line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return MARKDOWN.sub(r"\\\1", escaped).replace("://", "&#58;//")


def literal(value: Any) -> str:
    """A value as a string in a line of Python."""
    return json.dumps(one_line(value), ensure_ascii=False)


def interval(value: Interval | None) -> str:
    """A figure with its interval."""
    if value is None:
        return NOTHING
    if value.low is None or value.high is None:
        return f"{value.value:.2f}"
    return f"{value.value:.2f} ({value.low:.2f} to {value.high:.2f})"


def shares(values: Iterable[float]) -> str:
    """Shares, in order."""
    return ", ".join(f"{value:.2f}" for value in values) or NOTHING


def settings(values: Mapping[str, Any]) -> str:
    """Settings by name."""
    return ", ".join(f"{text(name)}={text(value)}" for name, value in values.items()) or NOTHING


def names(values: Iterable[str]) -> str:
    """Names, in order."""
    return ", ".join(text(value) for value in values) or "not recorded"


def environment(record: Any) -> str:
    """The versions, and the device and precision if they are there, of a mapping or a record."""
    fields = record if isinstance(record, Mapping) else vars(record)
    versions = [f"{name} {value}" for name, value in (fields.get("versions") or {}).items() if value]
    places = [str(fields[name]) for name in ("device_name", "device", "dtype", "written") if fields.get(name)]
    return names([*versions, *places])


FILTERS = {
    "text": text,
    "line": one_line,
    "literal": literal,
    "interval": interval,
    "shares": shares,
    "settings": settings,
    "names": names,
    "environment": environment,
}
