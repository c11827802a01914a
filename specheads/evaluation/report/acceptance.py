"""The page of acceptance measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..intervals import few_prompts_note
from ..variants import HEAD
from .charts import Points, bars, legend_of, lines
from .page import Chart, Figure, Page, Table, Verdict
from .positions import position_charts
from .words import NOTHING, machine_of, model_of, share, short_name, way_of, with_interval

Result = Mapping[str, Any]
Entry = Mapping[str, Any]
MOST_LINES, MOST_SHOWN = 6, 4
ORDINALS = ("1st", "2nd", "3rd")
WHISKERS = "Whiskers: bootstrap 95% intervals over prompts. Dashed: plain decoding."
HEADS_EXPLAINED = "head:... drafts with copies of earlier text beside the head, head alone:... with the head only."


def acceptance_page(results: Sequence[Result]) -> Page:
    """The page of acceptance measurements.

    Args:
        results: What `measure_acceptance` wrote; their combinations are shown together.
    """
    first = results[0]
    entries = [entry for result in results for entry in result["results"]]
    names = _names(entries)
    best = max(entries, key=_length)
    ranked = sorted(zip(names, entries, strict=True), key=lambda pair: -_length(pair[1]))[:MOST_SHOWN]
    shown = [pair for pair in zip(names, entries, strict=True) if any(pair[1] is entry for _, entry in ranked)]
    return Page(
        title="Acceptance of drafts",
        subtitle=f"{model_of(first)} · {machine_of(first)}",
        verdict=_verdict(names[entries.index(best)], best, [pair for pair in shown if pair[1] is not best]),
        figures=_figures(best),
        tables=[_table(names, entries)],
        charts=[
            *_by_draft_length(entries),
            _by_category(shown),
            *position_charts({name: entry["figures"] for name, entry in shown}),
        ],
    )


def _length(entry: Entry) -> float:
    value: float = entry["figures"]["mean_acceptance_length"]["value"]
    return value


def _names(entries: Sequence[Entry]) -> list[str]:
    """What tells the combinations apart, and no more."""
    varying = [key for key in ("temperature", "draft_tokens", "tree_nodes") if len({entry[key] for entry in entries}) > 1]
    words = {
        "temperature": lambda value: f"T {value:g}",
        "draft_tokens": lambda value: f"K {value}",
        "tree_nodes": lambda value: "chain" if value is None else f"tree {value}",
    }
    return [", ".join([short_name(entry["variant"]), *(words[key](entry[key]) for key in varying)]) for entry in entries]


def _verdict(name: str, best: Entry, others: Sequence[tuple[str, Entry]]) -> Verdict:
    figures = best["figures"]
    length = figures["mean_acceptance_length"]
    interval = "" if length["low"] is None else f" (95% interval {length['low']:.2f} to {length['high']:.2f})"
    return Verdict(
        "good" if (length["low"] or 0) > 1 else "open",
        f"{name} emits {length['value']:.2f} tokens per pass of the target{interval}, where plain decoding emits 1.",
        [
            f"{share(figures['draft_acceptance_rate'])} of its drafted tokens were accepted. How much faster that makes "
            "generation depends on what drafting and longer passes cost, which specheads eval speed measures.",
            *([f"For comparison: {', '.join(f'{other} {_length(entry):.2f}' for other, entry in others)}."] if others else []),
            *(
                [HEADS_EXPLAINED]
                if any(each.startswith(f"{HEAD}:") for each in (name, *(other for other, _ in others)))
                else []
            ),
        ],
    )


def _figures(best: Entry) -> list[Figure]:
    figures = best["figures"]
    length = figures["mean_acceptance_length"]
    interval = "mean acceptance length" if length["low"] is None else f"95%: {length['low']:.2f} to {length['high']:.2f}"
    drafted = f"{figures['num_accepted_draft_tokens']:,} of {figures['num_draft_tokens']:,}"
    first = figures["acceptance_at_position"][:1]
    volume = f"{figures['num_emitted_tokens']:,} tokens, {figures['num_spec_steps']:,} rounds"
    return [
        Figure(f"{length['value']:.2f}", "tokens per round, of the best drafter", interval),
        Figure(share(figures["draft_acceptance_rate"]), "of drafted tokens accepted", drafted),
        Figure(share(first[0] if first else None), "of first drafted tokens accepted"),
        Figure(f"{figures['prompts']:,}", "prompts", volume),
    ]


def _table(names: Sequence[str], entries: Sequence[Entry]) -> Table:
    shown = max(min(len(entry["figures"]["acceptance_at_position"]), len(ORDINALS)) for entry in entries)
    columns = ("drafter", "tokens", "K", "draft", "tokens/round", "accepted", *ORDINALS[:shown])
    rows = []
    for entry in entries:
        figures = entry["figures"]
        positions = [share(value) for value in figures["acceptance_at_position"][:shown]]
        rows.append(
            [
                short_name(entry["variant"]),
                way_of(entry["temperature"]),
                str(entry["draft_tokens"]),
                "chain" if entry["tree_nodes"] is None else f"tree of {entry['tree_nodes']}",
                with_interval(figures["mean_acceptance_length"]),
                share(figures["draft_acceptance_rate"]),
                *positions,
                *[NOTHING] * (shown - len(positions)),
            ]
        )
    note = (
        "K: the most tokens drafted along a path; drafts are as long as they may be. Tokens/round (mean acceptance length): "
        "emitted tokens / rounds, [ ] bootstrap 95% intervals over prompts. Accepted: accepted / drafted tokens. 1st and so "
        "on: acceptance at the position, all before it included."
    )
    return Table("All combinations", columns, rows, note)


def _by_draft_length(entries: Sequence[Entry]) -> list[Chart]:
    """Mean acceptance length against K, for each other setting a line."""
    lengths = sorted({entry["draft_tokens"] for entry in entries})
    if len(lengths) < 2:
        return []
    groups: dict[str, list[Entry]] = {}
    for name, entry in zip(_names([{**entry, "draft_tokens": None} for entry in entries]), entries, strict=True):
        groups.setdefault(name, []).append(entry)
    series = [
        _points(name, [entry["draft_tokens"] for entry in group], [entry["figures"] for entry in group])
        for name, group in list(groups.items())[:MOST_LINES]
    ]
    drawing = lines(series, "K, the most tokens drafted in a round", "emitted tokens per round", level=1.0)
    return [Chart("Tokens per round by draft length", drawing, legend_of(series), WHISKERS)]


def _by_category(shown: Sequence[tuple[str, Entry]]) -> Chart:
    series = []
    for name, entry in shown:
        groups = {"all": entry["figures"]} | (entry["categories"] if len(entry["categories"]) > 1 else {})
        series.append(_points(name, list(groups), list(groups.values())))
    drawing = bars(series, "emitted tokens per round", level=1.0)
    few = few_prompts_note(own["prompts"] for _, entry in shown for own in entry["categories"].values())
    return Chart("Tokens per round by category", drawing, legend_of(series), f"{WHISKERS} {few}".rstrip())


def _points(name: str, places: Sequence[Any], figures: Sequence[Mapping[str, Any]]) -> Points:
    intervals = [group["mean_acceptance_length"] for group in figures]
    values, lows, highs = ([interval[end] for interval in intervals] for end in ("value", "low", "high"))
    return Points(name, places, values, lows, highs)
