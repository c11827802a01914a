"""Batches to train on, and what a head in training says at every root and depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from specheads import EagleHead, MedusaHeads
from specheads.heads import DraftHead
from specheads.training import DraftTraining, Teacher, TrainingBatch, TrainingSettings

DEPTH = 3
KNOWN = [*range(3, 20), 21, 24, 25, 28, 30, 31]
HEADS: dict[str, dict[str, Any]] = {
    "eagle 1": {},
    "eagle 1, normalised pairs": {"add_para_norm": True},
    "eagle 3": {},
    "eagle 3, own vocabulary": {"draft_tokens": KNOWN, "fc_norm": True, "norm_output": True},
    "eagle 3, two layers": {"transformer_layer_config": {"num_hidden_layers": 2}, "norm_before_residual": True},
    "medusa": {},
    "medusa, own vocabulary": {"draft_tokens": KNOWN, "original_lm_head": True},
    "medusa, hydra": {"dependence": "hydra"},
    "medusa, markov": {"dependence": "markov", "markov_rank": 8},
}


def new_head(target: PreTrainedModel, name: str, spread: float | None = 0.15, **fields: Any) -> DraftHead:
    """A head of a kind, with random weights unless `spread` is `None`."""
    fields = {**HEADS[name], **fields}
    if name.startswith("medusa"):
        head: DraftHead = MedusaHeads.from_target(target, **{"num_heads": DEPTH, **fields})
    else:
        head = EagleHead.from_target(target, version=int(name[6]), **fields)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1 and spread is not None:
                parameter.normal_(std=spread, generator=generator)
    return head


def training_of(head: DraftHead, target: PreTrainedModel, depth: int = DEPTH, **settings: Any) -> DraftTraining:
    return DraftTraining(head, Teacher(target, head.config.feature_layers), TrainingSettings(depth, **settings))


def batch_of(
    texts: Sequence[Sequence[int]], prompts: Sequence[int], width: int | None = None, left: bool = False
) -> TrainingBatch:
    """Texts as rows, padded to a width on one side; the first tokens of each are the prompt's."""
    width = width or max(map(len, texts))

    def rows(values: Sequence[Tensor]) -> Tensor:
        return torch.stack([pad(row, (width - len(row), 0) if left else (0, width - len(row))) for row in values])

    return TrainingBatch(
        rows([torch.tensor(text) for text in texts]),
        rows([torch.ones(len(text), dtype=torch.long) for text in texts]),
        rows([torch.arange(len(text)) for text in texts]),
        rows([torch.arange(len(text)) >= prompt for text, prompt in zip(texts, prompts, strict=True)]),
    )


def packed(texts: Sequence[Sequence[int]], prompts: Sequence[int], padding: int = 0) -> TrainingBatch:
    """All texts in one row."""
    one = [batch_of([text], [prompt]) for text, prompt in zip(texts, prompts, strict=True)]

    def row(name: str) -> Tensor:
        return pad(torch.cat([getattr(own, name) for own in one], dim=1), (0, padding))

    segments = torch.cat([torch.full((1, len(text)), index) for index, text in enumerate(texts)], dim=1)
    return TrainingBatch(
        row("input_ids"), row("attention_mask"), row("position_ids"), row("loss_mask"), pad(segments, (0, padding))
    )


def random_texts(count: int, longest: int = 14, vocab_size: int = 32, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Texts of several lengths, and how long their prompts are."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(longest // 2, longest + 1, (count,), generator=generator).tolist()
    texts = [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return texts, [2 + length % 3 for length in lengths]


def steps(training: DraftTraining, plan: Any) -> Iterator[Any]:
    """What the head says at each depth, of all roots at once."""
    _, places = training._target_scores(plan, plan.roots)
    return training._steps(plan, plan.roots, slice(0, len(plan.roots)), plan.drafts.states, places)


@torch.no_grad()
def confidence(training: DraftTraining, batch: TrainingBatch) -> list[float]:
    """How sure the head is on average, at each depth."""
    return [float(step.output.confidence.sigmoid().mean()) for step in steps(training, training._plan(batch))]


@torch.no_grad()
def said(training: DraftTraining, batch: TrainingBatch) -> dict[tuple[int, int, int], Tensor]:
    """By row, root and depth (from 0 on), the law `[V]` of the head in training."""
    plan, laws = training._plan(batch), {}
    for step in steps(training, plan):
        scattered = training.head.scatter(step.output.logits).softmax(dim=-1)
        for law, root in zip(scattered, step.chosen.tolist(), strict=True):
            laws[int(plan.roots.rows[root]), int(plan.roots.places[root]), step.depth] = law
    return laws
