"""Drafts how a text went on in a corpus, or in earlier outputs: REST (He et al. 2024, arXiv 2311.08252)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ..tree import NO_TOKEN, DraftTree
from .base import Accepted, Budget, DraftContext
from .best_first import Candidate, Reliance, grow_paying, is_single_path, tree_of
from .retrieval_store import BORDER, SORTED_BY, RetrievalStore, tokenizer_fingerprint
from .suffix import NOVELTY, SOURCES, compare, relied_on

# Of more places than this where the text has gone on, every so manieth is looked at.
MOST_PLACES = 1024
MOST_CHILDREN = 16  # of a node, the most frequent ones


class RetrievalDrafter:
    """Looks up the longest end of the text that a datastore has, and drafts a tree of what came after it, by frequency.

    All nodes are point masses, so whatever the store holds, the output keeps the target's law.

    Args:
        store: The datastore, or its folder (`retrieval_store.build_store`).
        target: The model it drafts for.
        tokenizer: The target's tokenizer, to be compared with that of the store, if at hand.

    Raises:
        ValueError: if there is no store, or it has the ids of another tokenizer.
    """

    step_cost = 0.0
    weighs_nodes = True

    def __init__(
        self, store: RetrievalStore | str | os.PathLike[str], target: PreTrainedModel | None = None, tokenizer: Any = None
    ):
        self.store = store if isinstance(store, RetrievalStore) else RetrievalStore(store)
        known = self.store.description
        if tokenizer is not None and known.tokenizer not in (None, tokenizer_fingerprint(tokenizer)):
            raise ValueError(
                f"The datastore in {str(self.store.folder)!r} was made with another tokenizer than the one given; build it "
                "with the target's."
            )
        if target is not None:
            self._check_size(target.config.get_text_config(decoder=True).vocab_size)

    def begin(self, context: DraftContext) -> None:
        """Has seen nothing of the rows yet."""
        self._check_size(context.vocab_size)
        self.reliances = [Reliance(SOURCES) for _ in context.rows]
        self.found: list[Found | None] = [None] * len(context.rows)

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A tree per line, or the most frequent path; none for a line whose last token the store does not have."""
        single_path, ends = is_single_path(context, budget), context.sequences.end_tokens
        drafts = []
        for line, depth in enumerate(budget.depths):
            text = context.tokens(line, max(0, context.length(line) - SORTED_BY))
            found = self.found[line] = Found(self.store, text)
            children = partial(relied_on, self.reliances[line], found.after)
            drafts.append(grow_paying(found.root, children, budget, depth, ends, single_path))
        return tree_of(drafts, budget, context)

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Compares what the store had with what was said."""
        for line, kept in enumerate(accepted.tokens):
            if (found := self.found[line]) is not None:
                compare(self.reliances[line], found.after, found.root, kept)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Keeps what is known of the lines that go on."""
        self.reliances = [self.reliances[line] for line in lines]
        self.found = [self.found[line] for line in lines]

    def _check_size(self, vocab_size: int) -> None:
        known = self.store.description
        if known.vocab_size > vocab_size:
            raise ValueError(
                f"The datastore in {str(self.store.folder)!r} has ids below {known.vocab_size}, and the target's vocabulary "
                f"has {vocab_size}; build it with the target's tokenizer."
            )


class Found:
    """How a text goes on in a store.

    Args:
        store: The store.
        text: The end of the text.

    Attributes:
        root: The text's last token.
    """

    def __init__(self, store: RetrievalStore, text: Sequence[int]):
        self.corpus = store.tokens
        length, places = store.longest_match(text)
        stride = -(-len(places) // MOST_PLACES) or 1
        self.places = [np.asarray(places[::stride], dtype=np.int64)]  # of each state, those of the next token
        self.root = Candidate(1.0, NO_TOKEN, 0, length)

    def after(self, candidate: Candidate) -> list[Candidate]:
        """What came after a candidate, the most frequent first. What is not seen has a share, as in `suffix.continuations`."""
        places = self.places[candidate.state]
        places = places[places < len(self.corpus)]
        tokens = self.corpus[places]
        is_said = tokens != BORDER
        places, tokens = places[is_said], tokens[is_said]
        if not tokens.size:
            return []
        values, group, counts = np.unique(tokens, return_inverse=True, return_counts=True)
        total = len(tokens) + NOVELTY * len(values) / candidate.length
        found = []
        for index in np.argsort(-counts, kind="stable")[:MOST_CHILDREN].tolist():
            self.places.append(places[group == index] + 1)
            probability = int(counts[index]) / total
            found.append(Candidate(probability, int(values[index]), len(self.places) - 1, candidate.length + 1))
        return found
