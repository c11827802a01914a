"""A head that predicts the target perfectly gets every draft accepted, one that is always wrong none, through `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specheads.heads import DraftHead, vocabulary
from tests.heads import perfect
from tests.tiny import with_head

from .test_heads import features_of_the_node_before, hidden_state_of_the_root

DRAFTS, ROUNDS = 5, 3
FAMILIES = ["llama", "qwen3", "mistral", "gemma3_text", "gpt2", "qwen3_moe", "t5", "bart"]
KINDS = ["medusa", "eagle 1", "eagle 2", "eagle 3"]
IDS = torch.tensor([[3, 17, 5, 30], [0, 0, 8, 21]])


def head_for(target: PreTrainedModel, kind: str, late: int = 0, **fields: Any) -> DraftHead:
    if kind == "medusa":
        # So accurate that a tree of static shape has a path of full length.
        accuracies = [[0.9, 0.02]] * DRAFTS
        return perfect.perfect_medusa(target, late, num_heads=DRAFTS, head_accuracies=accuracies, **fields)
    if kind == "eagle 3":
        fields["fc_norm"] = True  # embeddings are of another length in each family
    return perfect.perfect_eagle(target, int(kind[-1]), late=late, **fields)


def accepted(target: PreTrainedModel, head: DraftHead, **speculative: Any) -> list[list[int]]:
    """The accepted drafts of every round after the prompt's, per row; the text is checked."""
    with_head(target, head)
    inputs = {"input_ids": IDS, "attention_mask": (IDS > 0).long()}
    if target.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = IDS[:, -1:]
    settings = {"max_new_tokens": 1 + ROUNDS * (DRAFTS + 1), "do_sample": False, "pad_token_id": 0}
    out = target.generate(
        **inputs, **settings, return_dict_in_generate=True,
        speculative={"draft_tokens": DRAFTS, "adaptive": False, "per_step": True, **speculative},
    )  # fmt: skip
    assert torch.equal(out.sequences, target.generate(**inputs, **settings))
    return [row.per_step_accepted[1:] for row in out.speculation.rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mean_acceptance_length(family: str, kind: str) -> None:
    target = perfect.cyclic_target(family)
    for tree_nodes in (None, 12):
        rounds = accepted(target, head_for(target, kind), tree_nodes=tree_nodes)
        assert rounds == [[DRAFTS] * ROUNDS] * 2  # and a token of the target's own with each: K + 1
    never = accepted(target, head_for(target, kind, late=1))
    assert never == [[0] * ROUNDS * (DRAFTS + 1)] * 2


@pytest.mark.parametrize("kind", ["medusa", "eagle 3"])
def test_with_a_vocabulary_of_its_own(kind: str) -> None:
    target = perfect.cyclic_target()
    assert accepted(target, head_for(target, kind, draft_tokens=perfect.CYCLE)) == [[DRAFTS] * ROUNDS] * 2


def test_a_head_that_reads_the_token() -> None:
    target = perfect.cyclic_target()
    assert accepted(target, perfect.perfect_eagle(target, 1, "tokens")) == [[DRAFTS] * ROUNDS] * 2


@pytest.mark.parametrize(
    ("mutate", "kind"),
    [
        (features_of_the_node_before, "eagle 1"),
        (features_of_the_node_before, "eagle 3"),
        (hidden_state_of_the_root, "medusa"),
    ],
)
def test_features_of_another_position_show(mutate: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    target = perfect.cyclic_target()
    assert accepted(target, head_for(target, kind)) != [[DRAFTS] * ROUNDS] * 2


def test_a_wrong_map_shows() -> None:
    target = perfect.cyclic_target()
    head = head_for(target, "eagle 3", draft_tokens=perfect.CYCLE)
    head.d2t.copy_(vocabulary.offsets_from_ids(head.draft_ids.roll(1)))
    assert not any(map(any, accepted(target, head)))
