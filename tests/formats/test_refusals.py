"""Each way in which a checkpoint can be broken has an error that names it."""

from __future__ import annotations

import os

import pytest
import torch

from specheads.formats import export_head, import_head
from specheads.formats.description import describe_head
from specheads.heads import EagleHead, MedusaHeads
from tests.formats import checkpoints as made
from tests.tiny import tiny

USUAL = [2, made.LAYERS // 2, made.LAYERS - 3]
OUTPUTS = [index - 1 for index in USUAL]


def refused(tmp_path, checkpoint, message, file="model.safetensors", target=None, **options):
    folder = made.save(tmp_path, *checkpoint, file)
    with pytest.raises(ValueError, match=message):
        import_head(folder, target or made.target(), **options)


LAYOUTS = {
    "eagle": (made.eagle, "fc.weight", "model.safetensors"),
    "eagle3": (made.eagle3, "lm_head.weight", "model.safetensors"),
    "speculators": (made.speculators, "layers.0.self_attn.k_proj.weight", "model.safetensors"),
    "vllm-medusa": (made.vllm_medusa, "lm_heads.1.weight", "model.safetensors"),
    "hydra": (made.hydra, "hydra_lm_head.1.weight", "hydra_lm_head.safetensors"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fault", ["missing", "unexpected", "transposed"])
def test_weights_that_do_not_fit(layout, fault, tmp_path):
    make, name, file = LAYOUTS[layout]
    config, weights = make()
    own = name.replace("hydra_lm_head", "lm_heads")
    if fault == "missing":
        if layout == "eagle":
            name = own = "layers.0.mlp.up_proj.weight"  # without `fc` it would be another layout
        del weights[name]
        message = f"missing {own}"
    elif fault == "unexpected":
        weights["surplus.weight"] = torch.zeros(2)
        message = r"unexpected surplus\.weight \[2\]"
    else:
        weights[name] = weights[name].T.contiguous()
        message = rf"{own} of shape .* \(transposed\)"
    refused(tmp_path, (config, weights), message, file)


@pytest.mark.parametrize("fault", ["missing", "unexpected", "transposed", "gap"])
def test_medusa_weights_that_do_not_fit(fault, tmp_path):
    config, weights = made.medusa()
    if fault == "missing":
        del weights["1.1.weight"]
        message = r"missing lm_heads\.1\.weight"
    elif fault == "unexpected":
        weights["surplus.weight"] = torch.zeros(2)
        message = r"unexpected surplus\.weight"
    elif fault == "transposed":
        weights["1.1.weight"] = weights["1.1.weight"].T.contiguous()
        message = r"lm_heads\.1\.weight of shape .* \(transposed\)"
    else:
        del weights["1.0.linear.weight"], weights["1.0.linear.bias"]
        message = r"heads \[0, 2\], some are missing"
    refused(tmp_path, (config, weights), message, "medusa_lm_head.safetensors")


@pytest.mark.parametrize("make", [made.eagle, made.eagle3, made.speculators])
def test_a_wrong_vocabulary(make, tmp_path):
    refused(tmp_path, make(), "vocabulary of 40 and the target one of 48", target=_wider())


@pytest.mark.parametrize(
    ("make", "file"), [(made.medusa, "medusa_lm_head.safetensors"), (made.hydra, "hydra_lm_head.safetensors")]
)
def test_a_wrong_vocabulary_of_parallel_heads(make, file, tmp_path):
    refused(tmp_path, make(), r"lm_heads\.0\.weight of shape \[40, 32\], not \[48, 32\]", file, target=_wider())


def test_a_wrong_vocabulary_of_vllms_medusa(tmp_path):
    refused(tmp_path, made.vllm_medusa(), "vocab_size 40, not 48", target=_wider())


def _wider():
    return tiny("llama", vocab_size=48, num_hidden_layers=made.LAYERS)


def test_another_hidden_size(tmp_path):
    target = tiny("llama", vocab_size=made.V, num_hidden_layers=made.LAYERS, hidden_size=64)
    refused(tmp_path, made.eagle3(), "reads hidden states of 32 values and the target has 64", target=target)


def test_d2t_in_the_other_encoding(tmp_path):
    refused(tmp_path, made.eagle3(encoding="ids"), "does not hold offsets .* it holds ids", d2t_encoding="offsets")
    refused(tmp_path, made.eagle3(), "does not hold ids .* it holds offsets", d2t_encoding="ids")


def test_d2t_that_both_encodings_fit(tmp_path):
    config, weights = made.eagle3(maps="d2t")
    weights["d2t"] = torch.arange(0, 3 * made.D, 3)  # as ids: every third token; as offsets: every fourth
    refused(tmp_path, (config, weights), "pass `d2t_encoding='offsets'` or 'ids'")


def test_d2t_that_no_encoding_fits(tmp_path):
    config, weights = made.eagle3()
    weights["t2d"] = weights["t2d"].roll(1)
    refused(tmp_path, (config, weights), "made for another vocabulary, or is damaged")


def test_layer_ids_of_the_other_convention(tmp_path):
    config, weights = made.speculators(eagle_aux_hidden_state_layer_ids=OUTPUTS)
    refused(tmp_path, (config, weights), "usual ones of the convention 'layer_outputs'")
    config, weights = made.eagle3(eagle_aux_hidden_state_layer_ids=USUAL)
    refused(tmp_path, (config, weights), "'hidden_states'.* but 'layer_outputs' was given", layer_id_convention="layer_outputs")


def test_the_last_layers_output_is_no_feature(tmp_path):
    checkpoint = made.speculators(eagle_aux_hidden_state_layer_ids=[2, 4, made.LAYERS])
    refused(tmp_path, checkpoint, "must be at most 7")


def test_layer_ids_that_do_not_tell(tmp_path):
    checkpoint = made.eagle3(eagle_aux_hidden_state_layer_ids=[0, 3, 6])
    refused(tmp_path, checkpoint, "pass `layer_id_convention='hidden_states'`")
    refused(tmp_path, checkpoint, "must be one of hidden_states, layer_outputs, got 'vllm'", layer_id_convention="vllm")


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (made.eagle3(gated_fusion=True), "gated_fusion=True"),
        (made.eagle3(parallel_drafting=True, mask_token_id=3), "mask_token_id=3, parallel_drafting=True"),
        (made.eagle3(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state=False"),
        (made.eagle3(eagle_config={"use_mtp_layernorm": True}), "use_mtp_layernorm=True"),
        (made.eagle3(eagle_config={"residual_gate": 1}), "residual_gate=1"),
        (made.eagle3(parallel_draft_step=4), "parallel_draft_step=4"),
        (made.eagle3(partial_rotary_factor=0.5), "rotate their whole keys"),
        (made.eagle3(sliding_window=64), "sliding window"),
        (made.eagle(), "bias=False for `fc`"),
        (made.speculators(depth_scaling=2), "depth_scaling=2"),
        (made.speculators(speculators_model_type="dflash"), "eagle and eagle3 are read"),
        (made.vllm_medusa(), "medusa_fc_bias=False"),
        (made.hydra(), "grounded_heads=False"),
        (made.hydra(), "hydra_head_arch='prefix-mlp'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_flag_that_changes_the_mathematics(checkpoint, message, tmp_path):
    config, weights = checkpoint
    for name, value in (("medusa_fc_bias", False), ("grounded_heads", False), ("bias", False)):
        if f"{name}={value}" in message:
            config = {**config, name: value}
    if "prefix-mlp" in message:
        config = {**config, "hydra_head_arch": "prefix-mlp"}
    refused(tmp_path, (config, weights), message)


def test_a_layer_flag_of_speculators(tmp_path):
    config, weights = made.speculators()
    config["transformer_layer_config"] = {**config["transformer_layer_config"], "qk_scale": 2.0}
    refused(tmp_path, (config, weights), "qk_scale")
    config, weights = made.speculators()
    config["transformer_layer_config"]["layer_types"] = ["sliding_attention"]
    refused(tmp_path / "sliding", (config, weights), "`layer_types` asks for sliding_attention")


def test_speculators_without_the_residual_flag(tmp_path):
    config, weights = made.speculators()
    del config["norm_before_residual"]
    refused(tmp_path, (config, weights), "engines have different defaults")


class Exploit:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


def test_a_pickle_with_code_in_it(tmp_path):
    trace = tmp_path / "it-ran"
    config, weights = made.eagle()
    made.save(tmp_path, config, {**weights, "surplus": Exploit(trace)}, "pytorch_model.bin")
    with pytest.raises(ValueError, match="could run code, so it is not opened"):
        import_head(tmp_path, made.target())
    assert not trace.exists()


def test_a_pickle_of_something_else(tmp_path):
    config, _ = made.medusa()
    made.save(tmp_path, config, [torch.zeros(1)], "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="something else than weights by name"):
        import_head(tmp_path, made.target())


def test_folders_that_hold_no_head(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        import_head(tmp_path, made.target())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no weights.*looked for medusa_lm_head\.safetensors"):
        import_head(tmp_path, made.target())
    refused(tmp_path, ({}, {"some.weight": torch.zeros(1)}), r"layout of .* is not known: 1 weights, the first some\.weight")


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
def test_damaged_files_are_named(name, text, tmp_path):
    folder = made.save(tmp_path, *made.eagle3())
    if name != "config.json":
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"{name} (is damaged|must hold|has no).*again\.") as refusal:
        import_head(folder, made.target())
    assert str(folder) in str(refusal.value)


def test_an_index_without_a_map_of_weights_is_named(tmp_path):
    folder = made.save(tmp_path, *made.eagle3())
    (folder / "model.safetensors").rename(folder / "model.safetensors.index.json")
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json has no `weight_map`"):
        import_head(folder, made.target())


@pytest.mark.parametrize("name", ["./no/such/dir", "/tmp/none/there", "../none", "~/none", "no/such/dir"])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(name):
    for load in (lambda: import_head(name, made.target()), lambda: describe_head(name)):
        with pytest.raises(FileNotFoundError, match=f"There is no folder {name}"):
            load()


@pytest.mark.parametrize("is_near", [True, False])
def test_before_the_hub_is_asked_a_folder_beside_it_is_a_hint(is_near, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if is_near:
        (tmp_path / "toy" / "head").mkdir(parents=True)
    with pytest.raises(OSError, match="toy/haed"):
        describe_head("toy/haed", local_files_only=True)
    assert ("There is no folder toy/haed here" in caplog.text) == is_near


def test_a_file_is_no_folder(tmp_path):
    folder = made.save(tmp_path, *made.eagle3())
    with pytest.raises(OSError, match=r"config\.json is a file, and a head is a folder"):
        import_head(folder / "config.json", made.target())


def test_options_of_another_layout(tmp_path):
    refused(tmp_path, made.eagle(), "Unknown option.* d2t_encoding for the layout eagle; it has version", d2t_encoding="ids")


def test_a_checkpoint_for_a_model_of_another_name_is_warned_about(tmp_path):
    config, weights = made.medusa()
    folder = made.save(tmp_path, {**config, "base_model_name_or_path": "other/vicuna"}, weights, "medusa_lm_head.safetensors")
    with pytest.warns(UserWarning, match="made for other/vicuna, and the target is someone/model"):
        import_head(folder, made.target())


def _trained(heads):
    with torch.no_grad():
        heads.lm_head.weight += 1
    return heads


@pytest.mark.parametrize(
    ("make", "format", "message"),
    [
        (EagleHead.from_target, "gguf", "Unknown format 'gguf'; known are speculators"),
        (EagleHead.from_target, "medusa", "holds MedusaHeads, got EagleHead"),
        (EagleHead.from_target, "eagle", "no place for a head with version 3"),
        (lambda target: EagleHead.from_target(target, version=1), "eagle3", "this one has version 1"),
        (lambda target: EagleHead.from_target(target, version=1), "speculators", "head is of version 1"),
        (lambda target: EagleHead.from_target(target, confidence=True), "eagle3", "confidence=True"),
        (lambda target: EagleHead.from_target(target, eagle_aux_hidden_state_layer_ids=[1, 3]), "eagle3", "begin with 1"),
        (lambda target: MedusaHeads.from_target(target, medusa_fc_bias=False), "tgi-medusa", "no biases in their blocks"),
        (lambda target: MedusaHeads.from_target(target, draft_tokens=[1]), "medusa", "a vocabulary of their own"),
        (lambda target: MedusaHeads.from_target(target, dependence="hydra"), "medusa", "dependence 'hydra'"),
        (lambda target: MedusaHeads.from_target(target), "medusa-v2", "these heads have their own"),
        (lambda target: _trained(MedusaHeads.from_target(target, original_lm_head=True)), "medusa-v2", "have their own"),
        (lambda target: MedusaHeads.from_target(target, logit_scale=2.0), "medusa", "scaled or bounded logits"),
        (lambda target: MedusaHeads.from_target(target, dependence="hydra", logit_scale=2.0), "hydra", "plain logits"),
        (lambda target: MedusaHeads.from_target(target), "hydra", "with the dependence .hydra."),
    ],
)
def test_what_a_layout_cannot_hold(make, format, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export_head(make(made.target()), tmp_path / "out", format)
    assert not any((tmp_path / "out").glob("*"))
