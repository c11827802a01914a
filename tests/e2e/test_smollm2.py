"""On a real model and real prompts, in single precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specheads
from specheads.demo import PROMPTS
from specheads.evaluation.divergence import divergences
from specheads.evaluation.prompts import Prompt, encode
from specheads.evaluation.runs import timed_run
from specheads.evaluation.smollm2 import load_smollm2

TOKENS = 40
NEAR_TIE = 1e-3  # of the two best scores: below it, passes of different shapes may round to either


@pytest.fixture(scope="module")
def loaded() -> Any:
    model, tokenizer = load_smollm2()
    return specheads.enable(model), tokenizer


def inputs(tokenizer: Any, names: list[str]) -> Any:
    return encode(tokenizer, [Prompt(name, "test", ({"role": "user", "content": PROMPTS[name]},)) for name in names])


@pytest.mark.parametrize("names", [["summary"], ["code"], list(PROMPTS)], ids=["summary", "code", "batch"])
@pytest.mark.parametrize("settings", [{}, {"drafter": "recycling", "tree_nodes": 10}], ids=["auto", "recycling"])
def test_greedy_text_is_that_of_plain_generate(settings: dict[str, Any], names: list[str], loaded: Any) -> None:
    model, tokenizer = loaded
    given = inputs(tokenizer, names)
    plain = timed_run(model, given, 0, max_new_tokens=TOKENS, do_sample=False)
    ours = timed_run(model, given, 0, max_new_tokens=TOKENS, do_sample=False, speculative={**settings, "adaptive": False})
    for difference in divergences(model, given, plain, ours):
        assert difference.gap is not None and difference.gap < NEAR_TIE, difference
    if len(names) > 1 or settings == {}:
        assert ours.speculation.mean_acceptance_length > 1.2


def test_keyed_samples_do_not_depend_on_the_drafter(loaded: Any) -> None:
    model, tokenizer = loaded
    given = inputs(tokenizer, ["summary"])
    keyed = {"sampling_noise": "keyed", "seed": 3}
    texts = [
        timed_run(model, given, 0, max_new_tokens=TOKENS, do_sample=True, speculative={**keyed, "drafter": name})
        for name in ("none", "suffix", "auto")
    ]
    assert texts[0].rows == texts[1].rows == texts[2].rows


def test_the_model_as_its_own_draft_is_accepted(loaded: Any) -> None:
    model, tokenizer = loaded
    given = inputs(tokenizer, ["chat"])
    settings = {"draft_tokens": 4, "adaptive": False, "seed": 1}
    run = timed_run(model, given, 0, max_new_tokens=21, do_sample=True, speculative=settings, assistant_model=model)
    assert run.speculation.mean_acceptance_length > 4
    assert torch.is_tensor(model.lm_head.weight)
