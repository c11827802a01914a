"""Heads of every published layout are read, weight by weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from specheads.formats import export_head, import_head
from specheads.heads import EagleHead, MedusaHeads
from tests.formats import checkpoints as made
from tests.tiny import tiny

USUAL = [2, made.LAYERS // 2, made.LAYERS - 3]
OUTPUTS = [index - 1 for index in USUAL]


def same(weights, expected):
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) and weights[name].dtype == expected[name].dtype for name in weights)


EAGLE3 = {
    "EAGLE": (made.eagle3(architectures=["LlamaForCausalLM"]), {}),
    "SpecForge": (made.eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": OUTPUTS, "use_aux_hidden_state": True}), {}),
    "AngelSlim": (made.eagle3(architectures=["Eagle3LlamaForCausalLM"], kind="qwen3"), {}),
    "ModelOpt": (
        made.eagle3(
            "layers.0.",
            maps="d2t",
            eagle_config={
                "eagle_aux_hidden_state_layer_ids": OUTPUTS,
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
            },
        ),
        {},
    ),
    "whole vocabulary": (made.eagle3(maps="none"), {}),
    "ids in place of offsets": (made.eagle3(encoding="ids"), {}),
    "ids without a second map": (made.eagle3(maps="d2t", encoding="ids"), {"d2t_encoding": "ids"}),
    "ids that do not tell": (
        made.eagle3(eagle_aux_hidden_state_layer_ids=[0, 3, 6]),
        {"layer_id_convention": "layer_outputs"},
    ),
    "more norms": (made.eagle3(norm_before_residual=True, norm_output=True), {}),
}


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle_3(name, tmp_path):
    (config, weights), options = EAGLE3[name]
    head = import_head(made.save(tmp_path, config, weights), made.target(), **options)
    assert isinstance(head, EagleHead)
    expected = {own.replace("midlayer.", "layers.0."): weight for own, weight in weights.items()}
    if "d2t" in weights:
        offsets = made.DRAFT_IDS - torch.arange(made.D)
        known = torch.zeros(made.V, dtype=torch.bool).index_fill_(0, made.DRAFT_IDS, True)
        expected |= {"d2t": offsets, "t2d": known}
        assert torch.equal(head.draft_ids, made.DRAFT_IDS)
    same(head.state_dict(), expected)
    assert head.config.feature_layers == ([1, 4, 7] if options.get("layer_id_convention") else USUAL)
    layer = head.config.transformer_layer_config
    assert layer.model_type == ("qwen3" if name == "AngelSlim" else "llama")
    assert layer.rope_parameters["rope_theta"] == 500000.0
    assert head.config.norm_output == head.config.norm_before_residual == (name == "more norms")
    features = torch.zeros(1, 2, 3 * made.H, dtype=torch.float16)
    assert head.float()(torch.tensor([[3, 4]]), head.fuse(features.float())).logits.shape == (1, 2, head.config.own_vocab_size)


@pytest.mark.parametrize(("bias", "norms"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("table", ["none", "copy", "own"])
def test_eagle_1_and_2_and_hass(bias, norms, table, tmp_path):
    target = made.target()
    own = target.get_input_embeddings().weight.detach().to(torch.float16)
    tables = {"none": None, "copy": own, "own": own + 1}
    config, weights = made.eagle(bias, tables[table], norms)
    head = import_head(made.save(tmp_path, config, weights, "pytorch_model.bin"), target, version=1)
    assert head.config.eagle_version == 1
    assert (head.config.fc_bias, head.config.add_para_norm, head.config.own_embeddings) == (bias, norms, table == "own")
    if table == "copy":
        del weights["embed_tokens.weight"]
    same(head.state_dict(), weights)
    assert head.config.feature_layers == [made.LAYERS]


def test_an_absent_bias_flag_follows_the_weights(tmp_path):
    config, weights = made.eagle(bias=False)
    del config["bias"]
    assert not import_head(made.save(tmp_path, config, weights), made.target()).config.fc_bias


def test_speculators(tmp_path):
    config, weights = made.speculators()
    head = import_head(made.save(tmp_path, config, weights), made.target())
    same(head.state_dict(), weights)
    assert head.config.norm_before_residual
    assert head.config.own_embeddings
    assert head.config.feature_layers == USUAL


def test_speculators_with_the_number_of_feature_layers(tmp_path):
    config, weights = made.speculators()
    config["transformer_layer_config"]["num_aux_hidden_states"] = len(USUAL)
    assert import_head(made.save(tmp_path, config, weights), made.target()).config.feature_layers == USUAL


def test_speculators_with_the_last_layer_listed(tmp_path):
    config, weights = made.speculators(eagle_aux_hidden_state_layer_ids=[*USUAL, made.LAYERS])
    assert import_head(made.save(tmp_path, config, weights), made.target()).config.feature_layers == USUAL


@pytest.mark.parametrize("bias", [True, False])
def test_eagle_1_of_speculators(bias, tmp_path):
    _, plain = made.eagle(bias)
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    weights = {}
    for name, weight in plain.items():
        prefix = next(prefix for prefix in names if name.startswith(prefix))
        weights[names[prefix] + name.removeprefix(prefix)] = weight
    config, _ = made.speculators(
        speculators_model_type="eagle",
        architectures=["EagleSpeculator", "LlamaDecoderLayer"],
        fusion_bias=bias,
        layernorms=False,
        transformer_layer_architecture="LlamaDecoderLayer",
    )
    for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual"):
        del config[name]
    head = import_head(made.save(tmp_path / "plain", config, weights), made.target())
    same(head.state_dict(), plain)
    with pytest.raises(ValueError, match="layernorms=True"):
        import_head(made.save(tmp_path / "norms", {**config, "layernorms": True}, weights), made.target())
    with pytest.raises(ValueError, match="fusion_bias"):
        import_head(made.save(tmp_path / "bias", {**config, "fusion_bias": not bias}, weights), made.target())


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize(("version", "blocks"), [("1", 1), ("1", 2), ("2", 1)])
def test_medusa(version, blocks, file, prefix, tmp_path):
    target = made.target()
    config, weights = made.medusa(version, blocks=blocks, prefix=prefix)
    config["medusa_num_heads"] = 2  # published configs say so, whatever the weights
    heads = import_head(made.save(tmp_path, config, weights, file), target)
    assert isinstance(heads, MedusaHeads)
    assert (heads.config.num_heads, heads.config.num_hidden_layers, heads.config.medusa_fc_bias) == (3, blocks, True)
    for head in range(3):
        for block in range(blocks):
            for part in ("weight", "bias"):
                own = heads.state_dict()[f"blocks.{head}.layers.{block}.{part}"]
                assert torch.equal(own, weights[f"{prefix}{head}.{block}.linear.{part}"])
        if version == "1":
            assert torch.equal(heads.lm_heads[head].weight, weights[f"{prefix}{head}.{blocks}.weight"])
    if version == "2":
        assert heads.config.original_lm_head
        assert torch.equal(heads.lm_head.weight, target.lm_head.weight.to(torch.float16))


@pytest.mark.parametrize(("version", "scale"), [("1", 1.0), ("2", 0.25)])
def test_only_a_shared_output_layer_is_scaled_as_the_targets(version, scale, tmp_path):
    target = tiny("cohere", vocab_size=made.V, logit_scale=0.25)
    heads = import_head(made.save(tmp_path, *made.medusa(version), "medusa_lm_head.safetensors"), target)
    assert heads.config.logit_scale == scale
    export_head(heads, tmp_path / "out", "medusa" if version == "1" else "medusa-v2")


def test_a_full_medusa_2_checkpoint(tmp_path):
    target = made.target()
    _, weights = made.medusa(prefix="medusa_head.")
    backbone = {name: weight.detach().clone() for name, weight in target.state_dict().items()}
    config = {**target.config.to_dict(), "medusa_num_heads": 3, "medusa_num_layers": 1}
    heads = import_head(made.save(tmp_path / "same", config, {**weights, **backbone}), target)
    assert torch.equal(heads.lm_heads[2].weight, weights["medusa_head.2.1.weight"].to(heads.dtype))
    backbone["model.norm.weight"] += 1
    with pytest.warns(UserWarning, match="fine-tuned target"):
        import_head(made.save(tmp_path / "tuned", config, {**weights, **backbone}), target)


def test_medusa_of_modelopt(tmp_path):
    _, weights = made.medusa(prefix="medusa_heads.")
    config = {"medusa": {"num_medusa_heads": 3, "num_medusa_layers": 1}}
    assert import_head(made.save(tmp_path, config, weights), made.target()).config.num_heads == 3


@pytest.mark.parametrize("fields", [{}, {"bias": False}, {"shared": True}, {"truncated": True}])
def test_medusa_of_vllm(fields, tmp_path):
    config, weights = made.vllm_medusa(**fields)
    heads = import_head(made.save(tmp_path, config, weights), made.target())
    if fields.get("shared"):
        weights["lm_head.weight"] = weights.pop("lm_heads.0.weight")
    same(heads.state_dict(), weights)
    if fields.get("truncated"):
        assert heads.scatter(torch.zeros(made.D)).isfinite().nonzero().flatten().tolist() == made.DRAFT_IDS.tolist()


def test_hydra(tmp_path):
    config, weights = made.hydra()
    heads = import_head(made.save(tmp_path, config, weights, "hydra_lm_head.pt"), made.target())
    assert heads.config.dependence == "hydra"
    assert torch.equal(heads.blocks[1].residual.weight, weights["hydra_mlp.1.0.res_connection.weight"])
    assert torch.equal(heads.blocks[1].layers[1].weight, weights["hydra_mlp.1.1.linear.weight"])
    assert torch.equal(heads.lm_heads[0].bias, weights["hydra_lm_head.0.bias"])


ROUND_TRIPS = {
    "eagle": (lambda table: made.eagle(table=table), "model.safetensors"),
    "eagle3": (lambda _: made.eagle3(norm_before_residual=True), "model.safetensors"),
    "speculators": (lambda _: made.speculators(), "model.safetensors"),
    "medusa": (lambda _: made.medusa(blocks=2), "medusa_lm_head.safetensors"),
    "medusa-v2": (lambda _: made.medusa("2"), "medusa_lm_head.safetensors"),
    "tgi-medusa": (lambda _: made.medusa(), "medusa_lm_head.safetensors"),
    "vllm-medusa": (lambda _: made.vllm_medusa(truncated=True), "model.safetensors"),
    "hydra": (lambda _: made.hydra(), "hydra_lm_head.safetensors"),
}


@pytest.mark.filterwarnings("ignore:vLLM leaves the bias")
@pytest.mark.parametrize("format", ROUND_TRIPS)
def test_what_goes_in_comes_out_bit_by_bit(format, tmp_path):
    target = made.target()
    make, file = ROUND_TRIPS[format]
    config, weights = make(target.get_input_embeddings().weight.detach().to(torch.float16))
    head = import_head(made.save(tmp_path / "in", config, weights, file), target)
    export_head(head, tmp_path / "out", format)
    same(load_file(tmp_path / "out" / file), weights)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written - {"README.md"} == {"config.json", file}
    again = import_head(tmp_path / "out", target)
    same(again.state_dict(), head.state_dict())
    passing = {"_name_or_path": None}
    assert {**again.config.to_dict(), **passing} == {**head.config.to_dict(), **passing}


@pytest.mark.parametrize("format", ["eagle3", "speculators"])
def test_heads_of_other_sizes_and_rotary_types_come_back(format, tmp_path):
    target = made.target()
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    layer = {"hidden_size": 16, "rope_parameters": rope}
    head = EagleHead.from_target(target, draft_tokens=made.DRAFT_IDS, transformer_layer_config=layer, fc_norm=True)
    export_head(head, tmp_path, format)
    again = import_head(tmp_path, target)
    same(again.state_dict(), head.state_dict())
    assert again.config.target_hidden_size == made.H
    assert again.config.transformer_layer_config.rope_parameters == rope


@pytest.mark.parametrize(("ids", "written"), [(USUAL, None), ([2, 3, 7], [1, 2, 6]), ([0, 3, 6], [0, 3, 6])])
def test_layer_ids_are_written_so_that_sglang_reads_them(ids, written, tmp_path):
    target = made.target()
    head = EagleHead.from_target(target, eagle_aux_hidden_state_layer_ids=ids)
    export_head(head, tmp_path, "eagle3")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_config"].get("eagle_aux_hidden_state_layer_ids") == written
    assert import_head(tmp_path, target).config.feature_layers == ids


def test_a_scaled_embedding_is_folded_where_the_layout_has_no_place_for_it(tmp_path):
    target = made.target()
    head = EagleHead.from_target(target, version=1, embedding_multiplier=3.0)
    export_head(head, tmp_path, "eagle")
    again = import_head(tmp_path, target)
    assert again.config.embedding_multiplier == 1.0
    ids, hidden = torch.tensor([[3, 4]]), torch.randn(1, 2, made.H, dtype=torch.double)
    torch.testing.assert_close(again(ids, hidden).logits, head(ids, hidden).logits)


def test_sharded_weights(tmp_path):
    config, weights = made.eagle()
    first = {name: weight for name, weight in weights.items() if "mlp" in name}
    second = {name: weight for name, weight in weights.items() if "mlp" not in name}
    made.save(tmp_path, config, first, "model-00001-of-00002.safetensors")
    made.save(tmp_path, config, second, "model-00002-of-00002.safetensors")
    index = {name: f"model-0000{1 + (name in second)}-of-00002.safetensors" for name in weights}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    same(import_head(tmp_path, made.target()).state_dict(), weights)


def test_saved_by_this_library(tmp_path):
    target = made.target()
    head = EagleHead.from_target(target, draft_tokens=range(6), confidence=True)
    head.save_pretrained(tmp_path)
    again = import_head(tmp_path, target)
    same(again.state_dict(), head.state_dict())
    assert type(AutoModel.from_pretrained(tmp_path)) is EagleHead


@pytest.mark.parametrize(
    ("make", "layout", "words"),
    [
        (lambda target: EagleHead.from_target(target, version=1, fc_bias=True), "eagle", "bias of the fusing layer"),
        (lambda target: MedusaHeads.from_target(target, output_bias=True), "vllm-medusa", "the output biases"),
        (lambda target: MedusaHeads.from_target(target, dependence="hydra"), "vllm-medusa", "the hydra dependence"),
    ],
)
def test_what_vllm_leaves_out_is_said(make: Any, layout: str, words: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=words):
        export_head(make(tiny()), tmp_path / "head", format=layout)
