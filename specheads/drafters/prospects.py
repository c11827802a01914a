"""Whether a chain is worth going on with, by how likely its tokens are to be accepted.

What is decided about a token is decided before it is drawn, from the committed text and the tokens before it: so a sampled
token's law stays the one it was drawn from. To leave out a token after a look at it, or at what follows it, would bend the law.

Shapes: B lines, T tokens that the scores are over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .base import Budget


class Prospects:
    """What a chain promises, for the lines together: one more token for one of them is a column more for all.

    Args:
        shares: What a token of each line counts for (`pacing.shares`).
        budget: The round's budget.
        level_cost: What the drafting of one level beyond the first must bring, as the budget's costs.
        chances: How likely each line's next token is to be accepted `[B]`, given its scores `[B, T]`.

    Attributes:
        expected: How many of the tokens taken so far will be accepted, over all lines.
    """

    def __init__(self, shares: Sequence[float], budget: Budget, level_cost: float, chances: Callable[[Tensor], Tensor]):
        self.shares = shares
        self.budget = budget
        self.level_cost = level_cost
        self.chances_of = chances
        self.reached = [1.0] * len(shares)  # how likely all of a line's tokens so far are accepted
        self.chances = self.reached
        self.level = 0
        self.expected = 0.0

    def take(self, scores: Tensor) -> bool:
        """Whether a token with these scores `[B, T]` is to be drafted; the first only if the chain may pay as a whole."""
        self.chances = self.chances_of(scores).nan_to_num(nan=0.0).tolist()
        pays = self._worth(1) > self.budget.node_cost if self.level else self._outlook() > self.budget.entry_cost
        if pays:
            self.reached = [reached * chance for reached, chance in zip(self.reached, self.chances, strict=True)]
            self.level += 1
            self.expected += sum(
                reached for reached, depth in zip(self.reached, self.budget.depths, strict=True) if depth >= self.level
            )
        return pays

    def goes_deeper(self) -> bool:
        """Whether to find out about one more token: it pays if it is as likely to be accepted as the last one."""
        return self._worth(1) > self.budget.node_cost + self.level_cost

    def _worth(self, levels: int) -> float:
        """What the token so many levels ahead brings, if all before it are as likely as the next."""
        return sum(
            share * reached * chance**levels
            for share, reached, chance, depth in zip(self.shares, self.reached, self.chances, self.budget.depths, strict=True)
            if depth >= self.level + levels
        )

    def _outlook(self) -> float:
        """What the best length brings beyond the costs of its nodes and levels."""
        best = gain = 0.0
        for level in range(1, self.budget.depth + 1):
            gain += self._worth(level) - self.budget.node_cost - (self.level_cost if level > 1 else 0.0)
            best = max(best, gain)
        return best


def top_probability(scores: Tensor) -> Tensor:
    """The probability `[B]` of the most probable token, which stands for its acceptance where that token is drafted."""
    return (scores.amax(dim=-1) - scores.logsumexp(dim=-1)).exp()
