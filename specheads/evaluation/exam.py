"""What drafters are held against: a target's own greedy texts and laws, and how each drafter does by them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from torch import Tensor

from ..drafters import Drafter
from ..drafters.none import NoDrafter
from ..mixin import enable
from .control import LyingDrafter
from .divergence import divergences
from .exactness_arguments import ExactnessArguments
from .exactness_words import verdict_of
from .first_tokens import FirstTokens, first_tokens
from .law_test import LEAST_EXPECTED, g_test, pooled_cells, seen_distance
from .prompts import InputError, Prompt, encode, spread
from .rounding import Rounding, measure_rounding, plain_greedy
from .runs import Run, timed_run
from .shared_prompt import SharedPrompt

POWER = 0.95
FEWER = 4  # the control is first tried with so many times fewer samples


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
    prompt: SharedPrompt
    law: FirstTokens

    def inputs(self, drafter: Drafter, size: int) -> dict[str, Any]:
        """What `generate` is given for so many texts; where the prompt's features are drafted from, each reads it anew."""
        return self.prompt.inputs if getattr(drafter, "feature_layers", ()) else self.prompt.for_texts(size)


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
        asked = [(prompt.name, _on_device(encode(tokenizer, [prompt]), model)) for prompt in prompts]
        greedy_cases: list[GreedyCase] = []

        def texts() -> Iterator[tuple[Mapping[str, Any], Sequence[int], Tensor]]:
            # One at a time, since the logits of all of them would fill the memory.
            for name, inputs in asked:
                run, logits = plain_greedy(model, inputs, max_new_tokens=options.max_new_tokens)
                greedy_cases.append(GreedyCase(name, inputs, run))
                yield inputs, run.rows[0], logits

        rounding = measure_rounding(model, texts(), options.draft_tokens + 1, options.temperature)
        least = LEAST_EXPECTED / options.samples
        sampled_cases = [
            SampledCase(
                name,
                SharedPrompt(model, inputs),
                first_tokens(model, inputs, options.tokens, least, options.batch_size, **options.sampling),
            )
            for name, inputs in spread(asked, options.sampled_prompts)
        ]
        return cls(model, options, len(sampled_cases) * drafters, greedy_cases, sampled_cases, rounding)

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

    def with_trees(self, tree_nodes: int | None) -> Exam:
        """The same with draft trees of up to so many nodes; as it is for `None`."""
        return self if tree_nodes is None else replace(self, options=replace(self.options, tree_nodes=tree_nodes))

    def examine(self, name: str, drafter: Drafter) -> dict[str, Any]:
        """Tests a drafter.

        Args:
            name: What to call it.
            drafter: The drafter; it is attached to the target.

        Raises:
            InputError: if the model refuses it.
        """
        try:
            greedy = self.greedy(drafter)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise InputError(f"The drafter {name} cannot run here: {error}") from error
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
            run = self._run(drafter, case.inputs(drafter, size), self.options.seed + batch, **arguments)
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


def _on_device(inputs: Mapping[str, Any], model: Any) -> dict[str, Any]:
    return {name: ids.to(model.device) for name, ids in inputs.items()}
