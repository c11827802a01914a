"""Drafts that are never accepted: what drafting costs where it does not pay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..tree import DraftTree
from .base import Accepted, Budget, DraftContext
from .growth import within_depths


class WrongDrafter:
    """Proposes the tokens that the target held least probable the last time; for measurements.

    Its drafts are as long as the pacing allows, so it shows how much a bad drafter may slow a model down.
    """

    step_cost = 0.0
    weighs_nodes = False

    def begin(self, context: DraftContext) -> None:
        """Knows nothing yet."""
        self.least: Tensor | None = None

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A chain of one token over and over."""
        if self.least is None or not budget.depth:
            return DraftTree.empty(len(context.rows), context.device)
        return within_depths(DraftTree.chain(self.least[:, None].expand(-1, budget.depth)), budget.depths)

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Looks at the target's last scores."""
        self.least = accepted.logits[:, 0].argmin(dim=-1)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Keeps the tokens of the lines that go on."""
        if self.least is not None:
            self.least = self.least[torch.tensor(lines, device=self.least.device)]
