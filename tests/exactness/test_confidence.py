"""A sampled chain that ends where the head's confidence does keeps the law, because no token is looked at before it is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.drafters import growth
from specheads.drafters.base import Budget
from specheads.pacing import Pacer

from .head_loop import BATCH, BATCH_MASK, target_with_head
from .replay import total_variation
from .whole_loop import PROMPT, plain_law, speculative_law

KINDS = {
    "medusa": ("medusa", {"confidence": True, "dependence": "markov", "markov_rank": 2}),
    "eagle 3": ("eagle 3", {"confidence": True, "draft_tokens": [0, 2]}),
    "eagle 1": ("eagle 1", {"confidence": True}),
}
LIMIT = 0.2


def distance(kind: str, patch: pytest.MonkeyPatch, batch: int = 1) -> tuple[float, set[int]]:
    """How far the law is from the target's if a token must promise `LIMIT`, and which lengths drafts had."""
    name, fields = KINDS[kind]
    target = target_with_head(name, **fields)
    with torch.no_grad():
        for parameter in target._speculation.drafter.head.confidence_head.parameters():
            parameter.mul_(3.0)  # so that it depends on the text
    lengths: set[int] = set()
    grow = growth.grow_chain

    def noted(*arguments: Any) -> Any:
        grown = grow(*arguments)
        lengths.add(grown.tree.size)
        return grown

    def budget(self: Any, context: Any) -> Budget:
        rooms = [min(2, context.room(line)) for line in range(len(context.rows))]
        return Budget(rooms, max(rooms), node_cost=LIMIT)

    patch.setattr("specheads.drafters.head.grow_chain", noted)
    patch.setattr(Pacer, "budget", budget)
    ids, mask = (PROMPT, torch.ones_like(PROMPT)) if batch == 1 else (BATCH, BATCH_MASK)
    arguments = {"max_new_tokens": 4, "top_k": 0, "temperature": 0.7}
    law, _ = speculative_law(target, ids, 0, 1, attention_mask=mask, speculative={"draft_tokens": 2}, **arguments)
    return total_variation(law, plain_law(target, ids, 0, mask, **arguments)), lengths


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_is_kept(kind: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    worst, lengths = distance(kind, monkeypatch, batch)
    assert worst < 1e-9
    assert len(lengths) > 1  # some drafts ended early


def look_then_drop(patch: pytest.MonkeyPatch) -> None:
    """A token is left out because of itself: what is drawn and improbable is not verified."""
    original = growth.grow_chain

    def grow(*arguments: Any) -> growth.Grown:
        grown = original(*arguments)
        tree = grown.tree
        if tree.proposals is None:
            return grown
        own: Tensor = tree.proposals.gather(2, tree.tokens[:, :, None])[:, :, 0]
        kept = int((own[0] >= 0.4).long().cumprod(dim=0).sum())
        return growth.Grown(growth.DraftTree.chain(tree.tokens[:, :kept], tree.proposals[:, :kept]), grown.slot_of)

    patch.setattr(growth, "grow_chain", grow)


@pytest.mark.parametrize("kind", ["medusa", "eagle 3"])
def test_the_replay_sees(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look_then_drop(monkeypatch)
    assert distance(kind, monkeypatch)[0] > 1e-3
