"""An index of all that was said: which suffix of a text occurred earlier, and what followed it.

The suffix automaton (Blumer et al. 1985) is the smallest automaton that accepts every substring of a text. Each state stands
for substrings that end at the same places; its suffix link leads to the longest of their suffixes that ends at more places. It
grows by one token at a time in amortised constant time, whatever the text, and is what SAM Decoding (Hu et al. 2024,
arXiv 2411.10666) drafts from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

ROOT = 0

# How many states an appended token is counted in. Ordinary text has a handful of repeated suffixes at any point, but a run of
# one token has as many as it is long, and to count them all would take quadratic time.
COUNTED_SUFFIXES = 32
# How many different continuations of a state are looked at: the first ones seen, among which the frequent ones mostly are.
CONTINUATIONS = 256


class Continuation(NamedTuple):
    """A token that has followed a state's substrings.

    Args:
        times: How often it did.
        latest: Where it last did: the index of the token in the text.
        token: The token.
        state: The state that it leads to.
    """

    times: int
    latest: int
    token: int
    state: int


class SuffixAutomaton:
    """The suffix automaton of a text that grows at its end.

    The text may consist of segments that have nothing to do with each other: no substring reaches from one into the next.
    """

    def __init__(self) -> None:
        self.lengths = [0]  # of each state's longest substring
        self.links = [ROOT]
        self.followers: list[dict[int, int]] = [{}]
        self.counts = [0]
        self.latest = [-1]
        self.last = ROOT  # the state of the whole text

    @property
    def match(self) -> int:
        """The state of the longest suffix of the last segment that occurred earlier; `ROOT` if there is none."""
        return self.links[self.last]

    @property
    def match_length(self) -> int:
        """The length of the longest suffix of the last segment that occurred earlier, in any segment; it may overlap itself."""
        return self.lengths[self.match]

    def shorter(self, state: int) -> int:
        """The state of the longest suffix that occurred at more places than `state`; `ROOT`, the empty one, in the end."""
        return self.links[state]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The state, and the length within it, of the longest known suffix of a state's substring followed by a token.

        Args:
            state: The state; `ROOT` for the empty substring.
            length: The length of the substring that is meant, one of the state's.
            token: The token. The text itself stays as it is.
        """
        while state != ROOT and token not in self.followers[state]:
            state = self.links[state]
            length = self.lengths[state]
        return (self.followers[state][token], length + 1) if token in self.followers[state] else (ROOT, 0)

    def continuations(self, state: int) -> list[Continuation]:
        """The tokens that followed a state's substrings, in no order.

        Counts are exact up to `COUNTED_SUFFIXES` repeated suffixes at each place of the text, else too low.
        """
        counts, latest = self.counts, self.latest
        followers = islice(self.followers[state].items(), CONTINUATIONS)
        return [Continuation(counts[after], latest[after], token, after) for token, after in followers]

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the last segment."""
        for token in tokens:
            self._append(token)

    def start_segment(self) -> None:
        """Ends the last segment, as would a token that occurs nowhere else."""
        self.last = self._new_state(self.lengths[self.last] + 1, {})

    def _append(self, token: int) -> None:
        followers = self.followers
        state = self._new_state(self.lengths[self.last] + 1, {})
        origin, self.last = self.last, state
        while token not in followers[origin]:
            followers[origin][token] = state
            if origin == ROOT:
                break
            origin = self.links[origin]
        else:
            self.links[state] = self._exact_target(origin, token)
        self._count(state)

    def _exact_target(self, origin: int, token: int) -> int:
        """The state of `origin`'s longest substring followed by `token`, split off if it shares one with longer substrings."""
        target = self.followers[origin][token]
        length = self.lengths[origin] + 1
        if self.lengths[target] == length:
            return target
        split = self._new_state(length, self.followers[target].copy())
        self.links[split], self.counts[split], self.latest[split] = self.links[target], self.counts[target], self.latest[target]
        self.links[target] = split
        while self.followers[origin].get(token) == target:
            self.followers[origin][token] = split
            if origin == ROOT:
                break
            origin = self.links[origin]
        return split

    def _new_state(self, length: int, followers: dict[int, int]) -> int:
        self.lengths.append(length)
        self.links.append(ROOT)
        self.followers.append(followers)
        self.counts.append(0)
        self.latest.append(-1)
        return len(self.lengths) - 1

    def _count(self, state: int) -> None:
        counts, latest, links = self.counts, self.latest, self.links
        position = self.lengths[state] - 1
        for _ in range(COUNTED_SUFFIXES):
            if state == ROOT:
                break
            counts[state] += 1
            latest[state] = position
            state = links[state]


def index_of(segments: Sequence[Sequence[int]]) -> SuffixAutomaton:
    """The automaton of some segments; the last of them may be extended."""
    automaton = SuffixAutomaton()
    for number, segment in enumerate(segments):
        if number:
            automaton.start_segment()
        automaton.extend(segment)
    return automaton
