"""What a head drafts, worked out anew for every draft: no cache, no batch, every position from the target's own features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specheads import EagleHead, MedusaHeads
from specheads.drafters.base import Budget
from specheads.drafters.head import HeadDrafter
from specheads.heads.medusa import paths_along
from specheads.tree import NO_TOKEN, DraftTree, path_to


@torch.no_grad()
def law_after(head: Any, target: PreTrainedModel, text: Sequence[int], drafted: Sequence[int], **inputs: Any) -> Tensor:
    """The head's law `[V]` of the token after a draft.

    Args:
        head: The head.
        target: Its target.
        text: What is committed, prompt included.
        drafted: A draft's path.
        inputs: What else the target reads, an encoder's input for instance.
    """
    name = "decoder_input_ids" if target.config.is_encoder_decoder else "input_ids"
    states = target(**inputs, **{name: torch.tensor([text[:-1]])}, output_hidden_states=True, use_cache=False)
    states = states.decoder_hidden_states if target.config.is_encoder_decoder else states.hidden_states
    features = torch.cat([states[layer] for layer in head.config.feature_layers], dim=-1)
    if isinstance(head, MedusaHeads):
        path = torch.tensor([[text[-1], *drafted]])
        logits = head(features[:, -1:], paths_along(path, head.config.num_heads)[:, :1]).logits[0, 0, len(drafted)]
        return head.scatter(logits).softmax(dim=-1)
    return head.scatter(_eagle_logits(head, text, drafted, features)).softmax(dim=-1)


def _eagle_logits(head: EagleHead, text: Sequence[int], drafted: Sequence[int], features: Tensor) -> Tensor:
    cache = DynamicCache()
    output = head(torch.tensor([text[1:]]), head.fuse(features), cache=cache)
    for token in drafted:
        output = head(torch.tensor([[token]]), output.hidden_states[:, -1:], cache=cache)
    return output.logits[0, -1]


class Seen(list[tuple[list[list[int]], DraftTree]]):
    """Per round, each line's committed text and the draft; and the budgets."""

    def __init__(self) -> None:
        super().__init__()
        self.budgets: list[Budget] = []


@contextmanager
def watched(drafter: type[HeadDrafter]) -> Iterator[Seen]:
    """Notes every draft of a kind of drafter."""
    seen = Seen()
    original = drafter.propose

    def propose(self: Any, context: Any, budget: Any) -> DraftTree:
        tree = original(self, context, budget)
        seen.budgets.append(budget)
        seen.append(([context.tokens(line) for line in range(len(context.rows))], tree))
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "propose", propose)
        yield seen


def drafted_paths(tree: DraftTree, line: int) -> list[tuple[int, ...]]:
    """The tokens along the path to each node of a line."""
    tokens, parents = tree.tokens[line].tolist(), tree.parents[line].tolist()
    nodes = [node for node in range(1, tree.size + 1) if tokens[node - 1] != NO_TOKEN]
    return [tuple(tokens[step - 1] for step in path_to(node, parents)) for node in nodes]
