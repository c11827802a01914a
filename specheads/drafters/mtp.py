"""The checkpoint's own multi-token-prediction layers as the drafter (DeepSeek-V3, arXiv 2412.19437, section 2.2).

The first layer reads, at each token, the target's last hidden state before it; each further one reads what the layer before it
made there of the token before. So layer k says the k-th drafted token; the last one goes on with its own hidden states where
more are drafted than there are layers. Every layer has keys and values of the committed text, made of the hidden states that
the target has given; what it ran on for a draft is forgotten.

Shapes: B lines, M committed tokens that the layers have not been fed, h hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..heads.target_parts import parts_of
from ..processors import in_full_precision
from ..tree import DraftTree
from .base import Accepted, Budget, DraftContext
from .draft_model import draft_processors
from .growth import grow_chain, within_depths
from .head import count_of, weights_per_pass
from .mtp_layers import MtpRunner, MtpStage, load_mtp_layers
from .pairs import Pairs, PendingPairs

PROMPT_CHUNK = 512  # positions of the prompt that a layer runs on at once: the mask grows with the square


class MtpDrafter:
    """Drafts chains with a target's multi-token-prediction layers, read from its checkpoint once.

    Args:
        target: The model.

    Raises:
        ValueError: if it has no such layers, or they cannot be read.
    """

    weighs_nodes = False
    own_ids: Tensor | None = None

    def __init__(self, target: PreTrainedModel):
        self.model = load_mtp_layers(target)
        self.stages = [MtpStage(self.model, index) for index in range(len(self.model.layers))]
        self.feature_layers = [parts_of(target).layers]
        own = count_of(self.model.layers[0].parameters()) + parts_of(target).output_weight.numel()
        self.step_cost = own / weights_per_pass(target)

    def begin(self, context: DraftContext) -> None:
        """Runs the layers over what is known of the prompt."""
        self.processors = draft_processors(context)
        batch_size, known = len(context.rows), context.prompt_features
        pairs = None if known is None else Pairs.of_prompt(known)
        most = max(context.sequences.remaining(row) for row in context.rows) + (0 if pairs is None else max(pairs.counts))
        self.runners = [MtpRunner(stage, batch_size, most + context.config.draft_tokens + 1) for stage in self.stages]
        # Of each layer but the last, the hidden states at the last committed token: the next layer reads them with the next.
        self.left: list[Tensor | None] = [None] * len(self.stages)
        self.pending = PendingPairs(batch_size)
        if pairs is not None and context.config.draft_tokens:
            for chunk in pairs.split(PROMPT_CHUNK):
                self._feed(chunk)

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A sampled or most probable chain."""
        if budget.depth == 0:
            return DraftTree.empty(len(context.rows), context.device)
        hidden = self._feed(self.pending.together(fills=False))
        self.pending = PendingPairs(len(context.rows))
        # What the layer that is to go on reads: the hidden states of the one before it, one for each drafted token.
        self.states, self.drafted = hidden[0][:, None], torch.empty(len(context.rows), 0, dtype=torch.long)
        self.ends = hidden
        tree = grow_chain(self, context, self._logits(hidden[0]), 0, budget.depth).tree
        for runner in self.runners:
            runner.commit([])
        return within_depths(tree, budget.depths)

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Notes what was kept, to be fed with the next draft."""
        if context.config.draft_tokens:
            self.pending.add(accepted)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Drops the other rows."""
        for runner in self.runners:
            runner.keep_rows(lines)
        self.left = [None if states is None else states[list(lines)] for states in self.left]
        self.pending.keep_rows(lines)

    def scores(self, context: DraftContext, lines: Sequence[int], drafted: Tensor, logits: Tensor) -> Tensor:
        """Processed scores `[R, V]` (`DraftSource.scores`)."""
        scores = in_full_precision(logits.to(context.device))
        return self.processors([context.rows[line] for line in lines], drafted, scores)

    def follow(self, tokens: Tensor, depth: int) -> Tensor:
        """Raw logits `[B, V]` after a chain's next node (`DraftSource.follow`)."""
        tokens = tokens[:, None].to(self.stages[0].device)
        self.drafted = torch.cat([self.drafted.to(tokens.device), tokens], dim=1)
        index = min(depth + 1, len(self.stages) - 1)
        runner, length = self.runners[index], self.drafted.shape[1]
        if index > depth:  # a layer that has not gone on yet reads all that was drafted
            hidden = _run(runner, self.drafted, self.states)
            self.states = torch.cat([self.ends[index][:, None], hidden], dim=1)
        else:
            hidden = _run(runner, tokens, self.states[:, -1:])
            self.states = torch.cat([self.states, hidden], dim=1)
        assert self.states.shape[1] == length + 1
        return self._logits(hidden[:, -1])

    def extend(self, tokens: Tensor, depths: Tensor, visible: Tensor) -> Tensor:
        """Trees are not drafted."""
        raise NotImplementedError

    def _feed(self, pairs: Pairs) -> list[Tensor]:
        """Runs every layer on committed tokens. Returns each one's hidden states `[B, h]` at the rows' last ones."""
        tokens, states = pairs.tokens.to(self.stages[0].device), pairs.features.to(self.stages[0].device)
        counts = torch.tensor(pairs.counts, device=tokens.device)
        lines = torch.arange(len(counts), device=tokens.device)
        ends: list[Tensor] = []
        for index, runner in enumerate(self.runners):
            if index:
                before = self.left[index - 1]
                self.left[index - 1] = ends[-1] if before is None else torch.where(counts[:, None] > 0, ends[-1], before)
                if before is None:  # the text's first tokens have nothing before them that the layer could read
                    tokens, states, counts = tokens[:, 1:], states[:, :-1], (counts - 1).clamp(min=0)
                else:
                    states = torch.cat([before[:, None], states[:, :-1]], dim=1)
            if not tokens.shape[1]:
                ends.append(ends[-1])
                continue
            states = _run(runner, tokens, states, counts.tolist())
            ends.append(states[lines, (counts - 1).clamp(min=0)])
        return ends

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model._project_to_logits(hidden)
        return logits


def _run(runner: MtpRunner, tokens: Tensor, states: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """A layer's hidden states `[B, n, h]` at tokens `[B, n]` one after another, behind what it ran on in the round.

    Args:
        runner: The layer.
        tokens: `[B, n]`.
        states: `[B, n, h]` what it reads with them.
        counts: How many of them each row keeps; `None` if they are a draft's.
    """
    first, size = runner.written, tokens.shape[1]
    order = torch.arange(first, first + size, device=tokens.device)
    visible = (order[:, None] >= torch.arange(first + size, device=tokens.device)).expand(len(tokens), -1, -1)
    hidden = runner.advance(tokens, states, order.expand_as(tokens), visible)
    if counts is not None:
        runner.commit(counts)
    return hidden


def mtp_drafter(target: PreTrainedModel, argument: str) -> MtpDrafter:
    """The drafter by its name, `mtp`.

    Raises:
        ValueError: if something follows the name.
    """
    if argument:
        raise ValueError(f"`mtp` takes no argument, got {argument!r}.")
    return MtpDrafter(target)
