"""What the trials of a speed measurement say together.

A trial is one batch of prompts, generated once by every variant:
`{"trial": int, "category": str, "prompts": [str], "runs": {variant: run}}`, where a run is `{"seconds": float, "tokens": int,
"speculation": counts or None, "divergences": [...] or None}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from .acceptance_figures import POSITIONS, counts_of, pooled
from .intervals import median_ratio, total_ratio
from .runs import COUNTS, Run
from .variants import PLAIN

Trial = Mapping[str, Any]


def run_record(run: Run, divergences: Sequence[Any] | None) -> dict[str, Any]:
    """A run as it is kept.

    Args:
        run: The run.
        divergences: Where it differs from plain `generate`; `None` if it was not to be compared.
    """
    stats = run.speculation
    counts = None if stats is None else {**counts_of(stats), "seconds": dict(stats.seconds)}
    compared = None if divergences is None else [asdict(divergence) for divergence in divergences]
    return {"seconds": run.seconds, "tokens": run.tokens, "speculation": counts, "divergences": compared}


def summarise(trials: Sequence[Trial], seed: int) -> dict[str, Any]:
    """The figures of every variant, over all trials and per category.

    Args:
        trials: What was measured; at least one.
        seed: Of the bootstrap.
    """
    categories = list(dict.fromkeys(trial["category"] for trial in trials))
    summary = {name: _figures(trials, name, seed) for name in trials[0]["runs"]}
    for name, figures in summary.items():
        figures["categories"] = {
            category: _figures([trial for trial in trials if trial["category"] == category], name, seed)
            for category in categories
        }
    return summary


def _figures(trials: Sequence[Trial], variant: str, seed: int) -> dict[str, Any]:
    runs = [trial["runs"][variant] for trial in trials]
    own, plain = _by_prompt(trials, variant), _by_prompt(trials, PLAIN)
    speeds = [_speed(group) for group in own]
    figures: dict[str, Any] = {
        "trials": len(runs),
        "tokens": sum(run["tokens"] for run in runs),
        "seconds": sum(run["seconds"] for run in runs),
        "median_tokens_per_second": median(speeds),
    }
    if variant != PLAIN:
        ratio = median_ratio(speeds, [_speed(group) for group in plain], seed)
        figures["median_ratio"] = asdict(ratio)
        figures["total_ratio"] = asdict(total_ratio(*_columns(own), *_columns(plain), seed))
        figures["greedy"] = _greedy(trials, runs)
    figures["speculation"] = _speculation(runs, figures)
    return figures


def _by_prompt(trials: Sequence[Trial], variant: str) -> list[list[Mapping[str, Any]]]:
    """The runs of each prompt (or batch), which are several if it was repeated: intervals are over prompts."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for trial in trials:
        groups.setdefault((trial["category"], *trial["prompts"]), []).append(trial["runs"][variant])
    return list(groups.values())


def _speed(runs: Sequence[Mapping[str, Any]]) -> float:
    return median(run["tokens"] / run["seconds"] for run in runs)


def _columns(groups: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[list[int], list[float]]:
    return [sum(run["tokens"] for run in runs) for runs in groups], [sum(run["seconds"] for run in runs) for runs in groups]


def _greedy(trials: Sequence[Trial], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How many rows are those of plain `generate`, and where the others part."""
    if any(run["divergences"] is None for run in runs):
        return None
    places = [
        {"prompt": trial["prompts"][divergence["row"]], **divergence}
        for trial, run in zip(trials, runs, strict=True)
        for divergence in run["divergences"]
    ]
    return {"rows": sum(len(trial["prompts"]) for trial in trials), "divergences": places}


def _speculation(runs: Sequence[Mapping[str, Any]], figures: Mapping[str, Any]) -> dict[str, Any] | None:
    """The counts of all runs together, with the figures that follow from them."""
    records = [run["speculation"] for run in runs]
    if any(record is None for record in records):
        return None
    stats = pooled(records)
    counts = {name: getattr(stats, name) for name in (*COUNTS, *POSITIONS)}
    parts = {part: sum(record["seconds"][part] for record in records) for part in records[0]["seconds"]}
    return {
        **counts,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate if stats.num_draft_tokens else None,
        "cost_ratio": stats.mean_acceptance_length / figures["total_ratio"]["value"] - 1,
        "seconds": parts,
    }
