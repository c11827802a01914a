"""From result files to a page: which kind they are of, and where they come from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..prompts import InputError
from .acceptance import acceptance_page
from .exactness import exactness_page
from .page import Page
from .speed import speed_page
from .tokens import text_view

Result = Mapping[str, Any]
PAGES: dict[str, Callable[[Sequence[Result]], Page]] = {
    "speed": speed_page,
    "acceptance": acceptance_page,
    "exactness": exactness_page,
}
LESS_OF_INTEREST = ("output", "resume", "report", "texts")


def read_results(paths: Sequence[Path]) -> list[Result]:
    """The results in some files.

    Raises:
        InputError: if a file cannot be read, holds no result, or one of another kind than the first.
    """
    results = [_read(path) for path in paths]
    kinds = [result["kind"] for result in results]
    other = next((place for place, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        raise InputError(
            f"{paths[0]} is a result of {kinds[0]} and {paths[other]} one of {kinds[other]}: make a report for each kind."
        )
    return results


def page_of(results: Sequence[Result]) -> Page:
    """The page of some results of one kind.

    Raises:
        InputError: if they are not whole.
    """
    try:
        page = PAGES[results[0]["kind"]](results)
        page.texts = [text_view(text) for result in results for text in result.get("texts", ())]
        page.provenance = [_provenance(result) for result in results]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"The result of {results[0]['kind']} is not as `specheads eval` writes it ({type(error).__name__}: {error}); "
            "measure anew, or name another file."
        ) from error
    return page


def _read(path: Path) -> Result:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"The result {path} cannot be read: {error}.") from error
    kind = result.get("kind") if isinstance(result, dict) else None
    if not isinstance(kind, str) or kind not in PAGES or "provenance" not in result or "settings" not in result:
        raise InputError(f"{path} holds no result of `specheads eval` {', '.join(PAGES)} (its kind is {kind!r}).")
    return result


def _provenance(result: Result) -> dict[str, str]:
    """What one needs to measure the same again, by name."""
    found = dict(result["provenance"])
    versions = {name: version for name, version in found.pop("versions", {}).items() if version}
    settings = {name: value for name, value in result["settings"].items() if name not in LESS_OF_INTEREST and value is not None}
    lines = {
        "command": found.pop("command", ""),
        "measured": found.pop("written", ""),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "settings": ", ".join(f"{name} {value}" for name, value in settings.items()),
    }
    return lines | {name.replace("_", " "): str(value) for name, value in found.items() if value not in (None, "")}
