"""A head's drafts and copies in one: the law is the target's, whichever a row drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specheads
from specheads.drafters import with_suffix
from specheads.drafters.best_first import Draft
from specheads.tree import DraftTree

from .head_loop import BATCH, BATCH_MASK, KNOWN, random_head
from .replay import total_variation
from .test_greedy import other_target, prompt
from .test_greedy_heads import HEADS, NEW_TOKENS
from .whole_loop import PROMPT, plain_law, speculative_law, target_and_draft

# A text that begins to repeat itself, so that there is something to copy.
REPEATS = torch.tensor([[1, 0, 2, 1, 0]])
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "eagle 3 chain": ("eagle 3", {"draft_tokens": KNOWN}, {}),
    "eagle 3 tree": ("eagle 3", {}, {"tree_nodes": 3}),
    "eagle 3 joined": ("eagle 3", {}, {"tree_nodes": 5, "verification": "match"}),
    "medusa chain": ("medusa", {}, {}),
}


class Seen:
    """Counts, over calls, the lines that copied and those that drafted with the head; in a joined tree, both do."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.copied = self.guessed = 0
        propose = with_suffix.WithSuffix.propose

        def noted(drafter: with_suffix.WithSuffix, context: Any, budget: Any) -> DraftTree:
            tree = propose(drafter, context, budget)
            if any(drafter.open_shares):
                self.copied += drafter.copied > 0
                self.guessed += tree.size > drafter.copied
                return tree
            has = (tree.tokens >= 0).any(dim=1).tolist() if tree.size else [False] * len(context.rows)
            self.copied += sum(own and not asked for own, asked in zip(has, drafter.asks, strict=True))
            self.guessed += sum(own and asked > 0 for own, asked in zip(has, drafter.asks, strict=True))
            return tree

        patch.setattr(with_suffix.WithSuffix, "propose", noted)


