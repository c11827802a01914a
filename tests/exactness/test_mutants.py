"""Every known mistake, made on purpose: the whole-loop replay, which passes without it, must see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads import loop, verify
from specheads.drafters import draft_model, growth, head
from specheads.processors import RoundLaws, ScoreProcessors
from specheads.tree import NO_TOKEN, DraftTree

from .whole_loop import differs, target_and_draft

CHAIN = {"draft_tokens": 2, "adaptive": False, "verification": "token"}
BLOCK = {**CHAIN, "verification": "block"}
TREE = {"draft_tokens": 1, "tree_nodes": 2, "adaptive": False, "verification": "traversal"}

Patch = Callable[[pytest.MonkeyPatch], None]


def argmax_draft_with_sampled_law(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(growth, "draw", lambda context, law, lines, depth: law.argmax(dim=-1))


def truncated_draft_with_raw_law(patch: pytest.MonkeyPatch) -> None:
    original = growth.draw

    def draw(context: Any, law: Tensor, lines: Sequence[int], depth: int) -> Tensor:
        kept = torch.where(law >= law.topk(2, dim=-1).values[:, -1:], law, 0.0)
        return original(context, kept, lines, depth)

    patch.setattr(growth, "draw", draw)


def _drop(patch: pytest.MonkeyPatch, drops: Callable[[DraftTree], Tensor]) -> None:
    original = draft_model.grow_chain

    def grow(*arguments: Any) -> growth.Grown:
        grown = original(*arguments)
        tree = grown.tree
        if tree.proposals is None:
            return grown
        dropped = drops(tree).cumsum(dim=1) > 0
        return growth.Grown(DraftTree.chain(tree.tokens.masked_fill(dropped, NO_TOKEN), tree.proposals), grown.slot_of)

    for drafters in (draft_model, head):
        patch.setattr(drafters, "grow_chain", grow)


def _own_probability(tree: DraftTree) -> Tensor:
    assert tree.proposals is not None
    return tree.proposals.gather(2, tree.tokens[:, :, None])[:, :, 0]


def look_then_drop(patch: pytest.MonkeyPatch) -> None:
    _drop(patch, lambda tree: _own_probability(tree) < 0.3)


def drop_in_hindsight(patch: pytest.MonkeyPatch) -> None:
    def drops(tree: DraftTree) -> Tensor:
        later = _own_probability(tree).roll(-1, dims=1)
        later[:, -1] = 1.0
        return later < 0.3

    _drop(patch, drops)


def resample_from_the_target(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify, "_strike", lambda *arguments: None)


def no_processors_on_the_bonus(patch: pytest.MonkeyPatch) -> None:
    original = RoundLaws.everywhere

    def everywhere(self: RoundLaws, tree: DraftTree) -> Tensor:
        scores = original(self, tree).clone()
        if tree.size:
            scores[:, -1] = self.logits[:, -1]
        return scores

    patch.setattr(RoundLaws, "everywhere", everywhere)


def committed_prefix_only(patch: pytest.MonkeyPatch) -> None:
    original = ScoreProcessors.__call__

    def call(self: ScoreProcessors, rows: Sequence[int], drafted: Tensor, scores: Tensor) -> Tensor:
        return original(self, rows, drafted[:, :0], scores)

    patch.setattr(ScoreProcessors, "__call__", call)


def typical_acceptance(patch: pytest.MonkeyPatch) -> None:
    original = verify._acceptances

    def acceptances(tree: DraftTree, owed: Tensor, carry: bool) -> Tensor:
        laws = owed.clone()
        accepted = original(tree, owed, carry)
        for node in range(1, tree.size + 1):
            law = laws[0, int(tree.parents[0, node - 1])]
            threshold = min(0.3, 0.5 * float(torch.exp((law * law.clamp(min=1e-9).log()).sum())))
            accepted[0, node] = float(law[tree.tokens[0, node - 1]] > threshold)
        return accepted

    patch.setattr(verify, "_acceptances", acceptances)


def paper_rule_on_point_masses(patch: pytest.MonkeyPatch) -> None:
    """The ratio to the draft's probability, for a child that was not sampled from it."""

    def collect(levels: Sequence[Any]) -> tuple[Tensor, Tensor]:
        laws, index = original(levels)
        assert laws is not None and index is not None
        return laws, index.clamp(min=0)

    original = growth._collect_laws
    patch.setattr(growth, "_collect_laws", collect)


