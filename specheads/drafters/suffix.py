"""Drafts what followed the last time the text went like this."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..tree import NO_TOKEN, DraftTree
from .base import Accepted, Budget, DraftContext
from .best_first import Candidate, grow_paying, is_single_path, tree_of
from .known_text import known_segments
from .suffix_automaton import ROOT, SuffixAutomaton, index_of

# How many suffixes of the text, from the longest one that occurred earlier downwards, are asked for continuations.
SUFFIXES = 3
# How much it counts against a suffix of length 1 that it has been followed by yet another token; a suffix of length n that it
# counts n times less. Fitted to how often a small chat model's answers go on as they did before.
NOVELTY = 3.0


class SuffixDrafter:
    """Copies from the prompt, the encoder's input and the output, where the end of the text occurred earlier.

    Every row has a suffix automaton (SAM Decoding, Hu et al. 2024, arXiv 2411.10666). Its draft is a chain, or a tree of
    continuations by their frequencies (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975). All nodes are point masses.
    """

    step_cost = 0.0
    weighs_nodes = True

    def begin(self, context: DraftContext) -> None:
        """Indexes what every line knows."""
        self.automata = [index_of(known_segments(context, line)) for line in range(len(context.rows))]

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A chain or a tree per line; none for a line whose last token is new."""
        single_path = is_single_path(context, budget)
        ends = context.sequences.end_tokens
        drafts = []
        for automaton, depth in zip(self.automata, budget.depths, strict=True):
            root = Candidate(1.0, NO_TOKEN, automaton.match, automaton.match_length)
            drafts.append(grow_paying(root, partial(copies, automaton), budget, depth, ends, single_path))
        return tree_of(drafts, budget, context.device)

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Indexes the kept tokens."""
        for automaton, tokens in zip(self.automata, accepted.tokens, strict=True):
            automaton.extend(tokens)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Keeps the automata of the lines that go on."""
        self.automata = [self.automata[line] for line in lines]


def copies(automaton: SuffixAutomaton, after: Candidate) -> list[Candidate]:
    """The tokens that came after a candidate's suffixes earlier."""
    return continuations(automaton, after)[0]


def continuations(automaton: SuffixAutomaton, after: Candidate) -> tuple[list[Candidate], float]:
    """What may come after a candidate, going by what came after the same tokens earlier.

    The longest known suffix is asked first. It keeps back a share of probability for what it has not seen, which goes to the
    next shorter one: prediction by partial matching (Cleary and Witten 1984), where the share grows with the number of
    different continuations (method C), and here shrinks with the length of the suffix.

    Returns:
        The candidates, the more frequent or else the more recent one of a suffix first; and the share that is left for tokens
        that are not among them.
    """
    found: list[Candidate] = []
    seen: set[int] = set()
    left, state, length = 1.0, after.state, after.length
    for _ in range(SUFFIXES):
        if state == ROOT:
            break
        fresh = [each for each in automaton.continuations(state) if each.token not in seen]
        if fresh:
            fresh.sort(reverse=True)
            novelty = NOVELTY * len(fresh) / length
            total = sum(each.times for each in fresh) + novelty
            found += [Candidate(left * each.times / total, each.token, each.state, length + 1) for each in fresh]
            seen.update(each.token for each in fresh)
            left *= novelty / total
        state = automaton.shorter(state)
        length = automaton.lengths[state]
    return found, left
