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

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from ..drafters import Drafter, load_drafter
from ..mixin import enable
from .bench import load_draft, load_target
from .exactness_arguments import ExactnessArguments
from .exactness_words import in_words, show_exactness
from .exam import Exam
from .journal import Journal, write_json
from .loading import load_drafters
from .program import run_program
from .prompts import InputError, Prompt, settings_of
from .provenance import provenance
from .variants import BY_NAME, Variant, parse_speculative


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line; that of the process if `None`.

    Returns:
        The exit status: 0 if all drafters were found exact, 1 if not, 2 for input that cannot be used, 130 for an interruption.
    """
    about, exact = __doc__.split("\n\n")[0], (lambda result: 0 if result["passed"] else 1)
    return run_program("exactness", ExactnessArguments, about, measure_exactness, show_exactness, arguments, exact)


def measure_exactness(options: ExactnessArguments) -> dict[str, Any]:
    """Tests the drafters that the options name, and writes the result.

    Args:
        options: The options of the command.

    Returns:
        What was written; the module's docstring says what that is.

    Raises:
        InputError: if something of the options cannot be used.
    """
    if find_spec("scipy") is None:
        raise InputError('The test takes the package scipy: run `pip install "specheads[eval]"`.')
    variants = parse_speculative(options.variant)
    prompts = options.read()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_target(options.model)
    if options.dtype is not None:
        model.to(getattr(torch, options.dtype))
    enable(model)
    drafters = _load(variants, model, tokenizer)
    settings = settings_of(options, prompts)
    journal = Journal(options.output, settings, options.resume)
    exam = Exam.prepare(model, tokenizer, prompts, options, len(drafters))
    for number in journal.left(len(drafters)):
        variant = variants[number]
        journal.append(exam.with_trees(variant.tree_nodes).examine(variant.name, drafters[variant.name]))
    words = in_words({**exam.record, "results": journal.trials})
    result = {"kind": "exactness", "settings": settings, "provenance": provenance(model), **words}
    write_json(options.output, result)
    journal.close()
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
    return in_words({**exam.record, "results": [exam.examine(name, drafter) for name, drafter in drafters.items()]})


def _load(variants: Sequence[Variant], model: Any, tokenizer: Any) -> dict[str, Drafter]:
    by_name = {variant.name: load_drafter(variant.kind, model) for variant in variants if variant.kind in BY_NAME}
    return {**by_name, **load_drafters(variants, model, tokenizer, cache(load_draft))}
