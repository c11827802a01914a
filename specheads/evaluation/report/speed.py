"""The page of speed measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..intervals import few_prompts_note
from ..speed_tables import greedy_cell, prompts_by_category
from ..variants import AGAIN, PLAIN
from .charts import Points, bars, legend_of, lines, shares
from .page import Chart, Figure, Page, Table, Verdict
from .positions import position_charts
from .words import NOTHING, TIMES, machine_of, model_of, share, short_name, way_of, with_interval

Result = Mapping[str, Any]
MOST_SERIES = 5
PARTS = {"draft": "drafting", "verify": "the target's passes", "other": "the prompt, and all else"}


def speed_page(results: Sequence[Result]) -> Page:
    """The page of one or several speed measurements.

    Args:
        results: What `measure_speed` wrote; one that compares several draft lengths, or several that differ in them alone.
    """
    first = results[0]
    settings = first["settings"]
    way = f"{way_of(settings['temperature'])}, batch {settings['batch_size']}"
    best = max(results, key=lambda result: _quickest(result)[1]["total_ratio"]["value"] if _variants(result) else 0.0)
    page = Page(
        title="Speed of speculative decoding",
        subtitle=f"{model_of(first)} · {way} · {machine_of(first)}",
        verdict=_verdict(best),
    )
    if not _variants(best):
        page.tables.append(_table(results))
        return page
    page.figures = _figures(best)
    page.tables = [_table(results)]
    page.charts = [*_by_draft_length(results), *_by_category(best), *position_charts(_counts(best)), *_time(best)]
    return page


def _variants(result: Result) -> dict[str, Mapping[str, Any]]:
    return {name: figures for name, figures in result["summary"].items() if name != PLAIN}


def _rivals(result: Result) -> dict[str, Mapping[str, Any]]:
    """The variants without plain generation measured again, unless there is nothing else."""
    variants = _variants(result)
    return {name: figures for name, figures in variants.items() if not _is_plain_again(name)} or variants


def _is_plain_again(name: str) -> bool:
    return name.startswith(f"{PLAIN}{AGAIN}")


def _quickest(result: Result) -> tuple[str, Mapping[str, Any]]:
    return max(_rivals(result).items(), key=lambda item: item[1]["total_ratio"]["value"])


CHOSEN = "It is the quickest of {} variants, chosen after they were measured, for which the interval makes no allowance."


def _verdict(result: Result) -> Verdict:
    if not _variants(result):
        return Verdict("open", "Only plain generation was measured, so there is nothing to compare.")
    name, figures = _quickest(result)
    ratio, greedy = figures["total_ratio"], _greedy_words(result)
    value, low, high = ratio["value"], ratio["low"], ratio["high"]
    name = short_name(name)
    if len(_rivals(result)) > 1:
        greedy = [*greedy, CHOSEN.format(len(_rivals(result)))]
    greedy += [
        f"Plain generation measured again ran at {with_interval(other['total_ratio'])} times its own speed: so much is noise."
        for again, other in _variants(result).items()
        if _is_plain_again(again)
    ]
    if low is None:
        return Verdict("open", f"With one prompt {name} ran at {value:.2f} times the speed of plain generation.", greedy)
    interval = f"95% interval {low:.2f} to {high:.2f}"
    if low > 1:
        return Verdict("good", f"{name} generates {value:.2f} times as fast as plain generation ({interval}).", greedy)
    if high < 1:
        return Verdict("bad", f"Even {name}, the quickest, is slower than plain generation: {value:.2f} ({interval}).", greedy)
    return Verdict("open", f"Whether {name} is quicker cannot be told from these prompts: {value:.2f} ({interval}).", greedy)


def _greedy_words(result: Result) -> list[str]:
    if result["settings"]["temperature"] != 0:
        return ["Sampled texts cannot be compared token by token; specheads eval exactness tests their law."]
    compared = {name: figures["greedy"] for name, figures in _variants(result).items() if figures.get("greedy")}
    rows = sum(greedy["rows"] for greedy in compared.values())
    places = [place for greedy in compared.values() for place in greedy["divergences"]]
    if not places:
        return [f"All {rows} greedy texts have the very tokens of plain generation."]
    gaps = [place["gap"] for place in places if place["gap"] is not None]
    nearest = f" The largest gap between the target's two best tokens where they part is {max(gaps):.1e}." if gaps else ""
    return [f"{rows - len(places)} of {rows} greedy texts have the very tokens of plain generation.{nearest}"]


def _figures(result: Result) -> list[Figure]:
    name, figures = _quickest(result)
    plain, ratio = result["summary"][PLAIN], figures["total_ratio"]
    interval = "" if ratio["low"] is None else f"95%: {ratio['low']:.2f} to {ratio['high']:.2f}"
    shown = [
        Figure(f"{ratio['value']:.2f}{TIMES}", f"the speed of plain generation, by {short_name(name)}", interval),
        Figure(
            f"{figures['median_tokens_per_second']:.1f}",
            "tokens per second, median over prompts",
            f"plain: {plain['median_tokens_per_second']:.1f}",
        ),
    ]
    counts = figures["speculation"]
    if counts:
        shown += [
            Figure(f"{counts['mean_acceptance_length']:.2f}", "tokens per round", "mean acceptance length"),
            Figure(
                share(counts["draft_acceptance_rate"]),
                "of drafted tokens accepted",
                f"{counts['num_accepted_draft_tokens']:,} of {counts['num_draft_tokens']:,}",
            ),
        ]
    return shown


def _table(results: Sequence[Result]) -> Table:
    settings = results[0]["settings"]
    columns = ["variant", "tokens/s", "ratio, median", "ratio, total", "tokens/round", "accepted", "greedy texts"]
    rows = [_row(name, figures) for result in results for name, figures in result["summary"].items()]
    if len(results) > 1:
        columns.insert(1, "K")
        lengths = [figures["draft_tokens"] for result in results for figures in result["summary"].values()]
        for row, length in zip(rows, lengths, strict=True):
            row.insert(1, NOTHING if length is None else str(length))
    trials = results[0]["summary"][PLAIN]["trials"]
    note = (
        f"{trials} trials of at most {settings['max_new_tokens']} tokens, the variants by turns. "
        "Ratios are to plain generation on the same prompts: the median over prompts, and all tokens over all seconds; [ ] "
        "bootstrap 95% intervals. Tokens/round: emitted tokens / rounds. Greedy texts: those with plain generation's very "
        "tokens, and the largest gap of the target's two best scores where others part."
    )
    return Table("All variants", columns, rows, f"{note} K: the most tokens drafted." if len(results) > 1 else note)


def _row(name: str, figures: Mapping[str, Any]) -> list[str]:
    counts = figures["speculation"]
    speed = f"{figures['median_tokens_per_second']:.1f}"
    if name == PLAIN:
        return [name, speed, "1", "1", "1", NOTHING, NOTHING]
    return [
        short_name(name),
        speed,
        with_interval(figures["median_ratio"]),
        with_interval(figures["total_ratio"]),
        f"{counts['mean_acceptance_length']:.2f}" if counts else NOTHING,
        share(counts["draft_acceptance_rate"]) if counts else NOTHING,
        greedy_cell(figures["greedy"]) or NOTHING,
    ]


def _shown(result: Result) -> dict[str, Mapping[str, Any]]:
    """The variants that charts show: of one with several draft lengths the quickest."""
    best: dict[str, str] = {}
    for name, figures in _rivals(result).items():
        other = best.setdefault(figures["variant"], name)
        if figures["total_ratio"]["value"] > _variants(result)[other]["total_ratio"]["value"]:
            best[figures["variant"]] = name
    return {name: _variants(result)[name] for name in list(best.values())[:MOST_SERIES]}


def _counts(result: Result) -> dict[str, Mapping[str, Any]]:
    return {short_name(name): figures["speculation"] for name, figures in _shown(result).items() if figures["speculation"]}


def _by_category(result: Result) -> list[Chart]:
    series = []
    for name, figures in _shown(result).items():
        groups = {"all": figures} | figures["categories"] if len(figures["categories"]) > 1 else {"all": figures}
        ratios = [group["median_ratio"] for group in groups.values()]
        series.append(_points(short_name(name), list(groups), ratios))
    drawing = bars(series, "tokens/s ÷ plain tokens/s, median over prompts", level=1.0)
    note = "Whiskers: bootstrap 95% intervals over prompts. Dashed: as fast as plain generation."
    few = few_prompts_note(prompts_by_category(result).values())
    return [Chart("Speed-up by category", drawing, legend_of(series), f"{note} {few}".rstrip())]


def _by_draft_length(results: Sequence[Result]) -> list[Chart]:
    """For each variant a chart of its speed-up against the draft length, a line per category."""
    measured: dict[str, dict[int, Mapping[str, Any]]] = {}
    for result in results:
        for figures in _variants(result).values():
            if figures["draft_tokens"] is not None:
                measured.setdefault(figures["variant"], {})[figures["draft_tokens"]] = figures
    several = {name: dict(sorted(by_length.items())) for name, by_length in measured.items() if len(by_length) > 1}
    return [_draft_length_chart(name, by_length) for name, by_length in list(several.items())[:MOST_SERIES]]


def _draft_length_chart(name: str, by_length: Mapping[int, Mapping[str, Any]]) -> Chart:
    lengths, every = list(by_length), list(by_length.values())
    series = [_points("all", lengths, [figures["median_ratio"] for figures in every])]
    categories = list(every[0]["categories"])
    if len(categories) > 1:
        series += [
            _points(category, lengths, [figures["categories"][category]["median_ratio"] for figures in every])
            for category in categories[: MOST_SERIES - 1]
            if all(category in figures["categories"] for figures in every)
        ]
    drawing = lines(series, "K, the most tokens drafted in a round", "speed-up over plain", level=1.0)
    note = "Median over prompts of tokens/s ÷ plain tokens/s; whiskers: bootstrap 95% intervals. Dashed: plain generation."
    return Chart(f"Speed-up by draft length: {short_name(name)}", drawing, legend_of(series), note)


def _time(result: Result) -> list[Chart]:
    counts = _counts(result)
    if not counts:
        return []
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    for figures in counts.values():
        whole = sum(figures["seconds"].values()) or 1.0
        for part, values in parts.items():
            values.append(figures["seconds"][part] / whole)
    drawing = shares(list(counts), parts, "share of the time")
    legend = [(f"s{place}", words) for place, words in enumerate(PARTS.values(), start=1)]
    return [Chart("Where the time goes", drawing, legend)]


def _points(name: str, places: Sequence[Any], intervals: Sequence[Mapping[str, Any]]) -> Points:
    values, lows, highs = ([interval[end] for interval in intervals] for end in ("value", "low", "high"))
    return Points(name, places, values, lows, highs)
