"""Training-time unrolling of an EAGLE head: every root's draft, each step on the head's own states (Li et al. 2025, EAGLE-3).

The first step goes over the whole text with the target's features. The others go over the roots: the draft from root r goes on
from the head's state at place r - 1, sees the first step's keys up to there and then its own, as when the head drafts; what the
first step made of the places after it, it does not see. Tokens are the text's.

Shapes: B rows, T tokens, M = T - 1 places of the head, n roots of a row, K depths, h the head's hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from ..heads import EagleHead
from .batch import Roots, TrainingBatch
from .masks import additive, alone, visible_before


def unroll(head: EagleHead, batch: TrainingBatch, features: Tensor, roots: Roots, depth: int) -> Tensor:
    """The head's hidden states at every depth.

    Args:
        head: The head, bound to its target.
        batch: The texts.
        features: `[B, T, L t]` the target's.
        roots: Where drafts begin.
        depth: K.

    Returns:
        `[K, R, h]`, what `EagleHead.read` takes.
    """
    visible = _pairs_visible(batch)
    cache = DynamicCache()
    fused = head.fuse(features[:, :-1])
    mask = additive(visible, fused.dtype)
    hidden = head.advance(_known(head, batch.input_ids[:, 1:]), fused, mask, batch.position_ids[:, :-1], cache)
    table = RootTable(roots, batch)
    states = [table.at(hidden, -1)]
    prefix = additive(table.at(visible, -1), fused.dtype)
    own = additive(torch.eye(table.size, dtype=torch.bool, device=hidden.device)[None], fused.dtype)
    own = own.expand(len(hidden), -1, -1, -1)
    positions = table.at(batch.position_ids, -1)
    for step in range(1, depth):
        tokens = _known(head, table.at(batch.input_ids, step))
        mask = torch.cat([prefix, *[own] * step], dim=-1)
        states.append(head.advance(tokens, head.feed(states[-1]), mask, positions + step, cache))
    return torch.stack([table.flat(state) for state in states])


class RootTable:
    """Roots row by row `[B, n]`, so that they go through attention together with their row.

    Args:
        roots: The roots.
        batch: The texts.
    """

    def __init__(self, roots: Roots, batch: TrainingBatch):
        device, rows = batch.input_ids.device, len(batch.input_ids)
        counts = roots.rows.bincount(minlength=rows)
        self.size = max(1, int(counts.max()))
        order = torch.arange(len(roots)) - (counts.cumsum(0) - counts)[roots.rows]
        # Rows with fewer roots are filled up with a place that every row has.
        places = torch.ones(rows, self.size, dtype=torch.long)
        places[roots.rows, order] = roots.places
        self.places = places.to(device)
        self.entries = (roots.rows.to(device), order.to(device))

    def at(self, values: Tensor, offset: int) -> Tensor:
        """The values `[B, n, ...]` of `[B, T or M, ...]` at some distance from each root; beyond the row, those of its end."""
        index = (self.places + offset).clamp(max=values.shape[1] - 1)
        return values[torch.arange(len(index), device=index.device)[:, None], index]

    def flat(self, values: Tensor) -> Tensor:
        """`[R, ...]` of `[B, n, ...]`."""
        return values[self.entries]


def _pairs_visible(batch: TrainingBatch) -> Tensor:
    """`[B, M, M]` bool: which places of the head, each a token and the features before it, see which."""
    together = batch.continues[:, 1:]
    texts = torch.zeros_like(batch.input_ids) if batch.segment_ids is None else batch.segment_ids
    return visible_before(alone(texts[:, 1:], ~together))


def _known(head: EagleHead, tokens: Tensor) -> Tensor:
    return tokens.clamp(0, head.embedding_table().shape[0] - 1)
