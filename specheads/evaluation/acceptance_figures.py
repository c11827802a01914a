"""What the rounds of several prompts say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from ..stats import RowStats
from .intervals import ratio_of_sums
from .runs import COUNTS

BY_LENGTH = ("acceptance_histogram", "drafted_to_position", "accepted_to_position", "reached_position")
POSITIONS = ("acceptance_at_position", "conditional_acceptance_at_position", "drafted_to_position", "acceptance_histogram")


def counts_of(stats: RowStats) -> dict[str, Any]:
    """The counts of a row as they are kept."""
    return {name: getattr(stats, name) for name in (*COUNTS, *BY_LENGTH)}


def pooled(rows: Sequence[Mapping[str, Any]]) -> RowStats:
    """The counts of several rows together.

    Args:
        rows: As `counts_of` gives them.
    """
    sums: dict[str, Any] = {name: sum(row[name] for row in rows) for name in COUNTS}
    for name in BY_LENGTH:
        sums[name] = [sum(column) for column in zip_longest(*(row[name] for row in rows), fillvalue=0)]
    return RowStats(**sums)


def figures_of(rows: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Any]:
    """The figures of some prompts.

    Args:
        rows: Per prompt, what `counts_of` gives for it.
        seed: Of the bootstrap.
    """
    stats = pooled(rows)
    emitted, rounds = ([row[name] for row in rows] for name in ("num_emitted_tokens", "num_spec_steps"))
    return {
        "prompts": len(rows),
        **{name: getattr(stats, name) for name in COUNTS},
        "mean_acceptance_length": asdict(ratio_of_sums(emitted, rounds, seed)),
        "draft_acceptance_rate": stats.draft_acceptance_rate if stats.num_draft_tokens else None,
        **{name: getattr(stats, name) for name in POSITIONS},
    }


def summarise(trials: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Any]:
    """The figures of one combination, over all prompts and per category.

    Args:
        trials: Those of the combination, each with a `category` and `rows`.
        seed: Of the bootstrap.
    """
    by_category: dict[str, list[Mapping[str, Any]]] = {}
    for trial in trials:
        by_category.setdefault(trial["category"], []).extend(trial["rows"])
    return {
        "figures": figures_of([row for rows in by_category.values() for row in rows], seed),
        "categories": {category: figures_of(rows, seed) for category, rows in by_category.items()},
    }
