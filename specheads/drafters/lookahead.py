"""Lookahead decoding: the target guesses n-grams of its own text ahead, beside the pass that verifies earlier ones.

Below the row's last token stands a window of guesses for the next positions (Fu et al. 2024, arXiv 2402.02057): W columns and,
for n-grams of N tokens, N - 1 levels, each one round younger than the one before it. Level j of column i is a guess for the
position 1 + i + j ahead. It attends to the oldest level up to its column and then to its own column's levels, so what the
target says after the youngest level is one more guess, and a column with it an n-gram as the target would say it. That is
Jacobi iteration on the next positions, of which the n-grams are the trajectories. The window's tokens are probes of the draft:
they are never accepted.

Shapes: B lines, L = N - 1 levels, W columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice

import torch
from torch import Tensor

from ..pacing import shares
from ..tree import DraftTree, Probes
from .base import Accepted, Budget, DraftContext
from .best_first import Candidate, Reliance, grow_paying, is_single_path, tree_of
from .recycling import RANK_PROBABILITIES
from .suffix import SOURCES, compare, relied_on

WORTH_MEMORY = 0.95  # weight of the past at each round in what the window costs and brings
WORTH_DOUBT = 2.0  # tokens that the expectation that it pays counts for
LEAST_WINDOW = 2  # columns; a narrower window finds nothing


class LookaheadDrafter:
    """Drafts n-grams that the target guessed ahead. All nodes are point masses.

    Args:
        window: W, the most columns. A pass has W (N - 1) tokens more; where they are dear, the window shrinks or rests.
        ngram: N, the tokens of an n-gram, the one that it follows included.

    Raises:
        ValueError: if there are fewer than two columns, or n-grams of fewer than two tokens.
    """

    step_cost = 0.0
    weighs_nodes = True
    needs_trees = True

    def __init__(self, window: int = 15, ngram: int = 5):
        if window < LEAST_WINDOW or ngram < 2:
            raise ValueError(f"Lookahead takes a window of 2 or more and n-grams of 2 or more, got {window} and {ngram}.")
        self.window, self.levels = window, ngram - 1

    def begin(self, context: DraftContext) -> None:
        """Fills the window with tokens of the prompt, as good as any."""
        self.pool = NgramPool()
        self.reliances = [Reliance(SOURCES) for _ in context.rows]
        self.guesses = torch.stack([self._filling(context, line) for line in range(len(context.rows))])  # [B, L, W]
        self.columns = 0  # of the round
        self.brought = self.spent = 0.0

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A tree per line, or the most promising path, of n-grams that begin with the line's last token; and the window."""
        self.columns = self._affordable_columns(context, budget)
        probed = self.columns * self.levels
        self.spent = WORTH_MEMORY * self.spent + budget.pass_worth * (budget.pass_cost(probed) - 1 if probed else 0.0)
        # Where there is a window the pass is wide anyway.
        rest = replace(budget, entry_cost=0.0) if probed else budget
        single_path, ends = is_single_path(context, budget), context.sequences.end_tokens
        drafts = []
        for line, depth in enumerate(budget.depths):
            children = partial(relied_on, self.reliances[line], self.pool.after)
            root = self.pool.root(context.tokens(line, context.length(line) - 1)[0])
            drafts.append(grow_paying(root, children, rest, depth, ends, single_path))
        tree = tree_of(drafts, rest, context)
        if probed:
            tree.probes = self._probes(context.device)
        return tree

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Takes the window's n-grams into the pool, and moves it on by what was kept."""
        gains = (share * len(path) for share, path in zip(shares(context), accepted.paths, strict=True))
        self.brought = WORTH_MEMORY * self.brought + sum(gains)
        for line, kept in enumerate(accepted.tokens):
            root = self.pool.root(context.tokens(line, context.length(line) - len(kept) - 1)[0])
            compare(self.reliances[line], self.pool.after, root, kept)
        steps = [len(kept) for kept in accepted.tokens]
        if self.columns and accepted.probed is not None:
            said = accepted.probed[:, -self.columns :].argmax(dim=-1).cpu()  # [B, W]
            ngrams = torch.cat([self.guesses[:, :, : self.columns], said[:, None]], dim=1)  # [B, N, W]
            for ngram in ngrams.transpose(1, 2).flatten(0, 1).tolist():
                self.pool.add(ngram)
            # A level on is a position on: with one token kept the columns stay where they are.
            self.guesses[:, :, : self.columns] = ngrams[:, 1:]
            steps = [step - 1 for step in steps]
        self.guesses = torch.stack([lines.roll(-step, dims=1) for lines, step in zip(self.guesses, steps, strict=True)])

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Keeps the windows of the lines that go on; the pool belongs to all rows."""
        self.guesses = self.guesses[list(lines)]
        self.reliances = [self.reliances[line] for line in lines]

    def _filling(self, context: DraftContext, line: int) -> Tensor:
        """`[L, W]` tokens of a line's text."""
        known = [token for token in context.tokens(line) if token < context.vocab_size] or [0]
        places = range(self.levels * self.window)
        return torch.tensor([known[place % len(known)] for place in places]).view(self.levels, self.window)

    def _affordable_columns(self, context: DraftContext, budget: Budget) -> int:
        """How wide the window may be: as far as it has paid of late, as the balance reaches, and as there are positions."""
        if not budget.depth:
            return 0
        paid = (self.brought + WORTH_DOUBT) / (self.spent + WORTH_DOUBT)
        widest = int(self.window * min(1.0, paid))
        while widest >= LEAST_WINDOW and budget.pass_cost(budget.nodes + widest * self.levels) - 1 > budget.balance:
            widest -= 1
        if context.positions_left is not None:
            left = min(context.positions_left[row] - context.sequences.generated(row) for row in context.rows)
            widest = min(widest, left - self.levels + 1)
        return widest if widest >= LEAST_WINDOW else 0

    def _probes(self, device: torch.device) -> Probes:
        """The round's window."""
        tokens = self.guesses[:, :, : self.columns].flatten(1).to(device)
        depths, visible = window_shape(self.levels, self.columns)
        return Probes(tokens, depths.to(device).expand_as(tokens), visible.to(device).expand(len(tokens), *visible.shape))


