"""A head in training says what it says when `generate` drafts with it, token for token; and mistakes that this must see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import specheads
from specheads import EagleHead, MedusaHeads
from specheads.drafters.eagle import EagleDrafter
from specheads.drafters.medusa import MedusaDrafter
from specheads.training import masks
from specheads.training import unroll as unroll_module
from specheads.training.medusa_step import MedusaDrafts
from specheads.training.step import DRAFTS
from specheads.training.unroll import RootTable

from ..drafters.reference import watched
from ..tiny import tiny, with_head
from .tools import DEPTH, HEADS, batch_of, new_head, packed, said, training_of

LENGTHS = [6, 2, 5, 3]


def drafts(name: str, family: str = "llama") -> tuple[Any, list[tuple[list[int], list[int], Tensor]]]:
    """A head in training, and what it drafted in a real call: committed text, drafted tokens and their laws `[K, V]`."""
    target = specheads.enable(tiny(family, spread=0.15, eos_token_id=None), drafter="none")
    head = new_head(target, name)
    with_head(target, head)
    ids = torch.randint(3, 32, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = torch.stack([torch.arange(max(LENGTHS)) >= max(LENGTHS) - length for length in LENGTHS]).long()
    with watched(MedusaDrafter if name.startswith("medusa") else EagleDrafter) as seen:
        target.generate(
            ids * mask, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=10, pad_token_id=0,
            speculative={"adaptive": False, "draft_tokens": DEPTH, "seed": 0},
        )  # fmt: skip
    found = []
    for texts, tree in seen:
        if tree.size == DEPTH:  # texts that are about to end get shorter drafts
            assert tree.proposals is not None
            whole = [line for line in range(len(texts)) if bool((tree.tokens[line] >= 0).all())]
            found += [(texts[line], tree.tokens[line].tolist(), tree.proposals[line]) for line in whole]
    assert len(found) > 8
    return training_of(head, target), found


def largest_difference(name: str, family: str = "llama", in_one_row: bool = False) -> float:
    """Between the laws of a head in training and those that it drafted with."""
    training, found = drafts(name, family)
    texts, roots = [text + drafted for text, drafted, _ in found], [len(text) - 1 for text, _, _ in found]
    if in_one_row:
        laws = said(training, packed(texts, [root + 1 for root in roots], padding=2))
        starts = [sum(map(len, texts[:index])) for index in range(len(texts))]
        places = [(0, start + root) for start, root in zip(starts, roots, strict=True)]
    else:
        laws = said(training, batch_of(texts, [root + 1 for root in roots], left=True))
        longest = max(map(len, texts))
        places = [(row, root + longest - len(text)) for row, (root, text) in enumerate(zip(roots, texts, strict=True))]
    return max(
        float((laws[(*place, depth)] - own[depth]).abs().max())
        for place, (_, _, own) in zip(places, found, strict=True)
        for depth in range(DEPTH)
    )


@pytest.mark.parametrize("in_one_row", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_training_and_drafting_give_one_law(name: str, in_one_row: bool) -> None:
    assert largest_difference(name, in_one_row=in_one_row) < 1e-9


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt2"])
def test_other_families(family: str) -> None:
    assert largest_difference("eagle 3", family, in_one_row=True) < 1e-9
    assert largest_difference("medusa", family) < 1e-9


def sees_what_comes_later(table: RootTable, values: Tensor, offset: int) -> Tensor:
    return original_at(table, values, 0 if values.dtype == torch.bool else offset)


def stands_still(table: RootTable, values: Tensor, offset: int) -> Tensor:
    return original_at(table, values, 0 if offset == -1 and values.dtype == torch.long else offset)


def reads_one_token_late(table: RootTable, values: Tensor, offset: int) -> Tensor:
    return original_at(table, values, offset + 1 if offset > 0 else offset)


def starts_from_the_root(table: RootTable, values: Tensor, offset: int) -> Tensor:
    return original_at(table, values, 0 if values.is_floating_point() else offset)


original_at = RootTable.at


@pytest.mark.parametrize("mutant", [sees_what_comes_later, stands_still, reads_one_token_late, starts_from_the_root])
def test_mistakes_in_the_unrolling_are_seen(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RootTable, "at", mutant)
    assert largest_difference("eagle 3") > 1e-5


def test_drafts_that_see_each_other_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    eye = torch.eye
    monkeypatch.setattr(torch, "eye", lambda size, **options: eye(size, **options) | (torch.arange(size) == size - 1))
    assert largest_difference("eagle 3") > 1e-5


def test_states_that_are_not_fed_as_they_are_drafted_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagleHead, "feed", lambda head, hidden: head.norm(hidden))
    assert largest_difference("eagle 3") > 1e-5


def test_texts_that_see_each_other_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "alone", lambda groups, lonely: torch.zeros_like(groups))
    monkeypatch.setattr(unroll_module, "alone", lambda groups, lonely: torch.zeros_like(groups))
    assert largest_difference("eagle 3", in_one_row=True) > 1e-5


@pytest.mark.parametrize("name", ["medusa", "medusa, hydra"])
def test_medusa_one_place_late_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(MedusaDrafts):
        def __init__(self, head: Any, batch: Any, given: Any, roots: Any, depth: int):
            super().__init__(head, batch, given, roots, depth)
            self.states = given.features[roots.rows, roots.places][None]

    monkeypatch.setitem(DRAFTS, MedusaHeads, Late)
    assert largest_difference(name) > 1e-5
