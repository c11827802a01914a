"""What drafting with a head takes, whatever the head: its law over the target's vocabulary, its cost, and its nodes.

Shapes: B lines, F new nodes, m nodes that the head has run on in a round, V the target's vocabulary, V' the head's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..heads import DraftHead, EagleHead, MedusaHeads
from ..heads.target_parts import active_experts, parts_of
from ..heads.vocabulary import scatter_logits
from ..pacing import shares
from ..processors import in_full_precision
from ..tree import DraftTree
from .base import Budget, DraftContext, Drafter
from .draft_model import draft_processors
from .growth import grow_chain, samples
from .prospects import Prospects, top_probability

MOST_WAIT = 8  # rounds from one look at the head to the next

Head = TypeVar("Head", EagleHead, MedusaHeads)


class HeadDrafter(Generic[Head]):
    """What the drafters with heads have in common.

    Args:
        head: The head; it is bound to the target, and its weights are not changed.
        target: The model it drafts for.
        tokenizer: The target's tokenizer, to be checked against the head's, if at hand.

    Raises:
        ValueError: if the head does not fit the target.
    """

    weighs_nodes = False

    def __init__(self, head: Head, target: PreTrainedModel, tokenizer: Any = None):
        head.bind(target, tokenizer)
        self.head: Head = head
        self.settings = head.config.speculative
        self.feature_layers = head.config.feature_layers or [parts_of(target).layers]
        self.step_cost = self.step_weights(target) / weights_per_pass(target)

    def step_weights(self, target: PreTrainedModel) -> int:
        """How many weights the drafting of one more level reads."""
        raise NotImplementedError

    def begin(self, context: DraftContext) -> None:
        """Makes what changes during the call."""
        self.device = self.head.device
        self.processors = draft_processors(context)
        ids = self.head.draft_ids
        self.known = None if ids is None else ids.to(context.device)
        # As long as no processor looks at ids, laws stay small; keyed noise goes by the target's ids.
        stays_small = self.processors.is_impartial and context.config.sampling_noise != "keyed"
        self.own_ids = self.known if stays_small else None
        draws_chains = context.config.tree_nodes is None or not context.takes_trees
        self.weighs_nodes = self.head.config.confidence and draws_chains
        self.confidence: Tensor | None = None  # `[B, ...]` logits at the chain's last node
        self.refusals = self.waits = 0

    def scores(self, context: DraftContext, lines: Sequence[int], drafted: Tensor, logits: Tensor) -> Tensor:
        """The head's processed scores.

        Args:
            context: The call.
            lines: The line of each of R nodes.
            drafted: `[R, D]` the tokens of each node's path.
            logits: `[R, V']` the head's.

        Returns:
            `[R, V']` over `own_ids`; `[R, V]` if there are none, -inf for tokens that the head does not know.
        """
        scores = in_full_precision(logits.to(context.device))
        if self.own_ids is None and self.known is not None:
            scores = scatter_logits(scores, self.known, context.vocab_size)
        return self.processors([context.rows[line] for line in lines], drafted, scores)

    def chain(self, context: DraftContext, budget: Budget, logits: Tensor, depth: int) -> DraftTree:
        """A chain, as long as it pays.

        Args:
            context: The call.
            budget: The round's budget.
            logits: `[B, V']` at the root.
            depth: Its length, at most.
        """
        prospects = self._prospects(context, budget) if context.config.adaptive else None
        tree = grow_chain(self, context, logits, 0, depth, prospects).tree
        self.refusals = 0 if tree.size else self.refusals + 1
        # A look at the confidence that leads to no draft is lost: the more of them in a row, the longer the next one waits.
        self.waits = 0 if tree.size else min(2 ** (self.refusals - 1), MOST_WAIT) - 1
        return tree

    def follow(self, tokens: Tensor, depth: int) -> Tensor:
        """Raw logits after a chain's next node (`DraftSource.follow`)."""
        raise NotImplementedError

    def extend(self, tokens: Tensor, depths: Tensor, visible: Tensor) -> Tensor:
        """Raw logits after new nodes (`DraftSource.extend`)."""
        raise NotImplementedError

    def is_waiting(self) -> bool:
        """Whether a round goes by without a look at the head."""
        self.waits -= 1
        return self.waits >= 0

    def level_cost(self) -> float:
        """What one more level of a chain costs, in plain passes."""
        return self.step_cost

    def _prospects(self, context: DraftContext, budget: Budget) -> Prospects | None:
        """What a chain's length goes by: the head's confidence, or the probability of what it drafts if that is its best."""
        level_cost = budget.pass_worth * self.level_cost()
        if self.weighs_nodes:
            return Prospects(shares(context), budget, level_cost, self._confidences)
        if samples(context) or context.device.type != "cpu":  # elsewhere to look is to wait for the device
            return None
        # Whether to draft at all is the pacing's choice here: how far such probabilities hold is not known.
        return Prospects(shares(context), replace(budget, entry_cost=0.0), level_cost, top_probability)

    def _confidences(self, scores: Tensor) -> Tensor:
        assert self.confidence is not None
        return self.confidence.reshape(len(scores)).sigmoid()

    def is_mixed(self, context: DraftContext) -> bool:
        """Whether trees have sampled nodes beside the most probable ones: where the verification goes by their laws."""
        return samples(context) and context.weighs_proposals

    def nothing(self, context: DraftContext) -> DraftTree:
        """No draft."""
        return DraftTree.empty(len(context.rows), context.device)


