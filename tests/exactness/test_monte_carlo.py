"""Sampling from random models at full size of everything: the joint law of the first three tokens, by a G-test.

Power: a shift of the law by a total variation d gives a non-centrality of at least 4 N d^2, so with N = 24,000 a shift of
0.02 is seen with near certainty at this threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

import specheads
from specheads import verify
from specheads.drafters import growth
from specheads.processors import RoundLaws, ScoreProcessors
from specheads.tree import DraftTree

from ..tiny import perturbed, tiny

VOCAB, SAMPLES, THRESHOLD = 16, 24_000, 1e-4
FEWER_SAMPLES = 8_000  # enough for what is far off
PROMPT = torch.tensor([[1, 5, 9, 5, 9, 4]])
WARPED = {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "repetition_penalty": 1.3}
SETTINGS: dict[str, dict[str, Any]] = {
    "chain": {"draft_tokens": 3, "verification": "block"},
    "token": {"draft_tokens": 3, "verification": "token"},
    "tree": {"draft_tokens": 3, "tree_nodes": 8, "verification": "traversal"},
    "match": {"draft_tokens": 3, "verification": "match"},
}


def models(family: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel]:
    target = specheads.enable(tiny(family, VOCAB, spread=0.35, eos_token_id=None))
    return target, perturbed(target, 0.15)


def expected_law(target: PreTrainedModel, tokens: int, **arguments: Any) -> dict[tuple[int, ...], float]:
    """The law of the continuation, all prefixes of a length in one pass."""
    from .whole_loop import _prepared

    prepared = _prepared(target, PROMPT, torch.ones_like(PROMPT), {"max_new_tokens": tokens, **arguments})
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        prefixes = list(law)
        ids = torch.cat(
            [PROMPT.expand(len(prefixes), -1), torch.tensor(prefixes, dtype=torch.long).view(len(prefixes), -1)], dim=1
        )
        with torch.no_grad():
            logits = target(input_ids=ids).logits[:, -1]
        processors = prepared["logits_processor"]
        for processor in processors:
            if hasattr(processor, "prompt_ignore_length"):
                processor.prompt_ignore_length = None
        probabilities = processors(ids, logits).softmax(-1).tolist()
        law = {
            (*prefix, token): law[prefix] * more
            for prefix, line in zip(prefixes, probabilities, strict=True)
            for token, more in enumerate(line)
            if more
        }
    return law


def sample(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    speculative: dict[str, Any],
    seed: int,
    samples: int = SAMPLES,
    **arguments: Any,
) -> list[tuple[int, ...]]:
    """Many continuations of four tokens, the first three of each: so that drafts and added tokens fall on all of them."""
    torch.manual_seed(seed)
    ids = PROMPT.expand(2000, -1)
    drawn: list[tuple[int, ...]] = []
    while len(drawn) < samples:
        out = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=4, pad_token_id=0, assistant_model=draft,
            speculative={"adaptive": False, **speculative}, **arguments,
        )  # fmt: skip
        drawn.extend(map(tuple, out[:, PROMPT.shape[1] :][:, :3].tolist()))
    return drawn


def p_value(drawn: Sequence[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Of a G-test with rare outcomes pooled, each cell expected at least five times."""
    counts: dict[tuple[int, ...], int] = {}
    for outcome in drawn:
        counts[outcome] = counts.get(outcome, 0) + 1
    if set(counts) - set(law):
        return 0.0
    observed, expected, rest_observed, rest_expected = [], [], 0.0, 0.0
    for outcome, probability in sorted(law.items(), key=lambda item: -item[1]):
        wanted = probability * len(drawn)
        if wanted >= 5:
            observed.append(counts.get(outcome, 0))
            expected.append(wanted)
        else:
            rest_observed += counts.get(outcome, 0)
            rest_expected += wanted
    if rest_expected:
        observed.append(rest_observed)
        expected.append(rest_expected)
    scale = sum(observed) / sum(expected)
    return float(stats.power_divergence(observed, np.array(expected) * scale, lambda_="log-likelihood").pvalue)


# The modes that only differ in how a chain's draws are matched are walked branch by branch elsewhere; here warped ones do.
@pytest.mark.parametrize(("setting", "warped"), [*((setting, True) for setting in SETTINGS), ("chain", False), ("tree", False)])
def test_draft_model(setting: str, warped: bool) -> None:
    target, draft = models()
    arguments = WARPED if warped else {"top_k": 0}
    assert p_value(sample(target, draft, SETTINGS[setting], 1, **arguments), expected_law(target, 3, **arguments)) > THRESHOLD


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2"])
def test_other_families(family: str) -> None:
    target, draft = models(family)
    drawn = sample(target, draft, SETTINGS["tree"], 2, top_k=0)
    assert p_value(drawn, expected_law(target, 3, top_k=0)) > THRESHOLD


@pytest.mark.parametrize("drafter", ["recycling"])
def test_training_free(drafter: str) -> None:
    target, _ = models()
    drawn = sample(target, None, {"drafter": drafter, "draft_tokens": 3, "tree_nodes": 6}, 3, **WARPED)
    assert p_value(drawn, expected_law(target, 3, **WARPED)) > THRESHOLD


class OneUniform:
    """The same uniform for the accepted node and for the residual token."""

    def __init__(self) -> None:
        self.uniform: Tensor | None = None

    def draw(self, weights: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        if self.uniform is None or weights.shape[1] < VOCAB or weights.shape[0] != self.uniform.shape[0]:
            self.uniform = torch.rand(weights.shape[0], dtype=torch.double)
        law = weights.double() / weights.double().sum(-1, keepdim=True)
        return (law.cumsum(-1) <= self.uniform[:, None]).sum(-1).clamp(max=weights.shape[1] - 1)


def shared_uniform(patch: pytest.MonkeyPatch) -> None:
    original = verify.settle

    def settle(tree: DraftTree, laws: Any, noise: Any, rows: Any, positions: Any, carry: bool) -> Any:
        return original(tree, laws, OneUniform(), rows, positions, carry)

    patch.setattr("specheads.loop.settle", settle)


def argmax_draft(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(growth, "draw", lambda context, law, lines, depth: law.argmax(dim=-1))


def committed_prefix(patch: pytest.MonkeyPatch) -> None:
    original = ScoreProcessors.__call__
    patch.setattr(ScoreProcessors, "__call__", lambda self, rows, drafted, scores: original(self, rows, drafted[:, :0], scores))


def bonus_without_processors(patch: pytest.MonkeyPatch) -> None:
    original = RoundLaws.everywhere

    def everywhere(self: RoundLaws, tree: DraftTree) -> Tensor:
        scores = original(self, tree).clone()
        if tree.size:
            scores[:, -1] = self.logits[:, -1]
        return scores

    patch.setattr(RoundLaws, "everywhere", everywhere)


@pytest.mark.parametrize("mutate", [shared_uniform, argmax_draft, committed_prefix, bonus_without_processors])
def test_the_test_sees(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models()
    # One committed token short of the end, so that a mistake on the added token shows among the first three.
    setting = {**SETTINGS["chain"], "draft_tokens": 1}
    expected = expected_law(target, 3, **WARPED)
    mutate(monkeypatch)
    samples = SAMPLES if mutate is committed_prefix else FEWER_SAMPLES  # it bends the law the least
    drawn = sample(target, draft, setting, 4, samples, **WARPED)
    assert p_value(drawn, expected) < THRESHOLD
