"""A head's drafts and copies of earlier text: the default once a head is attached.

Where a text repeats itself, a copy costs nothing and goes further than what a head guesses; elsewhere there is little to copy.
Where a draft may branch, both stand in one tree. Where it is a single path, or its nodes are drawn, a row has the one that
promises more. Which it is, and how far the head is asked, is settled before anything is drawn, from what both have achieved on
the text so far, so a sampled token keeps the law it was drawn from.

Shapes: B lines, N draft nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ..pacing import INCOME, TRY_DEPTH, TRY_GAP, Acceptance, caution, shares
from ..tree import NO_TOKEN, DraftTree, longest_path
from .auto import AutoDrafter
from .base import Accepted, Budget, DraftContext, Drafter
from .best_first import Draft, is_single_path
from .growth import samples
from .joined import Additions, joined, openings
from .suffix import SuffixDrafter


class Plan(NamedTuple):
    """What a round may draft.

    Args:
        asks: Per line, how many levels the source is to draft; 0 for a line that copies.
        width: The most tokens along a line's path.
        gain: What it is expected to bring beyond its cost, as the budget counts.
        expected: How many tokens are expected to be accepted, over all lines.
    """

    asks: list[int]
    width: int
    gain: float
    expected: float


class WithSuffix:
    """Drafts with another drafter and with copies (see `AutoDrafter`): with both at once in a tree, else with the better.

    Args:
        source: The other drafter.
    """

    weighs_nodes = True

    def __init__(self, source: Drafter):
        self.source = source
        self.step_cost = source.step_cost
        self.feature_layers: Sequence[int] = getattr(source, "feature_layers", ())
        self.needs_step = getattr(source, "needs_step", False)
        self.settings = getattr(source, "settings", None)

    def begin(self, context: DraftContext) -> None:
        """Lets both read the prompt."""
        self.source = copy.copy(self.source)
        # On an accelerator, to read the target's candidates is one more wait in each round.
        self.copier: AutoDrafter | SuffixDrafter = AutoDrafter() if context.device.type == "cpu" else SuffixDrafter()
        self.source.begin(context)
        self.copier.begin(context)
        self.acceptance = Acceptance(max(1, context.config.draft_tokens))
        self.additions = Additions(max(1, context.config.draft_tokens))
        self.asks = [0] * len(context.rows)
        self.open_shares: list[list[float]] = []
        self.idle = self.copied = 0

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """Copies and a draft of the source, in one tree or by line."""
        self.asks, self.open_shares = [0] * len(context.rows), [[] for _ in context.rows]
        if not budget.depth:
            return DraftTree.empty(len(context.rows), context.device)
        is_drawn = samples(context) and context.weighs_proposals
        return self._either(context, budget) if is_drawn or is_single_path(context, budget) else self._both(context, budget)

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Shows both what was kept."""
        if any(self.open_shares):
            added = [[node > self.copied for node in path] for path in accepted.paths]
            self.additions.observe(context.rows, self.open_shares, added)
        else:
            self.acceptance.observe(context.rows, self.asks, [len(path) for path in accepted.paths])
        self.copier.commit(context, accepted)
        self.source.commit(context, accepted)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Goes on with some lines."""
        self.copier.keep_rows(lines)
        self.source.keep_rows(lines)

    def _both(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A tree of what is copied and of what the source adds to it; up to half of the nodes are the source's."""
        own = max(1, budget.nodes // 2)
        copies = self.copier.drafts(context, replace(budget, nodes=budget.nodes - own))
        copies, levels, added = self._shared(context, budget, copies, most_levels(own))
        self.idle = 0 if levels else self.idle + 1
        asked = replace(budget, depths=[min(depth, levels) for depth in budget.depths], nodes=own, entry_cost=0.0)
        nothing = DraftTree.empty(len(copies), context.device)
        drafted = self.source.propose(context, asked) if levels else nothing
        self.open_shares = [
            openings(draft, min(depth, drafted.depth)) for draft, depth in zip(copies, asked.depths, strict=True)
        ]
        copied = DraftTree.from_rows([(draft.tokens, draft.parents) for draft in copies], context.device)
        self.copied = copied.size
        tree = joined(copied, drafted)
        tree.steps = drafted.depth
        if tree.size:
            tree.expected = sum(sum(draft.values) for draft in copies) + added
        return tree

    def _shared(self, context: DraftContext, budget: Budget, copies: list[Draft], most: int) -> tuple[list[Draft], int, float]:
        """The copies that are drafted, how many levels of the source, and how many tokens these are expected to add."""
        fixed, weights, free = not context.config.adaptive, shares(context), replace(budget, entry_cost=0.0)
        copied = _best([0] * len(copies), [draft.values for draft in copies], weights, free, 0.0, fixed)
        kept = [draft.first(copied.width) for draft in copies]
        left = [openings(draft, min(depth, most)) for draft, depth in zip(kept, budget.depths, strict=True)]
        additions = [self.additions.expected(row, each) for row, each in zip(context.rows, left, strict=True)]
        level_cost = 0.0 if fixed else budget.pass_worth * self.step_cost
        added = _best([len(each) for each in additions], additions, weights, free, level_cost, fixed)
        if not fixed and copied.gain + added.gain <= budget.entry_cost:
            # The source is tried by itself now and then; copies cost nothing to watch.
            kept, added = [draft.first(0) for draft in copies], Plan([], 0, 0.0, 0.0)
        levels = added.width
        if not levels and not fixed and self._is_due(budget, len(copies)):
            levels = min(TRY_DEPTH, budget.depth, most)
        return kept, levels, sum(sum(each[:levels]) for each in additions)

    def _either(self, context: DraftContext, budget: Budget) -> DraftTree:
        """Per line, a copy or a draft of the source."""
        copies = self.copier.drafts(context, budget)
        plan = self._plan(context, budget, copies)
        self.idle = 0 if any(plan.asks) else self.idle + 1
        drafted, self.asks = self._drafted(context, budget, plan)
        kept = {line: copies[line].first(plan.width) for line, asked in enumerate(self.asks) if not asked}
        tree = with_drafts(drafted, kept)
        tree.steps = drafted.depth
        tree.expected = plan.expected if tree.size else None
        return tree

    def _plan(self, context: DraftContext, budget: Budget, copies: Sequence[Draft]) -> Plan:
        """The better of copies alone, and of what is more promising for each line."""
        weights = shares(context)
        copied = [draft.values for draft in copies]
        guessed = [self.acceptance.survival(row)[:depth] for row, depth in zip(context.rows, budget.depths, strict=True)]
        asks = [len(own) if sum(own) > sum(other) else 0 for own, other in zip(guessed, copied, strict=True)]
        chosen = [own if asked else other for own, other, asked in zip(guessed, copied, asks, strict=True)]
        fixed = not context.config.adaptive
        alone = _best([0] * len(asks), copied, weights, budget, 0.0, fixed)
        level_cost = 0.0 if fixed else budget.pass_worth * self.step_cost
        both = _best(asks, chosen, weights, budget, level_cost, fixed) if any(asks) else alone
        plan = both if both.gain > alone.gain or (fixed and any(asks)) else alone
        if any(plan.asks) or plan.width or not self._is_due(budget, len(context.rows)):
            return plan
        # Now and then the source is tried though it is not expected to pay: the text may have changed.
        tried = [min(TRY_DEPTH, depth) for depth in budget.depths]
        return Plan(tried, max(tried), 0.0, sum(sum(own[:depth]) for own, depth in zip(guessed, tried, strict=True)))

    def _is_due(self, budget: Budget, lines: int) -> bool:
        cost = budget.entry_cost + TRY_DEPTH * (budget.node_cost + budget.pass_worth * self.step_cost)
        return self.idle >= max(TRY_GAP, cost / (budget.pass_worth * INCOME * caution(lines)))

    def _drafted(self, context: DraftContext, budget: Budget, plan: Plan) -> tuple[DraftTree, list[int]]:
        """The source's draft, and how many levels of it each line has been asked for: none where it has nothing."""
        depths = [min(asked, plan.width) for asked in plan.asks]
        nothing = DraftTree.empty(len(depths), context.device)
        if not any(depths):
            return nothing, [0] * len(depths)
        is_tree = context.takes_trees and budget.nodes > budget.depth
        nodes = budget.nodes if is_tree else max(depths)
        drafted = self.source.propose(context, replace(budget, depths=depths, nodes=nodes, entry_cost=0.0))
        return (drafted, depths) if drafted.size else (nothing, [0] * len(depths))


def most_levels(nodes: int) -> int:
    """How deep a tree of so many nodes goes that leaves about one second choice to each level: deeper, fewer are accepted."""
    return nodes // 2 + 1


def _best(
    asks: list[int],
    values: Sequence[Sequence[float]],
    weights: Sequence[float],
    budget: Budget,
    level_cost: float,
    fixed: bool,
) -> Plan:
    """The width that brings most; the full one if it is fixed.

    Args:
        asks: Per line, how many levels the source is asked for.
        values: Per line, how likely each of its tokens is to be accepted.
        weights: What a token of each line counts for.
        budget: The round's budget.
        level_cost: What each level of the source must bring.
        fixed: Whether the width is not to be chosen.
    """
    longest, gain = max(map(len, values)), -budget.entry_cost
    best, best_gain = 0, 0.0
    for level in range(longest):
        gain -= budget.node_cost + (level_cost if level < max(asks) else 0.0)
        gain += sum(share * own[level] for share, own in zip(weights, values, strict=True) if level < len(own))
        if gain > best_gain or fixed:
            best, best_gain = level + 1, gain
    return Plan(asks if best else [0] * len(asks), best, best_gain, sum(sum(own[:best]) for own in values))


def with_drafts(tree: DraftTree, drafts: dict[int, Draft]) -> DraftTree:
    """A tree with other drafts, of point masses, in some of its lines.

    Args:
        tree: The tree.
        drafts: By line, what takes the place of its nodes.
    """
    size = max([tree.size, *(len(draft.tokens) for draft in drafts.values())])
    if not drafts or not size:
        return tree
    device, added = tree.tokens.device, size - tree.size
    pad = torch.nn.functional.pad
    is_chain = tree.is_chain and all(list(draft.parents) == list(range(len(draft.parents))) for draft in drafts.values())
    order = torch.arange(size, device=device)
    tokens = pad(tree.tokens, (0, added), value=NO_TOKEN)
    # In a chain each node hangs below the one before it, those that are not there too.
    parents = order.expand_as(tokens) if is_chain else pad(tree.parents, (0, added))
    lines = torch.tensor(list(drafts), device=device)
    table = torch.tensor(
        [
            [[*draft.tokens, *[NO_TOKEN] * (size - len(draft.tokens))] for draft in drafts.values()],
            [[*draft.parents, *[0] * (size - len(draft.parents))] for draft in drafts.values()],
        ],
        device=device,
    )
    tokens = tokens.index_copy(0, lines, table[0])
    parents = parents if is_chain else parents.index_copy(0, lines, table[1])
    proposal_of = None if tree.proposal_of is None else pad(tree.proposal_of, (0, added), value=-1).index_fill(0, lines, -1)
    depth = max([tree.depth, *(longest_path(draft.parents) for draft in drafts.values())])
    return DraftTree(tokens, parents, depth, tree.proposals, proposal_of, is_chain)
