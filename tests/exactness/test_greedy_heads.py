"""Greedy decoding with heads at random is token-identical to plain `generate`, for every kind of head and batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny import with_head

from .head_loop import random_head
from .test_greedy import other_target, prompt

NEW_TOKENS = 14
FAMILIES = ["llama", "qwen3", "mistral", "gemma3_text", "gpt2", "mixtral", "qwen3_moe", "bloom", "t5", "bart"]
# kind: fields, and settings of the draft
HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "medusa": ({"num_heads": 3}, {"draft_tokens": 3, "tree_nodes": 14}),
    "eagle 1": ({}, {"draft_tokens": 4}),
    "eagle 3": ({"draft_tokens": range(3, 20)}, {"draft_tokens": 3, "tree_nodes": 12}),
}


def texts(target: PreTrainedModel, family: str, kind: str, batch: int, seed: int = 5) -> tuple[torch.Tensor, Any]:
    """What a call with a head says, padded as plain decoding does, and its statistics."""
    with_head(target, random_head(target, kind, seed=seed, **HEADS[kind][0]))
    settings = {"adaptive": False, **HEADS[kind][1]}
    out = target.generate(
        **prompt(family, batch), max_new_tokens=NEW_TOKENS, do_sample=False, speculative=settings, return_dict_in_generate=True
    )
    return out.sequences, out.speculation


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_identical_to_plain(family: str) -> None:
    target = other_target(family)
    accepted = 0
    for batch in (1, 4):
        plain = target.generate(**prompt(family, batch), max_new_tokens=NEW_TOKENS, do_sample=False)
        for kind in HEADS:
            sequences, stats = texts(target, family, kind, batch)
            assert torch.equal(sequences, plain), (kind, batch)
            accepted += stats.num_accepted_draft_tokens
            assert stats.num_draft_tokens
    assert accepted


@pytest.mark.parametrize("mistake", ["rollback", "path", "mask"])
def test_the_comparison_sees(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's cache or mask broken under a head's tree."""
    from specheads.cache import SlotCache
    from specheads.target import SlotRunner

    target = other_target("llama")
    plain = target.generate(**prompt("llama", 4), max_new_tokens=NEW_TOKENS, do_sample=False)
    if mistake == "rollback":
        commit = SlotCache.commit
        monkeypatch.setattr(
            SlotCache, "commit", lambda self, kept: commit(self, [[*slots, len(slots)] if slots else [] for slots in kept])
        )
    elif mistake == "path":
        monkeypatch.setattr("specheads.cache.SlotCache._move", lambda self, sources, targets: None)
    else:
        mask = SlotRunner._mask
        monkeypatch.setattr(
            SlotRunner, "_mask", lambda self, window, depths, visible: mask(self, window, depths, visible | True)
        )
    sequences, _ = texts(target, "llama", "medusa", 4, seed=3)
    assert sequences.shape != plain.shape or not torch.equal(sequences, plain)
