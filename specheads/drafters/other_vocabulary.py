"""A draft model with another tokenizer than the target's (Timor et al. 2025, arXiv 2502.05202).

Sampled, it drafts from the tokens that both vocabularies have: its law is restricted to them and made to sum to 1 again, so
the proposal is known and ratios can be verified (token-level intersection). Greedily, it writes in its own vocabulary; what it
wrote is encoded anew in the target's, and verified by match. The model itself is never changed.

Shapes: B lines, T shared tokens, V the target's vocabulary, V' the draft model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..families import family_of
from ..heads.vocabulary import scatter_logits
from ..processors import in_full_precision
from ..tree import DraftTree
from .base import Accepted, Budget, DraftContext
from .draft_model import DraftModelDrafter
from .known_text import through_end
from .translation import LOOK_BEHIND, Reading, Translation

# What the draft model reads for a token that it does not have. Only where no shared token may be said is one drafted.
NOT_SHARED = 0


class OtherVocabularyDrafter(DraftModelDrafter):
    """Drafts with a model whose tokenizer is not the target's.

    Args:
        model: The draft model. It is not changed.
        target: The model it drafts for.
        tokenizer: The target's tokenizer.
        assistant_tokenizer: The draft model's.

    Raises:
        TypeError: if the model does not generate.
        ValueError: if the draft model is not decoder-only, or its family takes chains only.
    """

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel, tokenizer: Any, assistant_tokenizer: Any):
        super().__init__(model, target, tokenizer, assistant_tokenizer)
        if model.config.is_encoder_decoder or not family_of(model).takes_trees:
            raise ValueError(
                "A draft model with another tokenizer must be decoder-only and of a model type whose rows may differ in "
                f"length; {model.config.model_type!r} is not. Use one with the target's tokenizer."
            )
        self.translation = Translation(tokenizer, assistant_tokenizer, (_size(target), _size(model)))

    def begin(self, context: DraftContext) -> None:
        """Reads the prompts in the draft model's vocabulary."""
        pairs = {ours: theirs for ours, theirs in self.translation.pairs.items() if ours < context.vocab_size}
        self.writes_freely = context.noise is None or not pairs
        self.shared = torch.tensor([list(pairs), list(pairs.values())], dtype=torch.long, device=context.device)  # [2, T]
        self.own_id_of = pairs
        self.own_id = torch.full((context.vocab_size,), NOT_SHARED, device=context.device)  # [V]
        self.own_id[self.shared[0]] = self.shared[1]
        sources = self._sources(context)
        self.readings = [Reading(self.translation, source + context.tokens(line)) for line, source in enumerate(sources)]
        self.cached: list[list[int]] = []  # per line, what the draft model's cache holds
        super().begin(context)
        # As long as no processor looks at ids, laws stay small; keyed noise goes by the target's ids.
        stays_small = self.processors.is_impartial and context.config.sampling_noise != "keyed"
        self.own_ids = self.shared[0] if stays_small else None

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A draft of shared tokens; or a chain that was written freely and encoded anew."""
        if not self.writes_freely:
            return super().propose(context, budget)
        depth = self.depth_within_limit(context, budget)
        if depth == 0:
            return DraftTree.empty(len(context.rows), context.device)
        self.written = self._write(context, depth).tolist()
        ends = context.sequences.end_tokens
        chains = []
        for line, (ids, most) in enumerate(zip(self.written, budget.depths, strict=True)):
            behind = context.tokens(line, max(0, context.length(line) - LOOK_BEHIND))
            chains.append(through_end(self.translation.to_target(behind, ids)[: min(most, budget.nodes)], ends))
        tree = DraftTree.from_rows([(chain, range(len(chain))) for chain in chains], context.device)
        tree.steps = depth
        return tree

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Keeps in the draft model's cache what it has run on, and reads what was said."""
        if self.runner is not None and self.runner.written:
            kept = []
            for line in range(len(accepted.paths)):
                slots, ids = self._run_on(line, accepted)
                kept.append([*range(self.pending), *slots])
                self.cached[line] = self.readings[line].ids + ids
            self.runner.commit(kept)
        for reading, tokens in zip(self.readings, accepted.tokens, strict=True):
            reading.extend(tokens)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Drops the other rows."""
        super().keep_rows(lines)
        self.readings = [self.readings[line] for line in lines]
        self.cached = [self.cached[line] for line in lines] if self.cached else []

    def scores(self, context: DraftContext, lines: Sequence[int], drafted: Tensor, logits: Tensor) -> Tensor:
        """The draft model's processed scores of shared tokens.

        Args:
            context: The call.
            lines: The line of each of R nodes.
            drafted: `[R, D]` the tokens of each node's path, by the target's ids.
            logits: `[R, V']` the draft model's.

        Returns:
            `[R, T]` over `own_ids`; `[R, V]` if there are none, -inf for tokens that are not shared.
        """
        scores = in_full_precision(logits.to(context.device)).index_select(-1, self.shared[1])
        if self.own_ids is None:
            scores = scatter_logits(scores, self.shared[0], context.vocab_size)
        return self.processors([context.rows[line] for line in lines], drafted, scores)

    def _check_tokenizers(self, target: Any, draft: Any, tokenizer: Any, draft_tokenizer: Any) -> None:
        """They differ, and may."""

    def _text(self, context: DraftContext, line: int, start: int = 0) -> list[int]:
        return self.readings[line].ids[start:]

    def _length(self, context: DraftContext, line: int) -> int:
        return len(self.readings[line].ids)

    def _in_own_ids(self, tokens: Tensor) -> Tensor:
        return self.own_id[tokens]

    def _catch_up(self, context: DraftContext) -> tuple[Tensor, int]:
        """Forgets what reads otherwise by now, and feeds the rest."""
        if self.runner is None:
            self.cached = self._open(context)
        assert self.runner is not None
        for line, reading in enumerate(self.readings):
            self.cached[line] = self.cached[line][: _common(self.cached[line], reading.ids)]
        self.runner.rewind([len(ids) + padding for ids, padding in zip(self.cached, self.padding, strict=True)])
        return super()._catch_up(context)

    def _write(self, context: DraftContext, depth: int) -> Tensor:
        """The draft model's most probable tokens `[B, depth]`, by its own ids."""
        logits, self.pending = self._catch_up(context)
        written = logits.argmax(dim=-1)[:, None]
        while written.shape[1] < depth:
            seen = self.pending + written.shape[1]
            visible = torch.ones(len(written), 1, seen, dtype=torch.bool, device=written.device)
            logits = self._run(written[:, -1:], torch.full_like(written[:, -1:], seen - 1), visible)
            written = torch.cat([written, logits[:, -1].argmax(dim=-1)[:, None]], dim=1)
        return written

    def _run_on(self, line: int, accepted: Accepted) -> tuple[list[int], list[int]]:
        """Which of the round's tokens after a line's text are worth keeping, and their ids: what may be read again."""
        if self.writes_freely:
            ids = self.written[line][:-1]  # the last one was not run on
            return list(range(self.pending, self.pending + len(ids))), ids
        slots = self.slot_of[line].tolist()
        fed = [(slots[node - 1], token) for node, token in zip(accepted.paths[line], accepted.tokens[line], strict=False)]
        fed = [(slot, token) for slot, token in fed if slot >= 0]
        return [slot for slot, _ in fed], [self.own_id_of.get(token, NOT_SHARED) for _, token in fed]


def _size(model: PreTrainedModel) -> int:
    """How many ids a model both reads and says."""
    return min(model.config.get_text_config(decoder=True).vocab_size, model.get_input_embeddings().weight.shape[0])


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of what two lists begin with alike."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(left), len(right)))
