"""Medusa heads: their formula, their dependence on the tokens before, and their vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from specheads.heads import MedusaConfig, MedusaHeads
from specheads.heads.medusa import paths_along
from tests.heads.perfect import features_of
from tests.tiny import tiny

LENGTH = 6
KINDS = [
    {},
    {"num_hidden_layers": 2, "medusa_fc_bias": False},
    {"original_lm_head": True, "confidence": True},
    {"draft_tokens": [2, 5, 7, 30]},
    {"dependence": "markov", "markov_rank": 3, "draft_tokens": [2, 5, 7, 30]},
    {"dependence": "hydra", "num_hidden_layers": 2},
]

DEPENDENT = [{"dependence": "hydra"}, {"dependence": "markov", "markov_rank": 2}]


def setting(family: str = "llama", **fields):
    target = tiny(family)
    heads = MedusaHeads.from_target(target, num_heads=3, **fields).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter))
    ids = torch.randint(3, 32, (2, LENGTH))
    return target, heads, ids, features_of(target, ids, heads.config.feature_layers)


@pytest.mark.parametrize("fields", KINDS)
@torch.no_grad()
def test_heads_one_by_one_equal_all_at_once(fields):
    _, heads, ids, hidden = setting(**fields)
    paths = paths_along(ids, 3)
    whole = heads(hidden, paths)
    for position in range(LENGTH):
        for index in range(3):
            logits, confidence = heads.head(index, hidden[:, position], paths[:, position, : index + 1])
            torch.testing.assert_close(logits, whole.logits[:, position, index])
            if heads.config.confidence:
                torch.testing.assert_close(confidence, whole.confidence[:, position, index])
    torch.testing.assert_close(heads(hidden[1:, 2:3], paths[1:, 2:3]).logits[0, 0], whole.logits[1, 2])


@torch.no_grad()
def test_independent_heads_are_their_formula():
    _, heads, _, hidden = setting(num_hidden_layers=2)
    weights = heads.state_dict()
    for index in range(3):
        state = hidden
        for block in range(2):
            name = f"blocks.{index}.layers.{block}"
            state = state + silu(state @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
        torch.testing.assert_close(heads(hidden).logits[:, :, index], state @ weights[f"lm_heads.{index}.weight"].T)


@torch.no_grad()
def test_hydra_heads_are_their_formula():
    target, heads, ids, hidden = setting(dependence="hydra")
    weights, table = heads.state_dict(), target.get_input_embeddings().weight
    paths = paths_along(ids, 3)
    for index in range(3):
        reads = torch.cat([hidden, *(table[paths[..., place]] for place in range(index + 1))], dim=-1)
        name = f"blocks.{index}"
        kept = reads @ weights[f"{name}.residual.weight"].T + weights[f"{name}.residual.bias"]
        state = kept + silu(reads @ weights[f"{name}.layers.0.weight"].T + weights[f"{name}.layers.0.bias"])
        torch.testing.assert_close(heads(hidden, paths).logits[:, :, index], state @ weights[f"lm_heads.{index}.weight"].T)


@pytest.mark.parametrize("fields", DEPENDENT)
@torch.no_grad()
def test_dependent_heads_hear_of_the_tokens_before_and_of_no_others(fields):
    _, heads, ids, hidden = setting(**fields)
    paths = paths_along(ids, 3)
    for index in range(3):
        for changed in range(3):
            other = paths.clone()
            other[..., changed] = (other[..., changed] + 1) % 32
            same = torch.equal(heads(hidden, other).logits[:, :, index], heads(hidden, paths).logits[:, :, index])
            hears = changed <= index if fields["dependence"] == "hydra" else changed == index
            assert same != hears
    with pytest.raises(ValueError, match="pass `paths`"):
        heads(hidden)


@pytest.mark.parametrize(
    "fields", [{}, {"dependence": "hydra"}, {"dependence": "markov", "markov_rank": 2}, {"draft_tokens": [1, 9]}]
)
@pytest.mark.parametrize("family", ["llama", "phi", "cohere", "gemma2"])
@torch.no_grad()
def test_a_warm_start_gives_the_targets_law(family, fields):
    target = tiny(family, **({"tie_word_embeddings": True} if family == "gemma2" else {}))
    heads = MedusaHeads.from_target(target, num_heads=2, **fields)
    ids = torch.randint(3, 32, (1, LENGTH))
    logits = target(ids).logits
    own = heads(features_of(target, ids, heads.config.feature_layers), paths_along(ids, 2)).logits[:, :, 1]
    torch.testing.assert_close(own, logits if heads.draft_ids is None else logits[..., heads.draft_ids])


@torch.no_grad()
def test_fresh_blocks_change_nothing():
    config = MedusaConfig.from_target(tiny(), num_heads=2, dependence="markov", markov_rank=2)
    heads = MedusaHeads(config)
    hidden = torch.randn(1, 2, 32)
    torch.testing.assert_close(heads(hidden, torch.ones(1, 2, 2, dtype=torch.long)).logits[:, :, 0], heads.lm_heads[0](hidden))


def test_paths_run_along_the_text():
    assert paths_along(torch.tensor([[5, 6, 7]]), 2).tolist() == [[[5, 6], [6, 7], [7, 0]]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 0}, "`num_heads` must be an integer of at least 1, got 0"),
        ({"truncated_vocab_size": 33}, "between 1 and the target's 32, got 33"),
        ({"dependence": "rnn"}, "none, hydra, markov, got 'rnn'"),
        ({"dependence": "markov"}, "`markov_rank` must be at least 1"),
        ({"markov_rank": 2}, "and 0 without"),
        ({"dependence": "hydra", "num_hidden_layers": 0}, "at least 1"),
        ({"medusa_choices": [1]}, "Unknown field.*medusa_choices"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MedusaConfig.from_target(tiny(), **fields)


def test_hidden_states_of_another_size_are_refused():
    _, heads, *_ = setting()
    with pytest.raises(ValueError, match="read 32 values for each position, the target's last hidden state, got 16"):
        heads(torch.zeros(1, 1, 16))
