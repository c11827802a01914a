"""An EAGLE head gives the same in one pass, step by step, alone, in a batch and padded, and what its formula says."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import silu
from transformers import DynamicCache

from specheads.cache import SlotCache
from specheads.heads import EagleConfig, EagleHead, vocabulary
from tests.heads.perfect import features_of
from tests.tiny import tiny

LENGTH = 7
VERSIONS = [
    {"version": 1},
    {"version": 1, "add_para_norm": True, "fc_bias": True},
    {"version": 2},
    {"version": 3},
    {"version": 3, "draft_tokens": [1, 4, 5, 9, 17, 30]},
    {"version": 3, "norm_before_residual": True, "norm_before_fc": True},
    {"version": 3, "fc_norm": True, "norm_output": True, "confidence": True},
    {"version": 3, "own_embeddings": True, "transformer_layer_config": {"num_hidden_layers": 2, "hidden_size": 16}},
]
FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt2"]


def spread(head: EagleHead, seed: int = 0) -> EagleHead:
    """Weights large enough to tell tokens and positions apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else 1 + 0.1 * noise)
    return head.eval()


def setting(family: str = "llama", batch: int = 2, attention: str = "sdpa", **fields):
    target = tiny(family)
    head = spread(EagleHead.from_target(target, **fields))
    head.config.transformer_layer_config._attn_implementation = attention
    ids = torch.randint(3, 32, (batch, LENGTH + 1))
    features = features_of(target, ids, head.config.feature_layers)[:, :-1]
    return target, head, ids, features


