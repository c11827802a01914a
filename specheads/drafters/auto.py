"""The training-free default: copies where the text repeats itself, and goes by the target's second thoughts elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..tree import NO_TOKEN, DraftTree
from .base import Accepted, Budget, DraftContext
from .best_first import Candidate, Draft, Reliance, grow_paying, is_single_path, tree_of
from .known_text import known_segments
from .recycling import CandidateTable, in_turn, known_bigrams, observed
from .suffix import SOURCES, compare, continuations, end_of, relied_on
from .suffix_automaton import SuffixAutomaton, index_of

# What part of the probability that copies leave open goes to a candidate by its rank, as measured on greedy answers of a small
# chat model. It is less than what candidates get by themselves: those that were right before are among the copies.
RANK_SHARES = (0.12, 0.12, 0.09, 0.06, 0.04, 0.03, 0.02, 0.02)


class AutoDrafter:
    """The drafts of `SuffixDrafter` and `RecyclingDrafter` in one tree, as SAM Decoding (Hu et al. 2024) combines them.

    It need not choose between them by a least match length: what the suffixes of the text leave open at a node, little after a
    long match and much after a short one, is divided among the candidates of the node's token by their ranks. The tree is grown
    on the host, so the candidates are read from the device when a round is settled. All nodes are point masses.
    """

    step_cost = 0.0
    weighs_nodes = True

    def begin(self, context: DraftContext) -> None:
        """Indexes what every line knows."""
        self.automata = [index_of(known_segments(context, line)) for line in range(len(context.rows))]
        self.reliances = [Reliance(SOURCES) for _ in self.automata]
        self.table = CandidateTable(known_bigrams(context), context.sequences.end_tokens)

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A tree per line, or the most probable path; none for a line whose last token is new."""
        return tree_of(self.drafts(context, budget), budget, context)

    def drafts(self, context: DraftContext, budget: Budget) -> list[Draft]:
        """Per line, all nodes that may pay."""
        single_path = is_single_path(context, budget)
        ends = context.sequences.end_tokens
        drafts = []
        for line, depth in enumerate(budget.depths):
            children = partial(relied_on, self.reliances[line], partial(self._children, self.automata[line]))
            root = self._root(context, line, context.length(line))
            drafts.append(grow_paying(root, children, budget, depth, ends, single_path))
        return drafts

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Indexes the kept tokens and takes in the target's candidates."""
        for line, kept in enumerate(accepted.tokens):
            automaton = self.automata[line]
            root = self._root(context, line, context.length(line) - len(kept))
            compare(self.reliances[line], partial(self._children, automaton), root, kept)
            automaton.extend(kept)
        tokens, candidates = observed(context, accepted)
        observations = torch.cat([tokens[:, None], candidates], dim=1).tolist()
        self.table.learn(observations[place] for place in in_turn(accepted))

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Keeps the automata of the lines that go on; the table belongs to all rows."""
        self.automata = [self.automata[line] for line in lines]
        self.reliances = [self.reliances[line] for line in lines]

    def _root(self, context: DraftContext, line: int, length: int) -> Candidate:
        """The token that ends the first `length` of a line's, where the line's automaton stands."""
        token = context.tokens(line, length - 1)[0]
        # A prompt may end in a placeholder, which the target cannot say and the table does not know.
        return end_of(self.automata[line], token if token < context.vocab_size else NO_TOKEN)

    def _children(self, automaton: SuffixAutomaton, after: Candidate) -> list[Candidate]:
        found, left = continuations(automaton, after)
        copied = {candidate.token for candidate in found}
        for share, token in zip(RANK_SHARES, self.table.after(after.token), strict=False):
            if token not in copied:
                found.append(Candidate(left * share, token))
        return found
