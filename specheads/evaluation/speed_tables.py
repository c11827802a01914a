"""The result of a speed measurement as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .intervals import few_prompts_note
from .table import interval_cell, show_table
from .variants import PLAIN

SPEED_COLUMNS = ("variant", "tok/s", "ratio", "total ratio", "greedy")
SPEED_CAPTION = (
    "tok/s: median over prompts of tokens per second. ratio: median over prompts of tok/s / plain tok/s. total ratio: all "
    "tokens per all seconds / the same of plain. [ ]: bootstrap 95 % intervals. greedy: rows with plain's tokens, and the "
    "largest top-2 gap where the others part."
)
ROUND_COLUMNS = ("variant", "τ", "accepted", "cost c", "draft", "verify", "other")
ROUND_CAPTION = (
    "τ = emitted tokens / rounds, the pass over the prompt included. accepted = accepted / drafted tokens. "
    "c = τ / total ratio - 1, what a round costs beyond a step of plain. draft, verify, other: shares of the time."
)


def show_summary(result: Mapping[str, Any]) -> None:
    """Prints the figures of every variant and, if there are several categories, their ratios.

    Args:
        result: What `measure_speed` returns.
    """
    summary, settings = result["summary"], result["settings"]
    way = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    title = f"{summary[PLAIN]['trials']} trials, batch {settings['batch_size']}, {way}, {settings['max_new_tokens']} tokens"
    show_table(title, SPEED_COLUMNS, [_speed_row(name, figures) for name, figures in summary.items()], SPEED_CAPTION)
    rounds = [_round_row(name, figures["speculation"]) for name, figures in summary.items() if figures["speculation"]]
    if rounds:
        show_table("rounds", ROUND_COLUMNS, rounds, ROUND_CAPTION)
    categories = list(summary[PLAIN]["categories"])
    others = [name for name in summary if name != PLAIN]
    if len(categories) > 1 and others:
        rows = [[c, *(interval_cell(summary[name]["categories"][c]["median_ratio"]) for name in others)] for c in categories]
        few = few_prompts_note(prompts_by_category(result).values())
        show_table("ratio by category", ["category", *others], rows, few)


def prompts_by_category(result: Mapping[str, Any]) -> dict[str, int]:
    """Over how many prompts (or batches) the intervals of each category are.

    Args:
        result: What `measure_speed` returns.
    """
    repeats = result["settings"].get("repeats", 1)
    return {name: own["trials"] // repeats for name, own in result["summary"][PLAIN]["categories"].items()}


def _speed_row(name: str, figures: Mapping[str, Any]) -> list[str]:
    speed = f"{figures['median_tokens_per_second']:.1f}"
    if name == PLAIN:
        return [name, speed, "", "", ""]
    return [
        name,
        speed,
        *(interval_cell(figures[key]) for key in ("median_ratio", "total_ratio")),
        greedy_cell(figures["greedy"]),
    ]


def _round_row(name: str, counts: Mapping[str, Any]) -> list[str]:
    rate = counts["draft_acceptance_rate"]
    whole = sum(counts["seconds"].values()) or 1.0
    return [
        name,
        f"{counts['mean_acceptance_length']:.2f}",
        "" if rate is None else f"{rate:.0%}",
        f"{counts['cost_ratio']:.2f}",
        *(f"{counts['seconds'][part] / whole:.0%}" for part in ("draft", "verify", "other")),
    ]


def greedy_cell(greedy: Mapping[str, Any] | None) -> str:
    """How many greedy rows have the tokens of plain `generate`, and how near to a tie the others part.

    Args:
        greedy: `rows` and `divergences`, or `None` if there was nothing to compare.
    """
    if greedy is None:
        return ""
    rows, places = greedy["rows"], greedy["divergences"]
    cell = f"{rows - len(places)}/{rows}"
    if not places:
        return cell
    gaps = [place["gap"] for place in places]
    return f"{cell}, other end" if None in gaps else f"{cell}, gap {max(gaps):.0e}"