@cache
def window_shape(levels: int, columns: int) -> tuple[Tensor, Tensor]:
    """The depths `[E]` of a window's tokens, level by level, and which of them each attends to `[E, E]`."""
    place = torch.arange(levels * columns)
    level, column = place // columns, place % columns
    in_oldest = (level == 0) & (column <= column[:, None])
    in_own_column = (column == column[:, None]) & (level <= level[:, None])
    return 1 + level + column, in_oldest | in_own_column


class NgramPool:
    """The n-grams that the target guessed, the latest ones first."""

    def __init__(self) -> None:
        self.followers: list[dict[int, int]] = [{}]  # of each state: what came next, the latest last, and the state it led to

    def add(self, ngram: Sequence[int]) -> None:
        """Takes in an n-gram as the latest."""
        state = 0
        for token in ngram:
            below = self.followers[state].pop(token, len(self.followers))
            if below == len(self.followers):
                self.followers.append({})
            self.followers[state][token] = below
            state = below

    def root(self, token: int) -> Candidate:
        """A row's last token as the root of a draft."""
        return Candidate(1.0, token, self.followers[0].get(token, 0), 1)

    def after(self, candidate: Candidate) -> list[Candidate]:
        """What came after a candidate; where the n-grams that led to it end, after its token alone."""
        state, length = candidate.state, candidate.length
        if not state or not self.followers[state]:
            state, length = self.followers[0].get(candidate.token, 0), 1
        if not state:
            return []
        latest = islice(reversed(self.followers[state].items()), len(RANK_PROBABILITIES))
        return [
            Candidate(probability, token, below, length + 1)
            for probability, (token, below) in zip(RANK_PROBABILITIES, latest, strict=False)
        ]
