"""Heads that predict the target perfectly do so, and an off-by-one in features, tokens or maps is a wrong draft."""

from __future__ import annotations

import pytest
import torch

from specheads.heads import vocabulary
from tests.heads import perfect

DRAFTS = 5
PROMPT = [3, 17, 5, 30]
EAGLES = [
    (1, "features", {}),
    (1, "tokens", {}),
    (2, "features", {}),
    (3, "features", {}),
    (3, "features", {"norm_before_residual": True}),
    (3, "features", {"norm_output": True}),
    (3, "features", {"fc_norm": True, "norm_before_fc": True}),
    (3, "features", {"draft_tokens": perfect.CYCLE}),
]


def _setting(version: int, reads: str, fields: dict):
    target = perfect.cyclic_target()
    head = perfect.perfect_eagle(target, version, reads, **fields)
    text = perfect.continuation(target, PROMPT, DRAFTS + 1)
    features = perfect.features_of(target, torch.tensor([PROMPT]), head.config.feature_layers)
    return head, text, features


@pytest.mark.parametrize(("version", "reads", "fields"), EAGLES)
def test_a_perfect_eagle_head_drafts_the_continuation(version, reads, fields):
    head, text, features = _setting(version, reads, fields)
    assert perfect.eagle_drafts(head, [*PROMPT[1:], text[0]], features, DRAFTS) == text[1:]


@pytest.mark.parametrize(("version", "reads", "fields"), EAGLES)
def test_a_late_eagle_head_is_wrong_at_once(version, reads, fields):
    head, text, features = _setting(version, reads, {**fields, "late": 1})
    assert perfect.eagle_drafts(head, [*PROMPT[1:], text[0]], features, 1) == [text[2]]


def test_a_version_3_head_reads_the_token_beside_its_features():
    target = perfect.cyclic_target()
    head = perfect.perfect_eagle(target, 3, "tokens", transformer_layer_config={"num_key_value_heads": 4})
    for token in perfect.CYCLE:
        features = perfect.features_of(target, torch.tensor([[0]]), head.config.feature_layers)
        (drafted,) = perfect.eagle_drafts(head, [token], features, 1)
        assert drafted == perfect.continuation(target, [token], 1)[0]


@pytest.mark.parametrize(("version", "reads", "fields"), EAGLES)
def test_features_of_the_position_before_are_wrong(version, reads, fields):
    head, text, features = _setting(version, reads, fields)
    drafts = perfect.eagle_drafts(head, [*PROMPT[1:], text[0]], features.roll(1, dims=1), DRAFTS)
    assert (drafts == text[1:]) == (reads == "tokens")


def test_tokens_of_the_position_before_are_wrong():
    head, text, features = _setting(1, "tokens", {})
    assert perfect.eagle_drafts(head, PROMPT, features, DRAFTS)[0] != text[1]


def test_a_map_of_ids_in_place_of_offsets_is_wrong_and_refused():
    head, text, features = _setting(3, "features", {"draft_tokens": perfect.CYCLE})
    ids = head.draft_ids
    head.d2t.copy_(vocabulary.offsets_from_ids(ids.roll(1)))
    assert perfect.eagle_drafts(head, [*PROMPT[1:], text[0]], features, DRAFTS) != text[1:]
    head.d2t.copy_(ids)
    with pytest.raises(ValueError, match="holds the target's ids where offsets belong"):
        head.check_loaded()


@pytest.mark.parametrize("fields", [{}, {"draft_tokens": perfect.CYCLE}])
def test_perfect_medusa_heads_draft_the_continuation(fields):
    target = perfect.cyclic_target()
    heads = perfect.perfect_medusa(target, num_heads=DRAFTS, **fields)
    text = perfect.continuation(target, PROMPT, DRAFTS + 1)
    hidden = perfect.features_of(target, torch.tensor([PROMPT]), heads.config.feature_layers)
    drafts = heads.scatter(heads(hidden).logits).argmax(dim=-1)[0]
    assert drafts[-1].tolist() == text[1:]
    assert drafts[-2].tolist() == text[:-1]  # one position before, one token before
    late = perfect.perfect_medusa(target, late=1, num_heads=DRAFTS, **fields)
    assert not (late.scatter(late(hidden).logits).argmax(dim=-1) == drafts).any()
