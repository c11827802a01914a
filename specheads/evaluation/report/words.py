"""Figures in words and cells, and names that fit into a legend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..variants import BETWEEN_MODELS, HEAD_ALONE

Interval = Mapping[str, Any]
NOTHING = "\u2013"  # in a cell
TIMES = "\u00d7"
NONDESCRIPT = re.compile(r"(head|checkpoint-\d+)\b")


def with_interval(interval: Interval, unit: str = "") -> str:
    """A figure with its interval, as in `1.52 [1.40, 1.63]`."""
    value, low, high = interval["value"], interval["low"], interval["high"]
    return f"{value:.2f}{unit}" if low is None else f"{value:.2f}{unit} [{low:.2f}, {high:.2f}]"


def share(value: float | None) -> str:
    """A share in per cent, a small one with a digit after the point."""
    if value is None:
        return NOTHING
    return f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"


def short_name(name: str) -> str:
    """A variant's name, without the folders before those of its models."""
    kind, colon, place = name.partition(":")
    places = place.split(BETWEEN_MODELS) if kind == "tree" else [place]
    shown = BETWEEN_MODELS.join(map(_telling_part_of, places))
    if kind == HEAD_ALONE:
        return f"head alone: {shown}"
    return f"{kind}:{shown}" if colon else name


def _telling_part_of(place: str) -> str:
    """The last part of a folder, with the one before it where the last could be anyone's, as in `toy/head`."""
    last = last_of(place)
    before = place.rstrip("/\\")[: -len(last)]
    return f"{last_of(before)}/{last}" if NONDESCRIPT.match(last) and last_of(before) else last


def last_of(place: str) -> str:
    """The last part of a folder or an id."""
    return re.split(r"[/\\]", place.rstrip("/\\"))[-1]


def model_of(result: Mapping[str, Any]) -> str:
    """The model that was measured."""
    name = result["settings"].get("model")
    return "SmolLM2-135M-Instruct" if name is None else last_of(str(name))


def machine_of(result: Mapping[str, Any]) -> str:
    """What it was measured on."""
    made = result["provenance"]
    device = made.get("device", "")
    where = made.get("device_name") or device
    if str(device).startswith("cpu"):
        where = f"CPU, {made.get('threads')} thread{'' if made.get('threads') == 1 else 's'}"
    dtype = str(made.get("dtype", "")).removeprefix("torch.")
    return ", ".join(part for part in (where, dtype, str(made.get("written", ""))[:10]) if part)


def way_of(temperature: float) -> str:
    """How tokens were chosen."""
    return "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}"
