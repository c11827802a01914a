"""An EAGLE head as the drafter: a chain with its true law, a dynamic tree, or a tree with sampled nodes.

The head goes over the committed text with the target's features, over its own draft with its own hidden states. What it ran on
for a draft is forgotten at once; with the next draft, the tokens that were kept are fed beside the features that the target has
given since.

Shapes: B lines, F new nodes, M pairs of a token and the features before it, h the head's hidden size, V' its vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..few_rows import fills_passes
from ..heads import EagleHead
from ..tree import DraftTree
from .base import Accepted, Budget, DraftContext
from .best_first import is_single_path
from .dynamic import grow_dynamic
from .growth import grow_tree, within_depths
from .head import HeadDrafter, NodeValues, count_of
from .head_runner import HeadRunner
from .pairs import Pairs, PendingPairs

PROMPT_CHUNK = 512  # positions of the prompt that the head runs on at once: the mask grows with the square


class EagleDrafter(HeadDrafter[EagleHead]):
    """Drafts with an EAGLE head (see `HeadDrafter`)."""

    def step_weights(self, target: PreTrainedModel) -> int:
        """The layers and the output layer, which versions 1 and 2 share with the target."""
        head = self.head
        if head.config.eagle_version == 3:
            return count_of(head.layers.parameters()) + count_of(head.lm_head.parameters())
        return count_of([*head.layers.parameters(), *head.fc.parameters(), *target.get_output_embeddings().parameters()])

    def begin(self, context: DraftContext) -> None:
        """Runs the head over what is known of the prompt."""
        super().begin(context)
        config, batch_size = context.config, len(context.rows)
        pairs = None if context.prompt_features is None else Pairs.of_prompt(context.prompt_features)
        most = max(context.sequences.remaining(row) for row in context.rows) + (0 if pairs is None else max(pairs.counts))
        self.runner = HeadRunner(self.head, batch_size, most + config.draft_tokens + (config.tree_nodes or 0))
        self.pending = PendingPairs(batch_size)
        self.fills = fills_passes(self.head)
        if pairs is not None and config.draft_tokens:
            for chunk in pairs.split(PROMPT_CHUNK):
                self.runner.remember(chunk.tokens.to(self.device), self._fused(chunk), chunk.counts)

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A sampled or most probable chain; or a tree, mixed where the verification goes by its laws, else dynamic."""
        if budget.depth == 0 or self.is_waiting():
            return self.nothing(context)
        logits = self._catch_up(context)
        if is_single_path(context, budget):
            tree = self.chain(context, budget, logits, budget.depth)
        elif self.is_mixed(context):
            tree = grow_tree(self, context, logits, 0, budget.depth, budget.nodes).tree
        else:
            tree = grow_dynamic(self, context, logits, 0, budget.depth, budget.nodes, budget.node_cost)
        self.runner.commit([])
        return within_depths(tree, budget.depths)

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Notes what was kept, to be fed with the next draft."""
        if context.config.draft_tokens:
            self.pending.add(accepted)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Drops the other rows."""
        self.runner.keep_rows(lines)
        self.pending.keep_rows(lines)

    def follow(self, tokens: Tensor, depth: int) -> Tensor:
        """Raw logits `[B, V']` after a chain's next node (`DraftSource.follow`)."""
        hidden = self.runner.follow(tokens[:, None].to(self.device), self.states.last(), depth)
        logits, states = self._read(hidden)
        self.states.add(states)
        return logits[:, 0]

    def extend(self, tokens: Tensor, depths: Tensor, visible: Tensor) -> Tensor:
        """Raw logits `[B, F, V']` after new nodes, each reading its parent's own hidden state (`DraftSource.extend`)."""
        tokens, depths, visible = tokens.to(self.device), depths.to(self.device), visible.to(self.device)
        logits, states = self._read(self.runner.advance(tokens, self.states.of_parents(visible), depths, visible))
        self.states.add(states)
        return logits

    def _catch_up(self, context: DraftContext) -> Tensor:
        """Feeds what the head has not seen. Returns the logits `[B, V']` after each row's last token."""
        pairs = self.pending.together(self.fills)
        self.pending = PendingPairs(len(pairs.counts))
        tokens, states = pairs.tokens.to(self.device), self._fused(pairs)
        before = [count - 1 for count in pairs.counts]
        # Of all but the last pair nothing but keys and values is read; and single rows make quick products.
        if max(before):
            self.runner.remember(tokens, states, before)
        line, last = torch.arange(len(before), device=self.device), torch.tensor(before, device=self.device)
        logits, own = self._read(self.runner.follow(tokens[line, last, None], states[line, last, None], 0)[:, 0])
        self.runner.commit([1] * len(before))
        self.states = NodeValues(own)
        return logits

    def _fused(self, pairs: Pairs) -> Tensor:
        """What the head reads of the target's features `[B, M, h]`."""
        return self.head.fuse(pairs.features.to(self.device))

    def _read(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The logits `[..., V']` and what the next step reads `[..., h]`."""
        output = self.head.read(hidden)
        self.confidence = output.confidence
        return cast(Tensor, output.logits), cast(Tensor, output.hidden_states)
