"""A drafter's tree and copies of earlier text in one, and what the former adds to the latter.

Shapes: B lines, N nodes of one tree, M of the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..pacing import PRIOR, Records
from ..tree import NO_TOKEN, DraftTree
from .best_first import Draft


def joined(copies: DraftTree, other: DraftTree) -> DraftTree:
    """Two trees of point masses in one. What both hold stands once: among the copies, which keep their places.

    Args:
        copies: Nodes `[B, N]`.
        other: Nodes `[B, M]`.
    """
    if not copies.size or not other.size:
        return copies if copies.size else other
    device, held = copies.tokens.device, copies.size
    absent = other.tokens == NO_TOKEN
    alike = (copies.tokens[:, None] == other.tokens[:, :, None]) & ~absent[:, :, None]  # [B, M, N]
    order, behind = torch.arange(1, held + 1, device=device), torch.arange(held + 1, held + other.size + 1, device=device)
    twins = torch.zeros_like(other.tokens)  # which of the copies each is, 0 for none
    parents = other.parents
    for _ in range(other.depth):  # a node follows its parent, so each round settles one more level
        places = torch.nn.functional.pad(torch.where(twins > 0, twins, behind), (1, 0))  # the root is the same
        parents = places.gather(1, other.parents)
        twins = ((alike & (copies.parents[:, None] == parents[:, :, None])) * order).amax(dim=2)
    dropped = absent | (twins > 0)
    tokens = torch.cat([copies.tokens, other.tokens.masked_fill(dropped, NO_TOKEN)], dim=1)
    parents = torch.cat([copies.parents, parents.masked_fill(dropped, 0)], dim=1)
    tree = DraftTree(tokens, parents, max(copies.depth, other.depth))
    return tree if tokens.device.type != "cpu" else tree.trimmed()  # elsewhere to look is to wait


def openings(draft: Draft, levels: int) -> list[float]:
    """How likely it is, for each of the first levels, that none of a draft's nodes is accepted there."""
    depths, left = [0], [1.0] * levels
    for parent, value in zip(draft.parents, draft.values, strict=True):
        depths.append(depths[parent] + 1)
        if depths[-1] <= levels:
            left[depths[-1] - 1] -= value
    return [max(0.0, chance) for chance in left]


class Additions(Records):
    """How often a token that copies did not hold is accepted from the other drafter, by depth, where they leave it open."""

    def observe(self, rows: Sequence[int], open_shares: Sequence[Sequence[float]], added: Sequence[Sequence[bool]]) -> None:
        """Learns from a round.

        Args:
            rows: The batch row of each line.
            open_shares: Per line and depth drafted, how likely no copy was to be accepted there.
            added: Per line, for each accepted token whether it was the other drafter's alone.
        """
        for memories, shares, own in zip(self.of_round(rows, any(open_shares)), open_shares, added, strict=True):
            for counts in memories:
                for depth, share in enumerate(shares):
                    hit = depth < len(own) and own[depth]
                    counts.judged[depth] += max(share, float(hit))
                    counts.accepted[depth] += hit

    def expected(self, row: int, open_shares: Sequence[float]) -> list[float]:
        """The tokens that the other drafter is expected to add at each depth."""
        own, found = self.rows.get(row), []
        for depth, share in enumerate(open_shares):
            rate = self.lasting.leaning(depth, PRIOR ** (depth + 1))
            rate = self.recent.leaning(depth, rate)
            found.append(share * (rate if own is None else own.leaning(depth, rate)))
        return found