class NodeValues:
    """Something known of each node of a round that the head has run on, the root first.

    Args:
        root: `[B, ...]` of the root.
    """

    def __init__(self, root: Tensor):
        self.values = root[:, None]  # [B, 1 + m, ...]

    def last(self) -> Tensor:
        """The value `[B, 1, ...]` of the node that came last."""
        return self.values[:, -1:]

    def of_parents(self, visible: Tensor) -> Tensor:
        """The values `[B, F, ...]` of new nodes' parents.

        Args:
            visible: `[B, F, m]` which of the round's nodes, these F last, each new one attends to: itself and its path.
        """
        before = visible[:, :, : visible.shape[2] - visible.shape[1]]
        order = torch.arange(before.shape[2] + 1, device=visible.device)
        # The parent is the last one on the path; the root, which is on every path, comes before all.
        parent = (nn.functional.pad(before, (1, 0), value=True) * order).amax(dim=-1).to(self.values.device)
        lines = torch.arange(len(parent), device=parent.device)[:, None]
        return self.values[lines, parent]

    def add(self, values: Tensor) -> None:
        """Takes those of new nodes `[B, F, ...]`."""
        self.values = torch.cat([self.values, values], dim=1)


def weights_per_pass(target: PreTrainedModel) -> int:
    """How many weights a target's pass over one token reads.

    All but the embedding table, unless it is the output layer too; and of the experts of a layer those that a token goes to.
    """
    parts = parts_of(target)
    table = parts.embedding_table
    experts = count_of(weight for name, weight in target.named_parameters() if "experts" in name.split("."))
    resting = round(experts * (1 - active_experts(parts.config)))
    return count_of(target.parameters()) - resting - (0 if table is parts.output_weight else table.numel())


def count_of(parameters: Iterable[Tensor]) -> int:
    """How many values there are in all."""
    return sum(parameter.numel() for parameter in parameters)


def drafter_for(head: DraftHead, target: PreTrainedModel, tokenizer: Any = None) -> Drafter:
    """The drafter that drafts with a head.

    Raises:
        ValueError: if the head does not fit the target.
        TypeError: if nothing drafts with a head of its kind.
    """
    from .eagle import EagleDrafter
    from .medusa import MedusaDrafter

    if isinstance(head, EagleHead):
        return EagleDrafter(head, target, tokenizer)
    if isinstance(head, MedusaHeads):
        return MedusaDrafter(head, target, tokenizer)
    raise TypeError(f"There is no drafter for heads of the kind {type(head).__name__}.")
