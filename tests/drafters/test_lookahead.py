"""The window of lookahead decoding: what the target says of it, what is drafted from it, and when it rests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import specheads
from specheads import loop
from specheads.drafters.base import Budget
from specheads.drafters.lookahead import LookaheadDrafter, NgramPool, window_shape
from specheads.pacing import ALLOWANCE, INCOME, PassCost
from specheads.tree import DraftTree, Probes

from ..exactness.test_greedy import prompt
from ..tiny import tiny
from .test_training_free import context_for, settle

GREEDY = {"do_sample": False, "max_new_tokens": 24, "return_dict_in_generate": True}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_the_window_says_what_the_target_would(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each column's last token has the logits of a stock pass over the text, the oldest guesses up to it, and its column."""
    target = specheads.enable(tiny(family), drafter=LookaheadDrafter(window=3, ngram=4))
    inputs, compared = prompt(family, 4), []
    learn = loop.learn

    def compare(call: loop.Call, accepted: Any) -> None:
        probes, context = accepted.tree.probes, call.context
        for line in range(len(context.rows) if probes is not None else 0):
            text = context.tokens(line)[: -len(accepted.tokens[line])]
            levels = probes.tokens[line].view(3, 3).tolist()
            for column in range(3):
                guesses = [*levels[0][: column + 1], levels[1][column], levels[2][column]]
                logits = target(torch.tensor([[*text, *guesses]])).logits[0, -1]
                assert torch.allclose(logits, accepted.probed[line, 6 + column], atol=1e-9)
                compared.append(column)
        learn(call, accepted)

    monkeypatch.setattr(loop, "learn", compare)
    target.generate(**inputs, **{**GREEDY, "max_new_tokens": 8}, speculative={"draft_tokens": 3, "adaptive": False})
    assert len(compared) > 30


def test_the_shape_of_a_window() -> None:
    depths, visible = window_shape(2, 3)
    assert depths.tolist() == [1, 2, 3, 2, 3, 4]
    assert visible[2].tolist() == [True, True, True, False, False, False]
    assert visible[4].tolist() == [True, True, False, False, True, False]


def test_the_latest_ngrams_come_first_and_lead_on() -> None:
    pool = NgramPool()
    for ngram in ([1, 2, 3], [1, 4, 5], [3, 6, 7], [1, 2, 8]):
        pool.add(ngram)
    first = pool.after(pool.root(1))
    assert [child.token for child in first] == [2, 4]
    assert [child.token for child in pool.after(first[0])] == [8, 3]
    three = pool.after(first[0])[1]
    assert [child.token for child in pool.after(three)] == [6]  # the n-gram has ended, and one begins with its last token
    assert pool.after(pool.root(9)) == []


def test_the_window_moves_with_the_text() -> None:
    context = context_for([[2, 3, 4, 5, 6]])
    drafter = LookaheadDrafter(window=3, ngram=3)
    drafter.begin(context)
    tree = drafter.propose(context, Budget([2], 4))
    assert tree.probes is not None and tree.probes.tokens.tolist() == [[2, 3, 4, 5, 6, 2]]
    logits = torch.zeros(1, 1, 12)
    probed = torch.zeros(1, 6, 12)
    probed[0, torch.arange(3, 6), torch.tensor([7, 8, 9])] = 1
    context.sequences.append([0], [[10]], in_step=False)
    drafter.commit(context, specheads.drafters.Accepted(tree, [[]], [[10]], logits, None, probed))
    assert drafter.guesses.tolist() == [[[5, 6, 2], [7, 8, 9]]]
    assert [child.token for child in drafter.pool.after(drafter.pool.root(3))] == [6]
    settle(drafter, context, [[3, 6]])  # a round without a window: two tokens on
    assert drafter.guesses.tolist() == [[[2, 5, 6], [9, 7, 8]]]


def test_where_columns_are_dear_the_window_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a window that brings nothing costs is bounded, and one that costs next to nothing stays open."""
    cost, widths, gained = PassCost(torch.device("cpu"), is_packed=False), [], []
    keep = loop.keep

    def noted(call: loop.Call, tree: DraftTree, *rest: Any) -> Any:
        widths.append(1 + tree.size + (0 if tree.probes is None else tree.probes.tokens.shape[1]))
        accepted = keep(call, tree, *rest)
        gained.append(len(accepted.paths[0]))
        return accepted

    monkeypatch.setattr(loop, "keep", noted)
    target = specheads.enable(tiny(spread=0.6), drafter=LookaheadDrafter())
    arguments = {**GREEDY, "do_sample": True, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 150}
    target.generate(**prompt("llama", 1), **arguments, speculative={"seed": 1})
    spent = sum(cost(1, width) - 1 for width in widths[1:])
    assert max(widths) > 1
    assert spent - sum(gained) < ALLOWANCE + INCOME * len(widths)
    assert sum(width > 1 for width in widths) < len(widths) / 2
    cheap = Budget([4], 4, balance=1.0, pass_cost=lambda tokens: 1 + tokens / 1000)
    dear = Budget([4], 4, balance=1.0, pass_cost=lambda tokens: 1.2 + tokens / 20)
    context = context_for([[2, 3, 4]])
    drafter = LookaheadDrafter()
    drafter.begin(context)
    assert drafter.propose(context, cheap).probes.tokens.shape == (1, 60)
    assert drafter.propose(context, dear).probes.tokens.shape == (1, 12)
    assert drafter.propose(context, replace(dear, balance=0.5)).probes is None
    assert drafter.propose(context, Budget([0], 0)).probes is None


@pytest.mark.parametrize("family", ["t5", "bloom", "mamba2"])
def test_targets_that_take_chains_are_refused(family: str) -> None:
    for drafter in ("lookahead", LookaheadDrafter(window=3)):
        with pytest.raises(ValueError, match="takes chains only"):
            specheads.enable(tiny(family), drafter=drafter)
    target = specheads.enable(tiny(family))
    target.register_forward_pre_hook(lambda *_: pytest.fail("It should be refused before anything is computed."))
    with pytest.raises(ValueError, match="takes chains only"):
        target.generate(**prompt(family, 1), **GREEDY, speculative={"drafter": "lookahead"})


def test_a_window_of_nothing_is_refused() -> None:
    for settings in ({"window": 1}, {"ngram": 1}):
        with pytest.raises(ValueError, match="2 or more"):
            LookaheadDrafter(**settings)


def test_the_window_keeps_within_the_positions_of_the_target() -> None:
    target = specheads.enable(tiny("gpt2", max_position_embeddings=24), drafter="lookahead")
    inputs = prompt("gpt2", 1)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=13)
    assert torch.equal(target.generate(**inputs, do_sample=False, max_new_tokens=13, speculative={"adaptive": False}), plain)


def test_probes_of_another_drafter_are_checked() -> None:
    tree = DraftTree.empty(1, torch.device("cpu"))
    tree.probes = Probes(torch.tensor([[40]]), torch.tensor([[1]]), torch.ones(1, 1, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="probes"):
        tree.check(1, 32, takes_trees=True)
    tree.probes.tokens.fill_(3)
    tree.check(1, 32, takes_trees=True)
    with pytest.raises(ValueError, match="probes"):
        tree.check(1, 32, takes_trees=False)