def distance(kind: str, batch: int) -> float:
    """Total variation between speculative and plain sampling of one row."""
    name, fields, settings = KINDS[kind]
    target, _ = target_and_draft()
    specheads.enable(target, drafter=random_head(target, name, **fields))
    ids, mask = (REPEATS, torch.ones_like(REPEATS)) if batch == 1 else (BATCH, BATCH_MASK)
    arguments = {"max_new_tokens": 4 if batch == 1 else 3, "top_k": 0, "temperature": 0.7}
    settings = {"adaptive": False, "draft_tokens": 2, **settings}
    law, _ = speculative_law(target, ids, 0, 1, attention_mask=mask, speculative=settings, **arguments)
    return total_variation(law, plain_law(target, ids, 0, mask, **arguments))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_is_kept(kind: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    assert distance(kind, batch) < 1e-9
    assert seen.copied
    assert seen.guessed


def test_a_copy_that_passes_for_a_drawn_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies given the law of what stood in their place."""
    overlay = with_suffix.with_drafts

    def forgetful(tree: DraftTree, drafts: dict[int, Draft]) -> DraftTree:
        joined = overlay(tree, drafts)
        if tree.proposal_of is not None:
            joined.proposal_of = torch.arange(joined.size).expand_as(joined.tokens).clamp(max=tree.proposals.shape[1] - 1)
        return joined

    monkeypatch.setattr(with_suffix, "with_drafts", forgetful)
    assert max(distance(kind, 3) for kind in ("eagle 3 chain", "medusa chain")) > 1e-3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "t5"])
def test_greedy_text_is_plain(family: str, adaptive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = other_target(family), Seen(monkeypatch)
    for batch in (1, 4):
        plain = target.generate(**prompt(family, batch), max_new_tokens=NEW_TOKENS, do_sample=False)
        for kind in HEADS:
            specheads.enable(target, drafter=random_head(target, kind, seed=5, **HEADS[kind][0]))
            settings = {**HEADS[kind][1], "adaptive": adaptive}
            out = target.generate(**prompt(family, batch), max_new_tokens=NEW_TOKENS, do_sample=False, speculative=settings)
            assert torch.equal(out, plain), (kind, batch)
    assert seen.copied + seen.guessed
    assert adaptive or (seen.copied and seen.guessed)


def test_the_shape_of_joined_drafts() -> None:
    chain = DraftTree.chain(torch.tensor([[4, 5], [6, 7]]), torch.full((2, 2, 8), 1 / 8))
    joined = with_suffix.with_drafts(chain, {1: Draft([1, 2, 3], [0, 1, 2], [0.9, 0.8, 0.7])})
    joined.check(2, 8, takes_trees=False)
    assert joined.tokens.tolist() == [[4, 5, -1], [1, 2, 3]]
    assert joined.proposal_of is not None
    assert joined.proposal_of.tolist() == [[0, 1, -1], [-1, -1, -1]]
    assert (joined.depth, joined.is_chain) == (3, True)
    branched = with_suffix.with_drafts(chain, {0: Draft([1, 2], [0, 0], [0.5, 0.4])})
    branched.check(2, 8, takes_trees=True)
    assert branched.parents.tolist() == [[0, 0], [0, 1]]
    assert not branched.is_chain
    assert with_suffix.with_drafts(chain, {0: Draft([], [], [])}).tokens[0].tolist() == [-1, -1]


class Oracle:
    """Drafts what the target will say: the text after the prompt."""

    step_cost, weighs_nodes = 0.1, False

    def __init__(self, text: list[int]):
        self.text = text

    def begin(self, context: Any) -> None:
        """Nothing changes."""

    def propose(self, context: Any, budget: Any) -> DraftTree:
        """The next tokens of the text."""
        place = context.sequences.generated(0)
        return DraftTree.chain(torch.tensor([self.text[place : place + budget.depth]]))

    def commit(self, context: Any, accepted: Any) -> None:
        """It knows."""

    def keep_rows(self, lines: Any) -> None:
        """There is one."""


def rounds_with_an_oracle() -> tuple[int, int]:
    """The rounds of a text, drafted by one who knows it and by copies of it; and how many there must be."""
    target, _ = target_and_draft(16)
    text = target.generate(PROMPT, max_new_tokens=61, do_sample=False, eos_token_id=None)
    specheads.enable(target, drafter=with_suffix.WithSuffix(Oracle(text[0, PROMPT.shape[1] :].tolist())))
    settings = {"draft_tokens": 3, "tree_nodes": 8, "adaptive": False}
    arguments = {"max_new_tokens": 61, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    out = target.generate(PROMPT, speculative=settings, **arguments)
    assert torch.equal(out.sequences, text)
    return out.speculation.num_spec_steps, 1 + 60 // 4  # the prompt's pass gives the first token


def test_no_path_is_lost_where_both_stand_in_one_tree() -> None:
    rounds, fewest = rounds_with_an_oracle()
    assert rounds == fewest


def test_a_path_that_is_lost_below_a_copy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is common to both is left to the copies, and what came below it falls away."""
    whole = with_suffix.joined

    def careless(copies: DraftTree, other: DraftTree) -> DraftTree:
        first = other.tokens[:, :1]
        lost = copies.size > 0 and bool((copies.tokens[copies.parents == 0] == first).any())
        return copies if lost else whole(copies, other)

    monkeypatch.setattr(with_suffix, "joined", careless)
    rounds, fewest = rounds_with_an_oracle()
    assert rounds > fewest


def test_what_is_certain_is_copied_without_a_look_at_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long copies that always hold leave the head at rest; where there is nothing to copy, a bad head is given up."""
    target, _ = target_and_draft(16)
    specheads.enable(target, drafter=random_head(target, "eagle 3"))
    seen = Seen(monkeypatch)
    target.generate(PROMPT, max_new_tokens=160, do_sample=False, speculative=True)
    assert seen.copied > seen.guessed
