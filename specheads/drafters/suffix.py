"""Drafts what followed the last time the text went like this."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..tree import NO_TOKEN, DraftTree
from .base import Accepted, Budget, DraftContext
from .best_first import Candidate, Children, Draft, Reliance, grow_paying, is_single_path, tree_of
from .known_text import known_segments
from .suffix_automaton import ROOT, SuffixAutomaton, index_of

# How many suffixes of the text, from the longest one that occurred earlier downwards, are asked for continuations.
SUFFIXES = 3
# How much it counts against a suffix of length 1 that it has been followed by yet another token; a suffix of length n that it
# counts n times less. Fitted to how often a small chat model's answers go on as they did before.
NOVELTY = 3.0
# Sources of candidates that are told apart in how far they can be relied on: none, and suffixes by the binary digits of their
# length with the candidate.
SOURCES = 5


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
        self.reliances = [Reliance(SOURCES) for _ in self.automata]

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A chain or a tree per line; none for a line whose last token is new."""
        return tree_of(self.drafts(context, budget), budget, context)

    def drafts(self, context: DraftContext, budget: Budget) -> list[Draft]:
        """Per line, all nodes that may pay."""
        single_path = is_single_path(context, budget)
        ends = context.sequences.end_tokens
        drafts = []
        for line, depth in enumerate(budget.depths):
            children = partial(relied_on, self.reliances[line], partial(copies, self.automata[line]))
            drafts.append(grow_paying(end_of(self.automata[line]), children, budget, depth, ends, single_path))
        return drafts

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Indexes the kept tokens."""
        for automaton, reliance, tokens in zip(self.automata, self.reliances, accepted.tokens, strict=True):
            compare(reliance, partial(copies, automaton), end_of(automaton), tokens)
            automaton.extend(tokens)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Keeps the automata of the lines that go on."""
        self.automata = [self.automata[line] for line in lines]
        self.reliances = [self.reliances[line] for line in lines]


def end_of(automaton: SuffixAutomaton, token: int = NO_TOKEN) -> Candidate:
    """The end of a row's text as the root of a draft."""
    return Candidate(1.0, token, automaton.match, automaton.match_length)


def source_of(candidate: Candidate) -> int:
    """Where a candidate comes from: 0 is no copy, and longer suffixes are more reliable ones."""
    return min(candidate.length.bit_length(), SOURCES - 1)


def relied_on(reliance: Reliance, children: Children, after: Candidate) -> list[Candidate]:
    """What may follow a candidate, with probabilities in the light of what the row has shown."""
    return [Candidate(reliance.applied(source_of(child), child.probability), *child[1:]) for child in children(after)]


def compare(reliance: Reliance, children: Children, root: Candidate, said: Sequence[int]) -> None:
    """Shows a reliance what would have been drafted for a row's next tokens."""
    place: Candidate | None = root
    for token in said:
        if place is None:
            break
        promised = [0.0] * SOURCES
        came = None
        for child in children(place):
            promised[source_of(child)] += child.probability
            if child.token == token:
                came = child
        reliance.observe(promised, None if came is None else source_of(came))
        place = came


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
