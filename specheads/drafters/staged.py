"""A draft model whose own drafting is sped up: by copies of earlier text, which it verifies as the target does its drafts.

A cascade (staged speculation, Spector and Re 2023, arXiv 2308.04623): the copies are verified by the draft model, and what it
says by the target. The draft model reads its last token and a copy of what followed it earlier in one pass, and draws its own
tokens as long as they are the copied ones, and one more. So every token is drawn from the draft model's law after the tokens
before it, just as without copies, and a draft is as long as was asked for, whatever was drawn.

Shapes: B lines, K drafted tokens, n tokens of a pass, m of the round so far, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..tree import DraftTree
from .base import Accepted, Budget, DraftContext
from .best_first import Candidate
from .draft_model import DraftModelDrafter
from .growth import draw, samples, within_depths
from .known_text import known_segments
from .suffix import copies, end_of
from .suffix_automaton import SuffixAutomaton, index_of

INNER = ("suffix",)
LEAST_PROBABILITY = 0.1  # of a copied token, below which a copy ends: a column of a pass costs something


class StagedDrafter(DraftModelDrafter):
    """Drafts chains with a model that copies are drafted for.

    Args:
        model: The draft model.
        target: The model it drafts for.
        inner: What drafts for the draft model: `"suffix"` (see `SuffixDrafter`).
        tokenizer: The target's tokenizer (see `DraftModelDrafter`).
        assistant_tokenizer: The draft model's.

    Raises:
        ValueError: if the draft model does not fit the target or takes chains only, or `inner` is unknown.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel,
        inner: Any,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
    ):
        super().__init__(model, target, tokenizer, assistant_tokenizer)
        if inner not in INNER:
            raise ValueError(f"`inner`, what drafts for the draft model, must be one of {', '.join(INNER)}, got {inner!r}.")
        if not self.family.takes_trees:
            raise ValueError(
                f"{type(model).__name__} takes chains in step only, which copies that hold here and there are not; use it as a "
                "draft model without `inner`."
            )

    def begin(self, context: DraftContext) -> None:
        """Indexes what every line knows."""
        super().begin(context)
        self.automata = [index_of(known_segments(context, line)) for line in range(len(context.rows))]

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A sampled or most probable chain."""
        depth = self.depth_within_limit(context, budget)
        if depth == 0:
            return DraftTree.empty(len(context.rows), context.device)
        logits = self.start(context)
        chains = [_Chain(automaton) for automaton in self.automata]
        self._say(context, chains, range(len(chains)), logits)
        passes = 1
        while any(len(chain.tokens) < depth for chain in chains):
            self._verify_copies(context, chains, depth)
            passes += 1
        tree, self.slot_of = _joined(chains, context)
        tree.steps = passes
        return within_depths(tree, budget.depths)

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Keeps the accepted nodes that the draft model has run on, and indexes the kept tokens."""
        super().commit(context, accepted)
        for automaton, tokens in zip(self.automata, accepted.tokens, strict=True):
            automaton.extend(tokens)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Drops the other rows."""
        super().keep_rows(lines)
        self.automata = [self.automata[line] for line in lines]

    def _say(self, context: DraftContext, chains: Sequence[_Chain], lines: Sequence[int], logits: Tensor) -> None:
        """Draws the next token of some lines from the draft model's laws.

        Args:
            context: The call.
            chains: What all lines have drafted.
            lines: The R lines.
            logits: `[R, V']` the draft model's.
        """
        by_length = defaultdict(list)
        for index, line in enumerate(lines):
            by_length[len(chains[line].tokens)].append(index)
        for length, some in by_length.items():
            own = [lines[index] for index in some]
            drafted = torch.tensor([chains[line].tokens for line in own], dtype=torch.long, device=context.device)
            scores = self.scores(context, own, drafted.view(len(own), length), logits[some])
            law = scores.softmax(dim=-1) if samples(context) else None
            tokens = scores.argmax(dim=-1) if law is None else draw(context, law, own, length)
            for index, (line, token) in enumerate(zip(own, tokens.tolist(), strict=True)):
                chains[line].add(token, None if law is None else law[index])

    def _verify_copies(self, context: DraftContext, chains: Sequence[_Chain], depth: int) -> None:
        """One pass over every line's last token and a copy of what may follow."""
        assert self.runner is not None
        written = self.runner.written
        copied = [chain.copied(depth) for chain in chains]
        fed = [[chain.tokens[-1], *tokens] for chain, tokens in zip(chains, copied, strict=True)]
        size = max(map(len, fed))
        device = context.device
        tokens = torch.tensor([[*line, *[0] * (size - len(line))] for line in fed], device=device)
        first = torch.tensor([self.pending + len(chain.tokens) - 1 for chain in chains], device=device)
        depths = first[:, None] + torch.arange(size, device=device)
        visible = self._visible(chains, written, size, device)
        logits = self.extend(tokens, depths, visible)
        lines = [line for line, chain in enumerate(chains) if len(chain.tokens) < depth]
        for line in lines:
            chains[line].slots.append(written)
        for place in range(size):
            self._say(context, chains, lines, logits[lines, place])
            # A line goes on while it has said what was copied, whose hidden states are there already.
            lines = [line for line in lines if place < len(copied[line]) and chains[line].tokens[-1] == copied[line][place]]
            if not lines:
                break
            for line in lines:
                chains[line].slots.append(written + place + 1)

    def _visible(self, chains: Sequence[_Chain], written: int, size: int, device: torch.device) -> Tensor:
        """`[B, n, m]` what each token of a pass attends to: of the round, only what its line has said."""
        visible = torch.zeros(len(chains), size, written + size, dtype=torch.bool)
        visible[:, :, : self.pending] = True
        for line, chain in enumerate(chains):
            visible[line, :, chain.slots] = True
        visible[:, :, written:] = torch.ones(size, size, dtype=torch.bool).tril()
        return visible.to(device)