def agree(*pairs):
    for own, expected in pairs:
        torch.testing.assert_close(own, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("fields", VERSIONS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_step_by_step_equals_one_pass(family, fields):
    _, head, ids, features = setting(family, **fields)
    hidden = head.fuse(features)
    whole = head(ids[:, 1:], hidden)
    cache = DynamicCache()
    steps = [head(ids[:, i + 1 : i + 2], hidden[:, i : i + 1], cache=cache) for i in range(LENGTH)]
    agree((torch.cat([step.logits for step in steps], dim=1), whole.logits))
    agree((torch.cat([step.hidden_states for step in steps], dim=1), whole.hidden_states))
    if head.config.confidence:
        agree((torch.cat([step.confidence for step in steps], dim=1), whole.confidence))


@pytest.mark.parametrize("fields", VERSIONS)
@torch.no_grad()
def test_a_batch_equals_its_rows(fields):
    _, head, ids, features = setting(batch=3, **fields)
    whole = head(ids[:, 1:], head.fuse(features))
    for row in range(3):
        agree((head(ids[row : row + 1, 1:], head.fuse(features[row : row + 1])).logits[0], whole.logits[row]))


@pytest.mark.parametrize("fields", VERSIONS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_padding_at_the_left_changes_nothing(fields, attention):
    _, head, ids, features = setting(attention=attention, **fields)
    padding = 3
    alone = head(ids[1:, 1 + padding :], head.fuse(features[1:, padding:]))
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :padding] = 0
    together = head(ids[:, 1:], head.fuse(features), attention_mask=mask)
    agree((together.logits[1, padding:], alone.logits[0]))
    cache = DynamicCache()
    head(ids[:, 1:-1], head.fuse(features)[:, :-1], attention_mask=mask[:, :-1], cache=cache)
    last = head(ids[:, -1:], head.fuse(features)[:, -1:], attention_mask=mask, cache=cache)
    agree((last.logits[:, 0], together.logits[:, -1]))


@pytest.mark.parametrize("fields", [{"version": 1}, {"version": 3}])
@torch.no_grad()
def test_slots_roll_back_and_rows_keep_their_own_lengths(fields):
    """Two rows of different lengths: a draft is written, forgotten, and another one gives what a fresh pass gives."""
    _, head, ids, features = setting(**fields)
    hidden = head.fuse(features)
    stock = DynamicCache()
    head(ids[:, 1:], hidden, cache=stock)
    slots = SlotCache.adopt(stock, 8)
    slots.rewind([LENGTH, LENGTH - 2])
    lengths = torch.tensor(slots.layout.lengths)

    def draft(token: int, depth: int):
        slots.open(depth, 1)
        seen = torch.arange(slots.layout.end)[None] <= (lengths + depth)[:, None]
        additive = torch.zeros(seen.shape, dtype=head.dtype).masked_fill_(~seen, torch.finfo(head.dtype).min)[:, None, None]
        tokens = torch.full((2, 1), token)
        return head(tokens, hidden[:, -1:], additive, position_ids=(lengths + depth)[:, None], cache=slots)

    draft(9, 0)
    draft(11, 1)
    slots.commit([[], []])
    again = draft(5, 0)
    for row, length in enumerate(lengths):
        longer = torch.cat([ids[row : row + 1, 1 : length + 1], torch.tensor([[5]])], dim=1)
        states = torch.cat([hidden[row : row + 1, :length], hidden[row : row + 1, -1:]], dim=1)
        agree((again.logits[row, 0], head(longer, states).logits[0, -1]))


def _norm(values, weight, epsilon=1e-6):
    return weight * values / (values.pow(2).mean(dim=-1, keepdim=True) + epsilon).sqrt()


def _attend(weights, reads, layer, prefix="layers.0.self_attn."):
    """Attention of one query head at a time, without masks or caches."""
    size, ratio = layer.head_dim, layer.num_attention_heads // layer.num_key_value_heads
    angles = torch.arange(len(reads))[:, None] / layer.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2) / size)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def turned(values):
        return values * cos + torch.cat([-values[:, size // 2 :], values[:, : size // 2]], dim=-1) * sin

    heads = []
    for index in range(layer.num_attention_heads):
        own, shared = slice(index * size, (index + 1) * size), slice(index // ratio * size, (index // ratio + 1) * size)
        query = turned(reads @ weights[f"{prefix}q_proj.weight"][own].T)
        key = turned(reads @ weights[f"{prefix}k_proj.weight"][shared].T)
        value = reads @ weights[f"{prefix}v_proj.weight"][shared].T
        scores = (query @ key.T / size**0.5).masked_fill(torch.ones(len(reads), len(reads)).triu(1) > 0, -torch.inf)
        heads.append(scores.softmax(dim=-1) @ value)
    return torch.cat(heads, dim=-1) @ weights[f"{prefix}o_proj.weight"].T


def _mlp(weights, values):
    gate, up, down = (weights[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (silu(values @ gate.T) * (values @ up.T)) @ down.T


@torch.no_grad()
def test_version_3_is_its_formula():
    target, head, ids, features = setting(batch=1, version=3)
    weights, layer = head.state_dict(), head.config.transformer_layer_config
    hidden = features[0] @ weights["fc.weight"].T
    embeddings = target.get_input_embeddings().weight[ids[0, 1:]]
    pair = torch.cat([
        _norm(embeddings, weights["layers.0.input_layernorm.weight"]),
        _norm(hidden, weights["layers.0.hidden_norm.weight"]),
    ], dim=-1)  # fmt: skip
    hidden = hidden + _attend(weights, pair, layer)
    hidden = hidden + _mlp(weights, _norm(hidden, weights["layers.0.post_attention_layernorm.weight"]))
    output = head(ids[:, 1:], head.fuse(features))
    torch.testing.assert_close(output.hidden_states[0], hidden, atol=1e-5, rtol=1e-5)
    logits = _norm(hidden, weights["norm.weight"]) @ weights["lm_head.weight"].T
    torch.testing.assert_close(output.logits[0], logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_version_1_is_its_formula():
    target, head, ids, features = setting(batch=1, version=1, fc_bias=True)
    weights, layer = head.state_dict(), head.config.transformer_layer_config
    embeddings = target.get_input_embeddings().weight[ids[0, 1:]]
    hidden = torch.cat([embeddings, features[0]], dim=-1) @ weights["fc.weight"].T + weights["fc.bias"]
    hidden = hidden + _attend(weights, hidden, layer)
    hidden = hidden + _mlp(weights, _norm(hidden, weights["layers.0.post_attention_layernorm.weight"]))
    output = head(ids[:, 1:], head.fuse(features))
    torch.testing.assert_close(output.hidden_states[0], hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.logits[0], hidden @ target.lm_head.weight.T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["cohere", "gemma2"])
@torch.no_grad()
def test_versions_1_and_2_give_logits_as_the_target_does(family):
    changes = {"logit_scale": 0.25} if family == "cohere" else {"final_logit_softcapping": 3.0}
    target = tiny(family, **changes)
    head = spread(EagleHead.from_target(target, version=1))
    hidden = head(torch.tensor([[3, 4]]), torch.randn(1, 2, 32, dtype=torch.double))
    own = target.lm_head(hidden.hidden_states)
    expected = own * 0.25 if family == "cohere" else torch.tanh(own / 3) * 3
    agree((hidden.logits, expected))
    assert head.config.embedding_multiplier == (1.0 if family == "cohere" else 32**0.5)


def test_a_reduced_vocabulary_scatters_into_the_targets():
    target = tiny()
    head = EagleHead.from_target(target, version=3, draft_tokens=[30, 2, 7])
    assert head.draft_ids.tolist() == [2, 7, 30]
    assert head.t2d.nonzero().flatten().tolist() == [2, 7, 30]
    torch.testing.assert_close(head.lm_head.weight, target.lm_head.weight[[2, 7, 30]])
    scattered = head.scatter(torch.tensor([[1.0, 2.0, 3.0]]))
    assert scattered[0, [2, 7, 30]].tolist() == [1.0, 2.0, 3.0]
    assert int(scattered.isinf().sum()) == 29
    assert head.scatter(torch.zeros(1, 3)).softmax(dim=-1).sum() == 1


@pytest.mark.parametrize(
    ("ids", "message"), [([1, 2], "has 2 tokens"), ([1, 1, 2], "twice"), ([1, 2, 32], "from 1 to 32"), ([-1, 2, 3], "from -1")]
)
def test_a_draft_vocabulary_that_does_not_fit_is_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        vocabulary.check_ids(ids, 3, 32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eagle_version": 4}, "must be one of 1, 2, 3, got 4"),
        ({"draft_vocab_size": 33}, "between 1 and the target's 32, got 33"),
        ({"version": 1, "draft_vocab_size": 8}, "leave out `draft_vocab_size`"),
        ({"version": 1, "norm_output": True}, "has no norm_output"),
        ({"fc_bias": True}, "has no fc_bias"),
        ({"logit_scale": 2.0}, "has no logit_scale"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 1, 0]}, "increasing"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, "must be at most 1"),
        ({"version": 1, "eagle_aux_hidden_state_layer_ids": [1]}, "must be its last, 2"),
        ({"layer_id_convention": "layer_outputs"}, "import_head"),
        ({"transformer_layer_config": {"hidden_size": 16}, "own_embeddings": False}, "own_embeddings"),
        ({"transformer_layer_config": {"model_type": "mamba"}}, "llama, qwen3, got 'mamba'"),
        ({"norm_befor_fc": True}, "Unknown field.*norm_befor_fc"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EagleConfig.from_target(tiny(), **fields)


def test_a_head_without_feature_layers_is_refused():
    with pytest.raises(ValueError, match=r"EagleConfig\.from_target"):
        EagleHead(EagleConfig())


def test_wrong_inputs_are_refused():
    _, head, ids, features = setting(version=3)
    with pytest.raises(ValueError, match=r"layers \[0, 1\], 64 values for each position, got 32"):
        head.fuse(features[..., :32])
    with pytest.raises(ValueError, match="through `fuse` first"):
        head(ids[:, 1:], features)
    with pytest.raises(ValueError, match=r"call `head\.bind\(target\)`"):
        EagleHead(head.config)(ids[:, 1:], torch.zeros(2, LENGTH, 32))


def test_what_is_shared_is_not_the_heads_own():
    target, head, *_ = setting(version=1)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(head.state_dict())
    own, shared = copy.deepcopy(head).embedding_table(), target.get_input_embeddings().weight
    assert own.data_ptr() == shared.data_ptr()
    head(torch.tensor([[3, 4]]), torch.zeros(1, 2, 32, dtype=torch.double)).hidden_states.sum().backward()
    assert shared.grad is None
    assert head.fc.weight.grad is not None
