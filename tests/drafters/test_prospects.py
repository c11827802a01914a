"""How long a chain gets by what its tokens promise, and that a head's confidence decides it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import specheads
from specheads import EagleHead, MedusaHeads
from specheads.drafters.base import Budget
from specheads.drafters.eagle import EagleDrafter
from specheads.drafters.medusa import MedusaDrafter
from specheads.drafters.prospects import Prospects, top_probability
from specheads.heads import DraftHead
from specheads.pacing import Pacer
from tests.tiny import with_head

from ..heads import perfect

IDS = torch.tensor([[3, 17, 5, 30]])


def length(chances: list[list[float]], budget: Budget, shares: list[float], level_cost: float = 0.0) -> tuple[int, float]:
    """How many tokens are taken if the lines' chances are these, level by level; and what is expected of them."""
    levels = iter(chances)
    prospects = Prospects(shares, budget, level_cost, lambda scores: torch.tensor(next(levels)))
    taken = 0
    while taken < len(chances) and (not taken or prospects.goes_deeper()) and prospects.take(torch.zeros(1)):
        taken += 1
    return taken, prospects.expected


def test_a_chain_ends_where_a_token_is_worth_less_than_its_node() -> None:
    budget = Budget([4], 4, node_cost=0.3)
    assert length([[0.8], [0.8], [0.4], [0.9]], budget, [1.0]) == (2, pytest.approx(0.8 + 0.64))
    assert length([[0.8], [0.8], [0.8], [0.8]], budget, [1.0])[0] == 4
    assert length([[0.2], [0.9], [0.9], [0.9]], budget, [1.0])[0] == 0


def test_a_level_costs_too() -> None:
    budget = Budget([4], 4, node_cost=0.1)
    assert length([[0.6]] * 4, budget, [1.0])[0] == 4
    assert length([[0.6]] * 4, budget, [1.0], level_cost=0.2)[0] == 2  # 0.36 > 0.3 > 0.216


def test_a_draft_must_bring_what_it_costs_as_a_whole() -> None:
    for entry_cost, taken in ((1.0, 3), (1.8, 0)):  # 0.8 + 0.64 + 0.512 - 3 * 0.1 = 1.65
        assert length([[0.8]] * 3, Budget([3], 3, entry_cost, 0.1), [1.0])[0] == taken


def test_lines_pay_for_a_column_together() -> None:
    budget = Budget([2, 2], 2, node_cost=0.3)
    assert length([[0.9, 0.1]] * 2, budget, [0.5, 0.5])[0] == 2
    assert length([[0.9, 0.1]] * 2, budget, [0.1, 0.9])[0] == 0
    assert length([[0.9, 0.9]] * 2, Budget([1, 2], 2, node_cost=0.3), [0.9, 0.1])[0] == 1  # line 0 has room for one token


def test_no_number_is_no_chance() -> None:
    assert length([[float("nan")]], Budget([1], 1), [1.0])[0] == 0
    assert top_probability(torch.tensor([[0.0, 0.0], [0.0, -torch.inf]])).tolist() == pytest.approx([0.5, 1.0])


def sure_head(target: PreTrainedModel, kind: str, confidence: float) -> DraftHead:
    """A perfect head whose confidence is that everywhere."""
    if kind == "medusa":
        head: Any = perfect.perfect_medusa(target, num_heads=5, confidence=True)
    else:
        head = perfect.perfect_eagle(target, 3, confidence=True)
    with torch.no_grad():
        head.confidence_head.proj.weight.zero_()
        head.confidence_head.proj.bias.fill_(float(torch.tensor(confidence, dtype=torch.double).logit()))
    return head


def drafted(target: PreTrainedModel, head: DraftHead, monkeypatch: pytest.MonkeyPatch, **prices: float) -> list[int]:
    """The drafts' lengths in each round, with fixed prices."""
    monkeypatch.setattr(
        Pacer, "budget", lambda self, context: Budget([min(5, context.room(0))], min(5, context.room(0)), **prices)
    )
    monkeypatch.setattr(Pacer, "observe", lambda self, *arguments: None)
    with_head(target, head)
    out = target.generate(
        IDS, attention_mask=torch.ones_like(IDS), do_sample=False, max_new_tokens=25, return_dict_in_generate=True,
        speculative={"draft_tokens": 5, "per_step": True},
    )  # fmt: skip
    return out.speculation.rows[0].per_step_drafted[1:]


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_confidence_decides(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = perfect.cyclic_target()
    assert drafted(target, sure_head(target, kind, 0.99), monkeypatch, node_cost=0.1)[0] == 5
    cost = 0.3 - (0.0 if kind == "medusa" else specheads.load_drafter(sure_head(target, kind, 0.7), target).step_cost)
    unsure = drafted(target, sure_head(target, kind, 0.7), monkeypatch, node_cost=max(cost, 0.05))[0]
    assert 1 <= unsure < 5
    assert not any(drafted(target, sure_head(target, kind, 0.7), monkeypatch, entry_cost=4.0))


@pytest.mark.parametrize(("kind", "drafter"), [("medusa", MedusaDrafter), ("eagle", EagleDrafter)])
def test_a_head_that_is_never_confident_is_looked_at_less_and_less(
    kind: str, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    original = drafter.chain
    monkeypatch.setattr(drafter, "chain", lambda self, *arguments: looks.append(1) or original(self, *arguments))
    target = perfect.cyclic_target()
    assert not any(drafted(target, sure_head(target, kind, 0.02), monkeypatch, node_cost=0.1))
    assert 3 <= len(looks) <= 7  # of 23 rounds


def test_only_chains_go_by_confidence_and_only_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target, pacers, original = perfect.cyclic_target(), [], Pacer.budget
    monkeypatch.setattr(Pacer, "budget", lambda self, context: pacers.append(self) or original(self, context))
    for head, tree_nodes, weighs in (
        (sure_head(target, "eagle", 0.9), None, True),
        (sure_head(target, "eagle", 0.9), 8, False),
        (EagleHead.from_target(target), None, False),
        (MedusaHeads.from_target(target), None, False),
    ):
        pacers.clear()
        with_head(target, head)
        target.generate(
            IDS, attention_mask=torch.ones_like(IDS), do_sample=False, max_new_tokens=6,
            speculative={"draft_tokens": 3, "tree_nodes": tree_nodes},
        )  # fmt: skip
        assert {pacer.weighs_nodes for pacer in pacers} == {weighs}
