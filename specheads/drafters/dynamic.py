"""Dynamic draft trees: grown where the draft's law says that tokens will be accepted (Li et al. 2024, EAGLE-2).

Level by level, the nodes with the largest products of draft probabilities are given children; at last the best nodes of all
levels stay. As products fall along a path, what stays hangs together. All nodes are point masses: which ones stay is a function
of what is committed.

Shapes: B lines, C candidates of all levels, N nodes that stay, m tokens of the round that the source has run on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..pacing import shares
from ..tree import NO_TOKEN, DraftTree
from .base import DraftContext
from .best_first import LEAST_VALUE
from .growth import DraftSource, Frontier, Level, children_of, descend

# A pass over more nodes than this costs more time than the choice between them brings.
MOST_EXPANDED = 10


def grow_dynamic(
    source: DraftSource, context: DraftContext, logits: Tensor, seen: int, depth: int, nodes: int, node_cost: float
) -> DraftTree:
    """A tree per line of the nodes that are most probable.

    Args:
        source: What drafts.
        context: The call.
        logits: `[B, V']` at the root.
        seen: m.
        depth: The most levels.
        nodes: N, at most.
        node_cost: What a column of nodes must bring, in tokens of the lines by their shares (`pacing.shares`).
    """
    line_shares = shares(context)
    weights = torch.tensor(line_shares, dtype=torch.double, device=logits.device)[:, None]
    frontier = Frontier.at_root(context, logits, seen)
    width = min(MOST_EXPANDED, -(-nodes // depth))
    levels: list[Level] = []
    parents: list[Tensor] = []
    made = 0
    while True:
        level = children_of(source, context, frontier, nodes, len(levels), is_mixed=False)
        levels.append(level)
        parents.append(frontier.nodes.gather(1, level.parents))
        if len(levels) == depth or _is_hopeless(level, line_shares, node_cost):
            break
        frontier, _ = descend(source, frontier, level, width, made, seen + len(levels) - 1)
        made += level.tokens.shape[1]
    return _best(levels, torch.cat(parents, dim=1), nodes, weights, node_cost)


def _is_hopeless(level: Level, line_shares: Sequence[float], node_cost: float) -> bool:
    """Whether no child of a level can pay; on a CPU, where it costs no wait to look."""
    if level.value.device.type != "cpu":
        return False
    chances = [math.exp(value) for value in level.value.amax(dim=1).tolist()]
    worth = sum(share * chance for share, chance in zip(line_shares, chances, strict=True))
    return not (worth >= node_cost and max(chances) >= LEAST_VALUE)  # nor if a chance is NaN


def _pays(value: Tensor, weights: Tensor, node_cost: float) -> Tensor:
    """Which nodes `[B, N]` pay, given log probabilities that fall along each line: the lines pay for a column together."""
    chance = value.double().exp()
    return ((weights * chance).sum(dim=0) >= node_cost) & (chance >= LEAST_VALUE)


def _best(levels: Sequence[Level], parents: Tensor, nodes: int, weights: Tensor, node_cost: float) -> DraftTree:
    """The tree of the best candidates.

    Args:
        levels: Of candidates.
        parents: `[B, C]` their parents: a candidate's index among all plus one, 0 for the root.
        nodes: N, at most.
        weights: `[B, 1]` what a token of each line counts for.
        node_cost: As for `grow_dynamic`.
    """
    value, tokens = (torch.cat([getattr(level, name) for level in levels], dim=1) for name in ("value", "tokens"))
    # Stable: of equal ones the parent, which comes first, is taken first.
    best = value.nan_to_num(nan=-torch.inf).sort(dim=1, descending=True, stable=True)
    order = best.indices[:, :nodes]
    pays = torch.zeros_like(value, dtype=torch.bool).scatter_(1, order, _pays(best.values[:, :nodes], weights, node_cost))
    chosen = order.sort(dim=1).values  # parents before their children
    places = torch.zeros(len(value), value.shape[1] + 1, dtype=torch.long, device=value.device)
    places.scatter_(1, chosen + 1, torch.arange(1, chosen.shape[1] + 1, device=value.device).expand_as(chosen))
    exists = pays.gather(1, chosen)
    tree = DraftTree(
        tokens.gather(1, chosen).masked_fill(~exists, NO_TOKEN),
        places.gather(1, parents.gather(1, chosen)).masked_fill(~exists, 0),
        depth=len(levels),
    )
    if value.device.type != "cpu":  # to look at what is expected would be to wait
        return tree
    tree.expected = float(value.gather(1, chosen).exp().masked_fill(~exists, 0.0).sum())
    return tree.trimmed()
