"""The result of a speed measurement in Markdown: how it was measured, and a row for each variant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .report.words import NOTHING, machine_of, model_of, short_name, way_of, with_interval
from .speed_tables import greedy_cell
from .variants import PLAIN


def markdown_of(result: Mapping[str, Any]) -> str:
    """A paragraph and a table.

    Args:
        result: What `measure_speed` returns.
    """
    summary = result["summary"]
    categories = list(summary[PLAIN]["categories"])
    kinds = categories if len(categories) > 1 else []
    columns = ["variant", "tokens/s", "all", *kinds, "τ", "greedy texts"]
    rows = [_row(name, figures, kinds) for name, figures in summary.items()]
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
    return "\n".join([_setting(result), "", *lines])


def _setting(result: Mapping[str, Any]) -> str:
    settings, plain, versions = result["settings"], result["summary"][PLAIN], result["provenance"]["versions"]
    ran = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
    length = settings["max_new_tokens"]
    repeats = settings.get("repeats", 1)
    prompts = plain["trials"] // repeats
    packed = ", weights packed on all sides" if settings["pack_for_cpu"] else ""
    times = f", {repeats} times each" if repeats > 1 else ""
    what = "prompts" if settings["batch_size"] == 1 else f"batches of up to {settings['batch_size']} prompts"
    return (
        f"{model_of(result)}; {machine_of(result)}; {ran}; {way_of(settings['temperature'])}, {prompts} {what}{times}, up to "
        f"{length} new tokens{packed}."
    )


def _row(name: str, figures: Mapping[str, Any], categories: list[str]) -> list[str]:
    speed = f"{figures['median_tokens_per_second']:.1f}"
    if name == PLAIN:
        return [f"`{name}`", speed, "1", *("1" for _ in categories), NOTHING, NOTHING]
    ratios = [figures["total_ratio"], *(figures["categories"][category]["total_ratio"] for category in categories)]
    counts = figures["speculation"]
    length = NOTHING if counts is None else f"{counts['mean_acceptance_length']:.2f}"
    greedy = greedy_cell(figures["greedy"]) or NOTHING
    return [f"`{short_name(name)}`", speed, *map(with_interval, ratios), length, greedy]
