"""What drafting with a head takes, whatever the head: its law over the target's vocabulary, its cost, and its nodes.

Shapes: B lines, F new nodes, m nodes that the head has run on in a round, V the target's vocabulary, V' the head's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..heads import DraftHead, EagleHead, MedusaHeads
from ..heads.target_parts import parts_of
from ..heads.vocabulary import scatter_logits
from ..processors import in_full_precision
from ..tree import DraftTree
from .base import Budget, DraftContext, Drafter
from .draft_model import draft_processors
from .growth import samples

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
    """How many weights a target's pass over one token reads: all but the embedding table, unless it is the output layer too."""
    parts = parts_of(target)
    table = parts.embedding_table
    return count_of(target.parameters()) - (0 if table is parts.output_weight else table.numel())


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


def node_limit(budget: Budget, least: float) -> float:
    """The least probability of a node that pays, by the budget's costs."""
    return max(least, budget.node_cost)