class _Chain:
    """A line's draft.

    Args:
        automaton: The index of what the line knows.
    """

    def __init__(self, automaton: SuffixAutomaton):
        self.automaton = automaton
        self.end = end_of(automaton)
        self.tokens: list[int] = []
        self.slots: list[int] = []  # of the tokens that the draft model has run on: all but the last one
        self.laws: list[Tensor] = []

    def add(self, token: int, law: Tensor | None) -> None:
        """Adds a token, and the law `[V]` that it was drawn from."""
        self.tokens.append(token)
        self.end = Candidate(1.0, token, *self.automaton.step(self.end.state, self.end.length, token))
        if law is not None:
            self.laws.append(law)

    def copied(self, depth: int) -> list[int]:
        """What followed the line's text earlier, as far as it may be drafted and a token may be drawn after it."""
        tokens: list[int] = []
        place = self.end
        while len(self.tokens) + len(tokens) + 1 < depth:
            place = max(copies(self.automaton, place), key=lambda each: each.probability, default=Candidate(0.0, 0))
            if place.probability < LEAST_PROBABILITY:
                break
            tokens.append(place.token)
        return tokens


def _joined(chains: Sequence[_Chain], context: DraftContext) -> tuple[DraftTree, Tensor]:
    """The chains as one draft, and where the draft model holds its nodes `[B, K]`."""
    tokens = torch.tensor([chain.tokens for chain in chains], device=context.device)
    missing = tokens.shape[1]
    slots = [[*chain.slots, *[-1] * (missing - len(chain.slots))] for chain in chains]
    keeps_laws = samples(context) and context.weighs_proposals
    laws = torch.stack([torch.stack(chain.laws) for chain in chains]) if keeps_laws else None
    return DraftTree.chain(tokens, laws), torch.tensor(slots, device=context.device)
