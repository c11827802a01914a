"""No draft at all: plain decoding through the speculative loop."""

from __future__ import annotations

from collections.abc import Sequence

from ..tree import DraftTree
from .base import Accepted, Budget, DraftContext


class NoDrafter:
    """Proposes nothing, so that every round is one plain decoding step."""

    step_cost = 0.0
    weighs_nodes = False

    def begin(self, context: DraftContext) -> None:
        """Nothing to prepare."""

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """An empty draft."""
        return DraftTree.empty(len(context.rows), context.device)

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Nothing to learn."""

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Nothing to drop."""
