"""A biased control: what a test of exactness must not let pass.

Shapes: B lines, N draft nodes, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..drafters import Accepted, Budget, DraftContext, Drafter
from ..tree import DraftTree

DECLARED = 0.5


class LyingDrafter:
    """Another drafter's tokens, each declared as drawn from a law that gives it `DECLARED` and the rest to all tokens alike.

    Verified by that law, a token is accepted too often where the target holds it less probable than declared, and the output
    is not the target's: the fault of a proposal that is not the law its tokens came from.

    Args:
        source: The other drafter.
    """

    weighs_nodes = False

    def __init__(self, source: Drafter):
        self.source = source
        self.step_cost = source.step_cost
        self.feature_layers: Sequence[int] = getattr(source, "feature_layers", ())
        self.needs_step = getattr(source, "needs_step", False)

    def begin(self, context: DraftContext) -> None:
        """Begins."""
        self.source = copy.copy(self.source)
        self.source.begin(context)
        self.weighs_nodes = self.source.weighs_nodes

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """The other's draft, with false laws."""
        tree = self.source.propose(context, budget)
        if not tree.size:
            return tree
        laws = torch.full((*tree.tokens.shape, context.vocab_size), (1 - DECLARED) / context.vocab_size, device=context.device)
        named = tree.tokens.clamp(min=0)[:, :, None]
        laws.scatter_add_(2, named, torch.full_like(named, DECLARED, dtype=laws.dtype))
        order = torch.arange(tree.size, device=context.device).expand_as(tree.tokens)
        return replace(tree, proposals=laws, proposal_of=order)

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Passes it on."""
        self.source.commit(context, accepted)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Passes it on."""
        self.source.keep_rows(lines)
