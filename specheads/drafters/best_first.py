"""Grows a draft from a row's last token, the most promising node first.

A node is accepted with about the product of the probabilities along its path, so the N best products make the tree of N nodes
that gets the most accepted (algorithm of OPT-Tree, Wang et al. 2024, arXiv 2406.17276); as products fall along a path, the best
node not yet taken always hangs below one that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import torch

from ..tree import DraftTree
from .base import Budget, DraftContext

# A node that is accepted less often than this costs more than it brings on any machine.
LEAST_VALUE = 0.005


class Candidate(NamedTuple):
    """A token that may come next.

    Args:
        probability: How likely it follows its parent.
        token: The token.
        state: Where the suffix automaton of the row stands after it.
        length: How many tokens of context, this one included, that state stands for.
    """

    probability: float
    token: int
    state: int = 0
    length: int = 0


Children = Callable[[Candidate], Sequence[Candidate]]


def is_single_path(context: DraftContext, budget: Budget) -> bool:
    """Whether a draft is to be a chain: the target takes no trees, or there are no nodes for a second path."""
    return not context.takes_trees or budget.nodes <= budget.depth


class Draft(NamedTuple):
    """A row's draft.

    Args:
        tokens: The nodes' tokens, a parent's before its children's.
        parents: The nodes' parents, 0 for the root.
        value: How many of them are expected to be accepted.
    """

    tokens: list[int]
    parents: list[int]
    value: float


def grow_paying(
    root: Candidate, children: Children, budget: Budget, depth: int, end_tokens: set[int], single_path: bool
) -> Draft:
    """A row's draft of the nodes that pay for themselves.

    Args:
        root: The row's last token.
        children: What may follow a candidate.
        budget: The round's budget.
        depth: The row's depth within it.
        end_tokens: Tokens after which nothing is drafted.
        single_path: Follow the most probable child only.
    """
    return grow(root, children, budget.nodes, depth, end_tokens, single_path, max(LEAST_VALUE, budget.node_cost))


def tree_of(drafts: Sequence[Draft], budget: Budget, device: torch.device) -> DraftTree:
    """The drafts of all rows as one tree, or an empty one if together they are not expected to bring what they cost."""
    widest = max(len(draft.tokens) for draft in drafts)
    if sum(draft.value for draft in drafts) <= len(drafts) * (budget.entry_cost + budget.node_cost * widest):
        return DraftTree.empty(len(drafts), device)
    tree = DraftTree.from_rows([(draft.tokens, draft.parents) for draft in drafts], device)
    tree.expected = sum(draft.value for draft in drafts)
    return tree


def grow(
    root: Candidate,
    children: Children,
    nodes: int,
    depth: int,
    end_tokens: set[int],
    single_path: bool,
    least_value: float = LEAST_VALUE,
) -> Draft:
    """A row's draft.

    Args:
        root: The row's last token.
        children: What may follow a candidate; of equally probable ones the first is taken first.
        nodes: The most nodes.
        depth: The most tokens along a path.
        end_tokens: Tokens after which nothing is drafted.
        single_path: Follow the most probable child only.
        least_value: The least probability of a node.
    """
    tokens: list[int] = []
    parents: list[int] = []
    total = 0.0
    serial = count()
    waiting = [(-1.0, next(serial), 0, 0, root)]
    while waiting and depth:
        value, _, level, parent, candidate = heappop(waiting)
        if level:
            tokens.append(candidate.token)
            parents.append(parent)
            total -= value
        if len(tokens) >= nodes:
            break
        if level == depth or (level and candidate.token in end_tokens):
            continue
        following = children(candidate)
        if single_path and following:
            following = [max(following, key=lambda child: child.probability)]
        for child in following:
            if -value * child.probability >= least_value:
                heappush(waiting, (value * child.probability, next(serial), level + 1, len(tokens), child))
    return Draft(tokens, parents, total)
