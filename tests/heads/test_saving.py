"""What is saved is what is loaded, is what engines read, and fits its target or says why not."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from specheads import __version__
from specheads.heads import EagleConfig, EagleHead, MedusaConfig, MedusaHeads
from specheads.heads.provenance import describe_target, tokenizer_fingerprint
from tests.tiny import tiny

HEADS = [
    lambda target: EagleHead.from_target(target, version=1),
    lambda target: EagleHead.from_target(target, version=2, confidence=True, add_para_norm=True, fc_bias=False),
    lambda target: EagleHead.from_target(target, version=3),
    lambda target: EagleHead.from_target(target, version=3, draft_tokens=[3, 5, 9], confidence=True, fc_norm=True),
    lambda target: EagleHead.from_target(target, version=3, own_embeddings=True),
    lambda target: MedusaHeads.from_target(target),
    lambda target: MedusaHeads.from_target(target, original_lm_head=True, draft_tokens=[3, 5, 9], confidence=True),
    lambda target: MedusaHeads.from_target(target, dependence="markov", markov_rank=2),
    lambda target: MedusaHeads.from_target(target, dependence="hydra", num_hidden_layers=2),
]

FILES = ["README.md", "config.json", "model.safetensors"]


class Tokenizer:
    def __init__(self, tokens="abc", template="{{ x }}"):
        self.tokens, self.chat_template = tokens, template

    def get_vocab(self):
        return {token: index for index, token in enumerate(self.tokens)}


def randomised(head):
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


@pytest.mark.parametrize("make", HEADS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_round_trip(make, family, tmp_path):
    target = tiny(family).to(torch.bfloat16)
    head = randomised(make(target))
    head.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "specheads") == FILES
    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is type(head)
    assert loaded.dtype == torch.bfloat16
    assert loaded.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in head.state_dict().items())
    own, again = head.config.to_dict(), loaded.config.to_dict()
    passing = {"dtype": None, "_name_or_path": None}
    assert {**own, **passing} == {**again, **passing} == {**AutoConfig.from_pretrained(tmp_path).to_dict(), **passing}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.bind(target)
    rotary = {name: value for name, value in loaded.named_buffers() if name.endswith("inv_freq")}
    assert all(torch.equal(value, dict(head.named_buffers())[name].to(value)) for name, value in rotary.items())


def test_an_eagle_3_head_is_saved_in_the_speculators_layout(tmp_path):
    target = tiny(tie_word_embeddings=True)
    target.config._name_or_path = "someone/model"
    EagleHead.from_target(target, version=3, draft_tokens=range(8), confidence=True, revision="abc").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["architectures"] == ["Eagle3Speculator"]
    method = config["speculators_config"]["proposal_methods"][0]
    assert method["proposal_type"] == "greedy"
    assert method["speculative_tokens"] > 0
    assert config["speculators_config"]["verifier"] == {"name_or_path": "someone/model", "architectures": ["LlamaForCausalLM"]}
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "llama"
    assert {"hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_parameters"} <= set(layer)
    assert layer["vocab_size"] == 32
    assert config["draft_vocab_size"] == 8
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert layer["num_aux_hidden_states"] == 2  # vLLM takes three where this is not said
    assert {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size"} <= set(config)
    assert config["layer_id_convention"] == "hidden_states"
    assert config["specheads_version"] == __version__
    assert config["base_model"]["revision"] == "abc"
    weights = load_file(tmp_path / "model.safetensors")
    # What vLLM reads, and no name besides: it stops at others.
    assert set(weights) == {
        "d2t", "t2d", "fc.weight", "norm.weight", "lm_head.weight", "layers.0.hidden_norm.weight",
        "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight", "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight", "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight", "layers.0.self_attn.o_proj.weight",
    }  # fmt: skip
    assert weights["d2t"].dtype == torch.int64
    assert weights["t2d"].dtype == torch.bool
    assert set(load_file(tmp_path / "specheads" / "confidence.safetensors")) == {
        "confidence_head.proj.weight", "confidence_head.proj.bias"
    }  # fmt: skip


def test_medusa_heads_are_saved_as_vllm_reads_them(tmp_path):
    MedusaHeads.from_target(tiny(), num_heads=2, draft_tokens=[4, 6]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "medusa"
    assert config["architectures"] == ["MedusaModel"]
    # vLLM takes every key with "num" and "heads", or "layers", for one of these two.
    assert {name for name in config if "num" in name} == {"num_heads", "num_hidden_layers"}
    names = {"num_heads": 2, "num_hidden_layers": 1, "vocab_size": 32, "truncated_vocab_size": 2, "medusa_fc_bias": True}
    assert names.items() <= config.items()
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["token_map"].tolist() == [4, 6]
    assert weights["blocks.1.layers.0.bias"].shape == (32,)
    assert weights["lm_heads.1.weight"].shape == (2, 32)


@pytest.mark.parametrize("make", [HEADS[0], HEADS[3], HEADS[5]])
@pytest.mark.parametrize("fault", ["missing", "unexpected", "misshapen"])
def test_incomplete_weights_are_refused(make, fault, tmp_path):
    head = make(tiny(vocab_size=40))
    head.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = next(name for name, weight in weights.items() if weight.dim() == 2 and weight.shape[0] != weight.shape[1])
    if fault == "missing":
        del weights[name]
    elif fault == "unexpected":
        weights["other.weight"] = torch.zeros(1)
    else:
        weights[name] = weights[name].T.contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{fault} {'other.weight' if fault == 'unexpected' else name}"):
        type(head).from_pretrained(tmp_path)


def test_a_missing_confidence_file_is_refused(tmp_path):
    EagleHead.from_target(tiny(), confidence=True).save_pretrained(tmp_path)
    (tmp_path / "specheads" / "confidence.safetensors").unlink()
    with pytest.raises(ValueError, match=r"missing confidence_head\.proj\.bias"):
        EagleHead.from_pretrained(tmp_path)


def test_a_map_in_the_other_encoding_is_refused(tmp_path):
    head = EagleHead.from_target(tiny(), draft_tokens=[3, 5, 9])
    head.d2t.copy_(head.draft_ids)
    head.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="import_head"):
        EagleHead.from_pretrained(tmp_path)


def test_an_unknown_field_is_refused(tmp_path):
    EagleHead.from_target(tiny()).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "gated_fusion": True}))
    with pytest.raises(ValueError, match="gated_fusion"):
        EagleHead.from_pretrained(tmp_path)


@pytest.mark.parametrize("config_class", [EagleConfig, MedusaConfig])
def test_another_target_is_refused_or_warned_about(config_class):
    target = tiny()
    target.config._name_or_path = "someone/model"
    config = config_class.from_target(target, tokenizer=Tokenizer(), revision="first")
    config.check_against(target, Tokenizer())
    for changes, message in [
        ({"hidden_size": 16}, "hidden_size 32, not 16"),
        ({"vocab_size": 40}, "vocab_size 32, not 40"),
        ({"num_hidden_layers": 3}, "layers 2, not 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            config.check_against(tiny(**changes))
    with pytest.raises(ValueError, match="another vocabulary"):
        config.check_against(target, Tokenizer("abd"))
    with pytest.warns(UserWarning, match="another chat template"):
        config.check_against(target, Tokenizer(template="{{ y }}"))
    other = tiny(seed=1)
    other.config._name_or_path = "someone/tuned"
    with pytest.warns(
        UserWarning, match=r"someone/model \(revision first, weights .*someone/tuned \(revision unknown, weights"
    ):
        config.check_against(other)
    config.base_model["weights_fingerprint"] = None  # without it the revision decides
    with pytest.warns(UserWarning, match=r"someone/model \(revision first.*someone/model \(revision second"):
        config.check_against(target, revision="second")


def test_a_config_without_a_base_model_still_knows_its_shapes():
    config = EagleConfig.from_target(tiny(num_hidden_layers=7))
    config.base_model = None
    with pytest.raises(ValueError, match="vocab_size 32, not 40"):
        config.check_against(tiny(vocab_size=40))
    with pytest.raises(ValueError, match=r"target with 2 layers under the ids \[2, 3, 4\]"):
        config.check_against(tiny())


def test_pushing_comes_after_saving(tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(EagleHead, "push_to_hub", lambda _, name, **arguments: pushed.append((name, arguments)))
    EagleHead.from_target(tiny()).save_pretrained(tmp_path, push_to_hub=True, repo_id="someone/head", token="secret")
    assert pushed == [("someone/head", {"token": "secret"})]
    assert (tmp_path / "model.safetensors").exists()


def test_fingerprints_know_weights_and_not_precision():
    first = describe_target(tiny())["weights_fingerprint"]
    assert describe_target(tiny().float())["weights_fingerprint"] == first
    assert describe_target(tiny().to(torch.bfloat16))["weights_fingerprint"] == first
    assert describe_target(tiny(seed=1))["weights_fingerprint"] != first
    assert tokenizer_fingerprint(Tokenizer("ab")) != tokenizer_fingerprint(Tokenizer("ba"))


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    head = EagleHead.from_target(tiny(), confidence=True)
    head.save_pretrained(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("specheads.heads.base.write_weights", fail)
    with pytest.raises(OSError, match="no space"):
        randomised(head).save_pretrained(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
