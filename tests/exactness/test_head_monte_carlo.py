"""Sampling with heads from a target with a larger vocabulary: the joint law of the first three tokens, by a G-test."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

import specheads
from specheads.drafters import growth

from ..tiny import tiny, with_head
from .head_loop import random_head
from .test_monte_carlo import THRESHOLD, VOCAB, WARPED, argmax_draft, expected_law, p_value, sample

KNOWN = [0, 1, 3, 4, 6, 7, 9, 10, 12, 15]
CHAIN, TREE = {"draft_tokens": 2}, {"draft_tokens": 2, "tree_nodes": 6}
COOLER = {"temperature": 0.7, "top_k": 0}
# the head, its fields, how it drafts, and how tokens are sampled
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "medusa chain": ("medusa", {}, CHAIN, {"top_k": 0}),
    "medusa mixed tree": ("medusa", {}, TREE, WARPED),
    "eagle 1 chain": ("eagle 1", {}, CHAIN, COOLER),
    "eagle 3 chain, own vocabulary": ("eagle 3", {"draft_tokens": KNOWN}, CHAIN, WARPED),
    "eagle 3 mixed tree, own vocabulary": ("eagle 3", {"draft_tokens": KNOWN}, TREE, COOLER),
    "eagle 3 dynamic tree": ("eagle 3", {}, {**TREE, "draft_temperature": 0}, {"top_k": 0}),
}
SAMPLES = 16_000


def p_of(name: str, seed: int) -> float:
    kind, fields, speculative, arguments = CASES[name]
    target: PreTrainedModel = tiny("llama", VOCAB, spread=0.35, eos_token_id=None)
    expected = expected_law(specheads.enable(target), 3, **arguments)
    with_head(target, random_head(target, kind, seed=7, **fields))
    return p_value(sample(target, None, speculative, seed, SAMPLES, **arguments), expected)


@pytest.mark.parametrize("name", CASES)
def test_joint_law(name: str) -> None:
    assert p_of(name, 1) > THRESHOLD


def own_ids_for_the_targets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(growth, "named", lambda source, columns: columns)


@pytest.mark.parametrize(
    ("mutate", "name"),
    [(argmax_draft, "medusa chain"), (own_ids_for_the_targets, "eagle 3 mixed tree, own vocabulary")],
)
def test_the_test_sees(mutate: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert p_of(name, 2) < THRESHOLD
