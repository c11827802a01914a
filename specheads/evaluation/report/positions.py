"""The charts of what rounds accept, which speed and acceptance share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .charts import Points, columns, legend_of, lines
from .page import Chart

LEAST_ROUNDS = 10  # a share of fewer is noise


def position_charts(counts: Mapping[str, Mapping[str, Any]]) -> list[Chart]:
    """Acceptance by position, both ways of counting it, and the histogram of accepted lengths.

    Args:
        counts: For each series the figures under the names of `SpeculationStats`.
    """
    drafting = {name: figures for name, figures in counts.items() if figures.get("num_draft_tokens")}
    drafting = {name: figures for name, figures in drafting.items() if figures.get("acceptance_at_position")}
    if not drafting:
        return []
    charts = []
    for key, title, note in (
        (
            "acceptance_at_position",
            "Accepted, by position in the draft",
            "Of the rounds that drafted so far, those in which this token and all before it were accepted.",
        ),
        (
            "conditional_acceptance_at_position",
            "Accepted, once all before it were",
            "Of the rounds that drafted so far and accepted all before it, those in which this token was accepted as well.",
        ),
    ):
        series = [_by_position(name, figures, key) for name, figures in drafting.items()]
        drawing = lines(series, "position in the draft", "share accepted", percent=True)
        charts.append(
            Chart(title, drawing, legend_of(series), f"{note} Positions with fewer than {LEAST_ROUNDS} rounds left out.")
        )
    series = [_histogram(name, figures["acceptance_histogram"]) for name, figures in drafting.items()]
    drawing = columns(series, "drafted tokens accepted in a round", "share of rounds")
    note = (
        "A round emits these and one token of the target's own. The pass over the prompt counts as a round that accepts none."
    )
    charts.append(Chart("Accepted tokens per round", drawing, legend_of(series), note))
    return charts


def _by_position(name: str, figures: Mapping[str, Any], key: str) -> Points:
    drafted, accepted = figures["drafted_to_position"], figures["acceptance_at_position"]
    # Of so many rounds a share is: those that drafted so far, or for the conditional one those that also accepted all before.
    rounds = list(drafted) if key == "acceptance_at_position" else _reached(drafted, accepted, figures[key])
    held = [place for place, count in enumerate(rounds) if count >= LEAST_ROUNDS] or [0]
    return Points(name, [place + 1 for place in held], [figures[key][place] for place in held])


def _reached(drafted: Sequence[int], joint: Sequence[float], conditional: Sequence[float]) -> list[float]:
    """How many rounds reached each position. Where none accepted there, at most those that accepted the one before."""
    found: list[float] = []
    for place, count in enumerate(drafted):
        before = drafted[place - 1] * joint[place - 1] if place else count
        found.append(count * joint[place] / conditional[place] if conditional[place] else before)
    return found


def _histogram(name: str, histogram: list[int]) -> Points:
    rounds = sum(histogram) or 1
    return Points(name, range(len(histogram)), [count / rounds for count in histogram])
