"""Heads that have learnt a few texts by heart, more or less: enough for their drafts to be now accepted and now rejected.

Shapes: B texts, N positions, h the hidden size, D the draft vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.heads import EagleHead, MedusaHeads

PASSES = 3  # over each text: the first on the target's features, the others on the head's own hidden states
IGNORED = -100
SEED = 0


class Texts:
    """Prompts with a target's greedy continuations, and the target's hidden states along them.

    Args:
        target: The target.
        prompts: Lists of ids.
        continuations: Lists of ids.
    """

    def __init__(self, target: PreTrainedModel, prompts: list[list[int]], continuations: list[list[int]]):
        rows = [prompt + continuation for prompt, continuation in zip(prompts, continuations, strict=True)]
        width = max(map(len, rows))
        self.ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])  # [B, N] padded on the right
        self.labels = torch.full_like(self.ids, IGNORED)
        for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            self.labels[index, len(prompt) : len(row)] = self.ids[index, len(prompt) : len(row)]
        with torch.no_grad():
            self.states = target(self.ids, output_hidden_states=True).hidden_states

    def first(self) -> Texts:
        """The first of them alone."""
        first = copy.copy(self)
        first.ids, first.labels, first.states = self.ids[:1], self.labels[:1], [states[:1] for states in self.states]
        return first

    def features(self, layers: list[int]) -> Tensor:
        """`[B, N, L h]`."""
        return torch.cat([self.states[layer] for layer in layers], dim=-1)

    def later(self, tokens: int) -> Tensor:
        """`[B, N]` the labels that many tokens later."""
        return nn.functional.pad(self.labels[:, tokens:], (0, tokens), value=IGNORED)

    def vocabulary(self, size: int) -> list[int]:
        """The ids of a draft vocabulary: those of the texts, and the target's first ones."""
        own = set(self.ids.flatten().tolist())
        others = (token for token in range(size + len(own)) if token not in own)
        return sorted([*own, *others][:size])

    def output(self, target: PreTrainedModel) -> tuple[Tensor, Tensor]:
        """A part of the target's output layer, which costs less to learn with: ids `[D]` and their rows `[D, h]`."""
        ids = torch.tensor(self.vocabulary(2048))
        return ids, target.get_output_embeddings().weight[ids].detach()


def learn_eagle(target: PreTrainedModel, texts: Texts, steps: int, **fields: Any) -> EagleHead:
    """A head that has gone over the texts that many times; its output layer stays the target's.

    Args:
        target: The target.
        texts: The texts.
        steps: How often.
        fields: Arguments of `EagleHead.from_target`.
    """
    torch.manual_seed(SEED)
    head = EagleHead.from_target(target, **fields)
    features = texts.features(head.config.feature_layers)
    following = nn.functional.pad(texts.ids[:, 1:], (0, 1))
    ids, rows = texts.output(target)
    labels = own_ids(texts.later(2), ids)
    learned = [weight for name, weight in head.named_parameters() if not name.startswith(("lm_head", "embed_tokens"))]
    optimiser = torch.optim.AdamW(learned, lr=1e-3, weight_decay=0.0)
    for _ in range(steps):
        states, losses = head.fuse(features), []
        for _ in range(PASSES):
            own = head.advance(following, states)
            losses.append(loss_of((head.norm(own) if head.config.eagle_version == 3 else own) @ rows.T, labels))
            # At each position the head's own hidden state of the one before, as in the next step of a draft.
            states = torch.cat([states[:, :1], own[:, :-1]], dim=1)
        update(optimiser, sum(losses))
    return head.eval()


def learn_medusa(target: PreTrainedModel, texts: Texts, steps: int, **fields: Any) -> MedusaHeads:
    """Heads whose blocks have gone over the texts that many times; their output layers stay the target's.

    Args:
        target: The target.
        texts: The texts.
        steps: How often.
        fields: Arguments of `MedusaHeads.from_target`.
    """
    torch.manual_seed(SEED)
    heads = MedusaHeads.from_target(target, **fields)
    hidden = texts.states[-1]
    ids, rows = texts.output(target)
    optimiser = torch.optim.AdamW(heads.blocks.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(steps):
        logits = [blocks(hidden) @ rows.T for blocks in heads.blocks]
        update(optimiser, sum(loss_of(own, own_ids(texts.later(2 + index), ids)) for index, own in enumerate(logits)))
    return heads.eval()


def own_ids(labels: Tensor, ids: Tensor) -> Tensor:
    """Labels as indices into a vocabulary `[D]` of increasing ids."""
    return torch.where(labels == IGNORED, IGNORED, torch.searchsorted(ids, labels.clamp(min=0)))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def update(optimiser: torch.optim.Optimizer, loss: Any) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
