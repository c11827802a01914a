"""Drafts what followed the last occurrence of the last few tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ..tree import NO_TOKEN, DraftTree
from .base import Accepted, Budget, DraftContext
from .known_text import known_segments, through_end

LONGEST_NGRAM = 3


class LookupDrafter:
    """Prompt lookup (Saxena 2023) for batches: a chain copied from where the row's last n-gram occurred before.

    It is sought in the prompt, the encoder's input and the output, for n from 3 down to 1; the most recent occurrence counts.
    All nodes are point masses.
    """

    step_cost = 0.0
    weighs_nodes = False

    def begin(self, context: DraftContext) -> None:
        """Indexes what every line knows."""
        self.indices = [NgramIndex(known_segments(context, line)) for line in range(len(context.rows))]

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A chain per line; none for a line whose last token is new."""
        ends = context.sequences.end_tokens
        chains = [
            through_end(index.continuation(min(depth, budget.nodes)), ends)
            for index, depth in zip(self.indices, budget.depths, strict=True)
        ]
        return DraftTree.from_rows([(chain, range(len(chain))) for chain in chains], context.device)

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Indexes the kept tokens."""
        for index, tokens in zip(self.indices, accepted.tokens, strict=True):
            index.extend(tokens)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Keeps the indices of the lines that go on."""
        self.indices = [self.indices[line] for line in lines]


class NgramIndex:
    """Where each n-gram of a text was last followed by something.

    Args:
        segments: Texts that have nothing to do with each other; the last of them may be extended.
    """

    def __init__(self, segments: Sequence[Sequence[int]]) -> None:
        self.text: list[int] = []
        self.segment_start = 0
        self.followed_at: dict[tuple[int, ...], int] = {}
        for segment in segments:
            self.text.append(NO_TOKEN)  # a border, at which a copy ends
            self.segment_start = len(self.text)
            self.extend(segment)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the last segment."""
        for token in tokens:
            position = len(self.text)
            for size in range(1, min(LONGEST_NGRAM, position - self.segment_start) + 1):
                self.followed_at[tuple(self.text[position - size :])] = position
            self.text.append(token)

    def continuation(self, length: int) -> list[int]:
        """At most `length` tokens: what followed the text's last n-gram, the longest that occurred before.

        A copy that reaches the end of the text goes on with what it has copied, as a repetition would.
        """
        for size in range(min(LONGEST_NGRAM, len(self.text) - self.segment_start), 0, -1):
            start = self.followed_at.get(tuple(self.text[-size:]))
            if start is not None:
                period = len(self.text) - start
                copied = [self.text[start + index % period] for index in range(length)]
                return copied[: copied.index(NO_TOKEN)] if NO_TOKEN in copied else copied
        return []
