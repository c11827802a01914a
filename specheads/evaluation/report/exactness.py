"""The page of exactness tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..speed_tables import greedy_cell
from .charts import Points, dots
from .page import Chart, Figure, Page, Table, Verdict
from .words import NOTHING, machine_of, model_of, short_name

Result = Mapping[str, Any]
LEAST = 1e-12  # what is less probable is drawn there


def exactness_page(results: Sequence[Result]) -> Page:
    """The page of exactness tests.

    Args:
        results: What `eval/exactness.py` wrote.
    """
    first = results[0]
    page = Page(
        title="Exactness of speculative decoding",
        subtitle=f"{model_of(first)} · {machine_of(first)}",
        verdict=_verdict(results),
        figures=_figures(results),
    )
    for result in results:
        page.tables.append(_variants(result))
        page.tables.append(_prompts(result))
        page.charts += _p_values(result)
    return page


def _verdict(results: Sequence[Result]) -> Verdict:
    passed = all(result["passed"] for result in results)
    verdicts = [entry["verdict"] for result in results for entry in result["results"]]
    if passed:
        headline = "Exact: no difference from the target alone was found, and the tests would have seen one."
    elif "not exact" in verdicts:
        headline = "Not exact: the output differs from that of the target alone."
    else:
        headline = "Nothing was shown: a control with a known fault was not seen, so the tests are too weak."
    tone = "good" if passed else "bad" if "not exact" in verdicts else "open"
    return Verdict(tone, headline, [sentence for result in results for sentence in result["words"]])


def _figures(results: Sequence[Result]) -> list[Figure]:
    power = results[0]["power"]
    entries = [entry for result in results for entry in result["results"]]
    greedy = [entry["greedy"] for entry in entries if entry.get("greedy")]
    rows, identical = (sum(compared[name] for compared in greedy) for name in ("rows", "identical"))
    tests = sum(len(entry["sampling"]) for entry in entries)
    rejected = sum(test["is_rejected"] for entry in entries for test in entry["sampling"])
    return [
        Figure(f"{identical} of {rows}", "greedy texts with plain generation's very tokens"),
        Figure(
            f"{tests - rejected} of {tests}", "sampling laws that agree with the target's", f"G-test, level {power['level']:g}"
        ),
        Figure(f"{power['samples']:,}", "samples for each test"),
        Figure(
            f"{power['total_variation']:.3f}",
            "total variation that would be seen",
            f"with probability {power['probability']:.0%}, at the worst prompt",
        ),
    ]


def _variants(result: Result) -> Table:
    columns = ("drafter", "verdict", "greedy texts", "least p-value", "drafted tokens", "accepted", "control")
    rows = []
    for entry in result["results"]:
        sampling, control = entry["sampling"], entry["control"]
        drafted, accepted = (sum(test[name] for test in sampling) for name in ("num_draft_tokens", "num_accepted_draft_tokens"))
        rows.append(
            [
                short_name(entry["variant"]),
                entry["verdict"],
                greedy_cell(entry["greedy"]) or NOTHING,
                f"{min(test['p_value'] for test in sampling):.2g}" if sampling else NOTHING,
                f"{drafted:,}",
                f"{accepted:,}",
                NOTHING if not control else "seen" if any(test["is_rejected"] for test in control) else "not seen",
            ]
        )
    note = "Control: the same with drafts that lie about the law they were drawn from, which the test has to reject."
    return Table("All drafters", columns, rows, note)


def _prompts(result: Result) -> Table:
    columns = ("prompt", "tokens of the law", "cells", "total variation seen")
    rows = [
        [str(prompt["name"]), str(prompt["tokens"]), f"{prompt['cells']:,}", f"{prompt['total_variation']:.3f}"]
        for prompt in result["prompts"]
    ]
    probability = result["power"]["probability"]
    note = f"Total variation seen: the least distance of a wrong law that is rejected with probability {probability:.0%}."
    return Table("What the tests can see", columns, rows, note)


def _p_values(result: Result) -> list[Chart]:
    tested = [entry for entry in result["results"] if entry["sampling"]]
    if not tested:
        return []
    level = result["power"]["level"] / max(1, result["power"]["tests"])
    series = [Points(short_name(entry["variant"]), [], [test["p_value"] for test in entry["sampling"]]) for entry in tested]
    least = max(LEAST, min(level / 10, *(value for points in series for value in points.y)))
    drawing = dots(series, "p-value of the G-test (logarithmic)", level=level, least=least)
    return [Chart("Sampling laws against the target's", drawing, (), "A point per prompt. Dashed: below it a law is rejected.")]