def siblings_out_of_order(patch: pytest.MonkeyPatch) -> None:
    original = draft_model.grow_tree

    def grow(*arguments: Any) -> growth.Grown:
        grown = original(*arguments)
        tree = grown.tree
        if tree.proposals is None or tree.proposal_of is None or tree.depth > 1:
            return grown
        law = tree.proposals.gather(2, tree.tokens[:, :, None].clamp(min=0).expand(-1, -1, 1)[:, :1])
        order = torch.tensor([[1, 0]]) if float(law) < 0.5 else torch.tensor([[0, 1]])
        return growth.Grown(
            DraftTree(tree.tokens.gather(1, order), tree.parents, 1, tree.proposals, tree.proposal_of.gather(1, order)),
            grown.slot_of,
        )

    patch.setattr(draft_model, "grow_tree", grow)


def block_walk_that_breaks_at_the_first_refusal(patch: pytest.MonkeyPatch) -> None:
    original = verify._end_law
    patch.setattr(verify, "_end_law", lambda probability, parents, carry: original(probability, parents, False))


def stop_rules_once_a_block(patch: pytest.MonkeyPatch) -> None:
    from specheads.sequences import Sequences

    original = Sequences._extend

    def extend(self: Sequences, rows: list[int], tokens: list[int]) -> None:
        original(self, rows, tokens)
        if self.generated(rows[0]) % 2:
            self.finished[rows[0]] = self.widths[rows[0]] >= self.max_length

    patch.setattr(Sequences, "_extend", extend)


def draft_left_in_the_cache(patch: pytest.MonkeyPatch) -> None:
    """A rejected token stays and the row's positions are those of the draft."""
    from specheads.target import SlotRunner

    original = SlotRunner.commit

    def commit(self: SlotRunner, kept: Sequence[Sequence[int]]) -> None:
        original(self, [list(range(self.written - 1)) if self.written > 1 and len(slots) == 1 else slots for slots in kept])

    patch.setattr(SlotRunner, "commit", commit)


def last_law_for_every_node(patch: pytest.MonkeyPatch) -> None:
    from specheads.target import Pass

    original = loop.forward

    def forward(call: Any, tree: DraftTree) -> Pass:
        logits = original(call, tree).logits
        return Pass(logits[:, :1].expand_as(logits).contiguous())

    patch.setattr(loop, "forward", forward)


MUTANTS: dict[str, tuple[Patch, dict[str, Any], str]] = {
    "argmax draft, sampled law": (argmax_draft_with_sampled_law, CHAIN, "plain"),
    "truncated draft, raw law": (truncated_draft_with_raw_law, CHAIN, "plain"),
    "look, then drop": (look_then_drop, CHAIN, "plain"),
    "drop in hindsight": (drop_in_hindsight, CHAIN, "plain"),
    "resample from the target": (resample_from_the_target, CHAIN, "plain"),
    "no processors on the bonus": (no_processors_on_the_bonus, BLOCK, "warped"),
    "committed prefix only": (committed_prefix_only, BLOCK, "repetition"),
    "typical acceptance": (typical_acceptance, CHAIN, "plain"),
    "paper's rule on point masses": (paper_rule_on_point_masses, TREE, "plain"),
    "siblings out of order": (siblings_out_of_order, TREE, "plain"),
    "break at the first refusal": (block_walk_that_breaks_at_the_first_refusal, BLOCK, "plain"),
    "stop rules once a block": (stop_rules_once_a_block, BLOCK, "end_token"),
    "draft left in the cache": (draft_left_in_the_cache, BLOCK, "plain"),
    "last law for every node": (last_law_for_every_node, BLOCK, "plain"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_replay_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, settings, setting = MUTANTS[name]
    target, draft = target_and_draft()
    mutate(monkeypatch)
    assert differs(target, draft, settings, setting)


def zero_probability_accepted(weights: Tensor, arrivals: Tensor) -> Tensor:
    """`u * q <= p` in place of `<`: with a coin of nought a token of probability nought passes."""
    return (arrivals * (weights == 0) * 1e9 + weights).argmax(dim=-1)


def test_no_draw_falls_on_a_zero_weight() -> None:
    from specheads.randomness import race

    weights = torch.tensor([[0.0, 0.5, 0.0, 0.5]]).expand(1000, -1)
    arrivals = torch.zeros(1000, 4)  # the coin that comes up nought everywhere
    assert set(race(weights, arrivals.clone()).tolist()) <= {1, 3}
    assert not set(zero_probability_accepted(weights, arrivals + 1).tolist()) <= {1, 3}
