"""Every family's logits are its output layer on its last hidden state, transformed as `TargetParts` says."""

from __future__ import annotations

import pytest
import torch

from specheads.heads import EagleConfig, EagleHead, MedusaHeads
from specheads.heads.target_parts import parts_of, transform_logits
from tests.tiny import FAMILIES, tiny

CHANGES = {
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "cohere": {"logit_scale": 0.25},
    "gemma3_text": {"final_logit_softcapping": 5.0},
}
TIED = {"llama": {"tie_word_embeddings": True}, "qwen3": {"tie_word_embeddings": True}}
# Whisper reads sound.
CASES = [(family, CHANGES.get(family, {})) for family in FAMILIES if family != "whisper"] + [*TIED.items()]
PLAIN_EMBEDDINGS = (
    "cohere",
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "qwen3",
)  # the others add positions, or norm
SINGLE_PRECISION = ("xglm", "mamba2")


def _states(target, ids):
    inputs = {"decoder_input_ids": ids} if target.config.is_encoder_decoder else {}
    output = target(input_ids=ids, output_hidden_states=True, **inputs)
    return output.decoder_hidden_states if inputs else output.hidden_states, output.logits


def _target(family, changes):
    target = tiny(family, **changes)
    # The fast path of experts has no double precision.
    return target.float() if "experts" in str(target) or family in SINGLE_PRECISION else target


@pytest.mark.parametrize(("family", "changes"), CASES)
@torch.no_grad()
def test_the_parts_give_the_logits_and_the_embeddings(family, changes):
    target = _target(family, changes)
    parts = parts_of(target)
    ids = torch.randint(3, 32, (2, 7))
    states, logits = _states(target, ids)
    assert len(states) == parts.layers + 1
    own = transform_logits(parts.output(states[parts.layers]), parts.logit_scale, parts.final_logit_softcapping)
    torch.testing.assert_close(own, logits)
    if family in PLAIN_EMBEDDINGS:
        torch.testing.assert_close(parts.embedding_table[ids] * parts.embedding_multiplier, states[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "changes"), CASES)
@torch.no_grad()
def test_medusa_heads_start_from_the_next_token_law(family, changes):
    target = _target(family, changes)
    heads = MedusaHeads.from_target(target, num_heads=2)
    states, logits = _states(target, torch.randint(3, 32, (2, 7)))
    for index in range(2):
        torch.testing.assert_close(heads(states[-1]).logits[:, :, index], logits)


@pytest.mark.parametrize(("family", "changes"), CASES)
@pytest.mark.parametrize("version", [1, 3])
@torch.no_grad()
def test_every_family_gets_an_eagle_head(family, changes, version):
    target = _target(family, changes)
    head = EagleHead.from_target(target, version=version)
    ids = torch.randint(3, 32, (2, 7))
    states, logits = _states(target, ids)
    features = torch.cat([states[layer] for layer in head.config.feature_layers], dim=-1)
    output = head(ids[:, 1:], head.fuse(features[:, :-1]))
    assert output.logits.shape == (2, 6, logits.shape[-1])
    assert output.logits.isfinite().all()


def test_a_bias_added_at_last_is_the_targets_too():
    target = tiny("marian")
    target.final_logits_bias.normal_()
    ids = torch.randint(3, 30, (1, 5))
    states, logits = _states(target, ids)
    heads = MedusaHeads.from_target(target)
    torch.testing.assert_close(heads(states[-1]).logits[:, :, 0], logits)


def test_layers_follow_the_target():
    kinds = {family: EagleConfig.from_target(tiny(family)).transformer_layer_config for family in FAMILIES}
    assert {family for family, kind in kinds.items() if kind.model_type == "qwen3"} >= {"qwen3", "qwen3_moe", "gemma3_text"}
    assert kinds["llama"].model_type == kinds["phi"].model_type == kinds["olmo2"].model_type == "llama"
    assert kinds["cohere"].rope_parameters["rope_theta"] == tiny("cohere").config.rope_parameters["rope_theta"]
    assert "partial_rotary_factor" not in kinds["phi"].rope_parameters


def test_rotary_parameters_are_the_targets():
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    target = tiny("llama")
    target.config.rope_parameters = rope
    assert EagleConfig.from_target(target).transformer_layer_config.rope_parameters == rope
    target.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="dynamic"):
        EagleConfig.from_target(target)


def test_a_target_without_an_output_layer_is_refused():
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        parts_of(tiny("llama").model)
