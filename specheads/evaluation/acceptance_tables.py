"""The result of an acceptance measurement as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .intervals import few_prompts_note
from .table import interval_cell, show_table

MOST_POSITIONS = 8
CAPTION = (
    "τ = emitted tokens / rounds, the pass over the prompt included, with a bootstrap 95 % interval over prompts. accepted = "
    "accepted / drafted tokens. 1, 2, ...: share of the rounds that drafted so far in which the token was accepted."
)


def show_acceptance(result: Mapping[str, Any]) -> None:
    """Prints the figures of every combination and, if there are several categories, τ in each.

    Args:
        result: What `measure_acceptance` returns.
    """
    results = result["results"]
    deepest = max(len(one["figures"]["acceptance_at_position"]) for one in results)
    positions = range(min(deepest, MOST_POSITIONS))
    columns = ["variant", "T", "K", "nodes", "τ", "accepted", *(str(place + 1) for place in positions)]
    show_table(f"{results[0]['figures']['prompts']} prompts", columns, [_row(one, positions) for one in results], CAPTION)
    categories = list(results[0]["categories"])
    if len(categories) > 1:
        rows = [[*_names(one), *(_length(one["categories"][category]) for category in categories)] for one in results]
        few = few_prompts_note(own["prompts"] for own in results[0]["categories"].values())
        show_table("τ by category", ["variant", "T", "K", "nodes", *categories], rows, few)


def _row(one: Mapping[str, Any], positions: Sequence[int]) -> list[str]:
    figures = one["figures"]
    rate, shares = figures["draft_acceptance_rate"], figures["acceptance_at_position"]
    cells = [f"{shares[place]:.2f}" if place < len(shares) else "" for place in positions]
    return [*_names(one), _length(figures), "" if rate is None else f"{rate:.0%}", *cells]


def _names(one: Mapping[str, Any]) -> list[str]:
    nodes = one["tree_nodes"]
    return [one["variant"], f"{one['temperature']:g}", str(one["draft_tokens"]), "chain" if nodes is None else str(nodes)]


def _length(figures: Mapping[str, Any]) -> str:
    return interval_cell(figures["mean_acceptance_length"])
