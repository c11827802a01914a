"""Draft heads with weights at random, for a target small enough to walk every branch of `generate`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from specheads import EagleHead, MedusaHeads
from specheads.heads import DraftHead
from tests.tiny import with_head

from .replay import ReplayNoise, branches
from .whole_loop import distance, noise_of, target_and_draft

# The rows of a batch of three, padded; the one watched has neighbours of both kinds.
BATCH = torch.tensor([[1, 0, 1], [0, 0, 1], [0, 2, 1]])
BATCH_MASK = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1]])
KNOWN = [0, 2]  # what a reduced vocabulary has; token 1 is not drafted

# name: the head's kind, its fields, and how it drafts
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "medusa chain": ("medusa", {}, {"draft_tokens": 2}),
    "medusa markov chain": ("medusa", {"dependence": "markov", "markov_rank": 2}, {"draft_tokens": 2}),
    "medusa hydra chain": ("medusa", {"dependence": "hydra"}, {"draft_tokens": 2}),
    "medusa static tree": ("medusa", {}, {"draft_tokens": 2, "tree_nodes": 4, "draft_temperature": 0}),
    "medusa mixed tree": ("medusa", {}, {"draft_tokens": 2, "tree_nodes": 3}),
    "eagle 1 chain": ("eagle 1", {}, {"draft_tokens": 2}),
    "eagle 3 chain": ("eagle 3", {"draft_tokens": KNOWN}, {"draft_tokens": 2}),
    "eagle 3 dynamic tree": ("eagle 3", {}, {"draft_tokens": 2, "tree_nodes": 4, "draft_temperature": 0}),
    "eagle 3 mixed tree": ("eagle 3", {"draft_tokens": KNOWN}, {"draft_tokens": 2, "tree_nodes": 3}),
    "eagle 1 mixed tree": ("eagle 1", {}, {"draft_tokens": 2, "tree_nodes": 3}),
}


def random_head(target: PreTrainedModel, kind: str, seed: int = 3, **fields: Any) -> DraftHead:
    """A head whose laws are far from uniform and not the target's."""
    if kind == "medusa":
        head: DraftHead = MedusaHeads.from_target(target, **{"num_heads": 2, **fields})
    else:
        head = EagleHead.from_target(target, version=int(kind[-1]), **fields)
    generator = torch.Generator().manual_seed(seed)
    spread = 0.4 if kind == "eagle 1" else 0.7  # its output layer is the target's, whose logits are wide
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=spread, generator=generator)
    return head


def target_with_head(kind: str, vocab_size: int = 3, **fields: Any) -> PreTrainedModel:
    """An enabled target that drafts with a random head."""
    target, _ = target_and_draft(vocab_size)
    return with_head(target, random_head(target, kind, **fields))


def head_distance(scheme: str, setting: str, tokens: int = 4, **changes: Any) -> tuple[float, int]:
    """Total variation between speculative and plain sampling, and the number of branches."""
    kind, fields, speculative = SCHEMES[scheme]
    target = target_with_head(kind, **fields)
    return distance(target, None, {"adaptive": False, **speculative, **changes}, setting, 1, tokens)


def head_law(
    scheme: str, ids: torch.Tensor, mask: torch.Tensor, watched: int, stream: int, **arguments: Any
) -> tuple[dict[Any, float], PreTrainedModel, set[tuple[int, ...]]]:
    """The law of a row's continuation when drafting with a head, the target, and what lengths the rows were seen to get."""
    kind, fields, speculative = SCHEMES[scheme]
    target = target_with_head(kind, **fields)
    law: dict[Any, float] = {}
    lengths: set[tuple[int, ...]] = set()

    def run(noise: ReplayNoise) -> tuple[int, ...]:
        with noise_of(noise):
            out = target.generate(
                ids, attention_mask=mask, do_sample=True, return_dict_in_generate=True, pad_token_id=0,
                speculative={"adaptive": False, **speculative}, **arguments,
            )  # fmt: skip
        emitted = tuple(row.num_emitted_tokens for row in out.speculation.rows)
        lengths.add(emitted)
        return tuple(out.sequences[watched, ids.shape[1] :].tolist()[: emitted[watched]])

    for probability, result in branches(run, watched if len(ids) > 1 else None, stream):
        law[result] = law.get(result, 0.0) + probability
    return law, target, lengths
