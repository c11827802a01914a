"""EAGLE-3 as EAGLE's code, SpecForge, AngelSlim and ModelOpt save it, and as SGLang serves it.

    fc.weight                                   reads the hidden states of the feature layers
    midlayer.* (ModelOpt: layers.0.*)           a layer whose attention reads embedding and hidden state
    norm.weight, lm_head.weight                 the head's own, over the draft vocabulary
    d2t, t2d                                    the draft vocabulary; absent where it is the target's, `t2d` also elsewhere
    embed_tokens.weight                         optional

Sources: SafeAILab/EAGLE's `cnets.py`, sgl-project/SpecForge, vLLM's `llama_eagle3.py`, ModelOpt's Eagle exporter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..heads import EagleConfig, EagleHead
from ..heads.layers import layer_fields
from ..heads.provenance import describe_target
from ..heads.saving import write_json, write_weights
from ..heads.target_parts import TargetParts, parts_of
from .checkpoint import Checkpoint, load_exactly
from .layer_config import read_layer_config
from .layer_ids import engine_layer_ids, feature_layers
from .shared_table import settle_embeddings
from .vocabulary_maps import read_maps

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Settings under which ModelOpt's heads are the ones built here, and SpecForge's and SGLang's fields that change nothing.
PLAIN_SETTINGS: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True, None),
    "use_input_layernorm_in_first_layer": (True, None),
    "use_last_layernorm": (True, None),
    "use_mtp_layernorm": (False, None),
    "next_layer_regular": (True, None),
    "parallel_draft_step": (1, None),
    "parallel_draft_heads_num_layers": (0, 1, None),
    "num_aux_hidden_states": (3, None),
}
NOTES = ("layer_id_convention", "specheads_version", "base_model_name_or_path")


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is of this layout: its layer normalises embedding and hidden state separately."""
    names = checkpoint.weights
    return "speculators_model_type" not in checkpoint.config and any(
        f"{prefix}hidden_norm.weight" in names for prefix in ("midlayer.", "layers.0.")
    )


def read(
    checkpoint: Checkpoint, target: PreTrainedModel, layer_id_convention: str | None = None, d2t_encoding: str | None = None
) -> EagleHead:
    """Reads a head.

    Args:
        checkpoint: The checkpoint.
        target: The target that it is for.
        layer_id_convention: `"hidden_states"` or `"layer_outputs"`, where the ids do not tell.
        d2t_encoding: `"offsets"` or `"ids"`, where `d2t` does not tell.

    Raises:
        ValueError: if the weights are not complete, do not fit the target, or a field or id is not understood.
    """
    parts = parts_of(target)
    layer = read_layer_config(checkpoint, parts)
    settings = _read_settings(checkpoint)
    flags = {name: bool(settings.get(name, checkpoint.take(name, False))) for name in FLAGS}
    ids = settings.get("eagle_aux_hidden_state_layer_ids", checkpoint.take("eagle_aux_hidden_state_layer_ids"))
    convention = layer_id_convention or checkpoint.take("layer_id_convention")
    weights = {_own_name(name): weight for name, weight in checkpoint.weights.items()}
    return build_head(
        checkpoint,
        target,
        weights,
        transformer_layer_config=layer,
        draft_vocab_size=checkpoint.take("draft_vocab_size"),
        eagle_aux_hidden_state_layer_ids=feature_layers(ids, parts.layers, convention, checkpoint.where),
        target_hidden_size=checkpoint.take("target_hidden_size"),
        d2t_encoding=d2t_encoding,
        **flags,
    )


def build_head(
    checkpoint: Checkpoint, target: PreTrainedModel, weights: dict[str, Tensor], d2t_encoding: str | None = None, **fields: Any
) -> EagleHead:
    """A head of version 3 out of weights under its own names.

    Args:
        checkpoint: Where they come from; its config must have been read by now.
        target: The target.
        weights: The weights, both maps among them.
        d2t_encoding: `"offsets"` or `"ids"`, where `d2t` does not tell.
        fields: Fields of the config.

    Raises:
        ValueError: if something is missing, not known, or does not fit.
    """
    parts = parts_of(target)
    weights = _settle_maps(weights, parts, d2t_encoding, checkpoint.where)
    weights, own_embeddings = settle_embeddings(weights, parts)
    if fields.get("draft_vocab_size") is None:
        fields["draft_vocab_size"] = len(weights["d2t"]) if "d2t" in weights else parts.vocab_size
    _check_target_size(fields, parts, checkpoint.where)
    config = EagleConfig(eagle_version=3, own_embeddings=own_embeddings, base_model=describe_target(target), **fields)
    for note in NOTES:
        checkpoint.take(note)
    checkpoint.check_config_read()
    head = EagleHead.fresh(config, checkpoint.dtype)
    load_exactly(head, weights, checkpoint.where)
    head.check_loaded()
    return head


def write(head: EagleHead, folder: Path) -> None:
    """Writes a head of version 3 as SGLang and EAGLE's code read it.

    Args:
        head: The head, with one layer.
        folder: Where to.

    Raises:
        ValueError: if the layout cannot hold the head, or SGLang would take its feature layers for others.
    """
    config = head.config
    if config.eagle_version != 3 or config.confidence or config.transformer_layer_config.num_hidden_layers != 1:
        raise ValueError(
            "The layout of EAGLE-3 holds heads of version 3 with one layer and without a confidence output; this one has "
            f"version {config.eagle_version}, {config.transformer_layer_config.num_hidden_layers} layer(s) and "
            f"confidence={config.confidence}."
        )
    weights = {name.replace("layers.0.", "midlayer.", 1): weight for name, weight in head.state_dict().items()}
    write_weights(folder / "model.safetensors", weights)
    fields: dict[str, Any] = layer_fields(config.transformer_layer_config)
    fields |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_config": {"use_aux_hidden_state": True},
        "dtype": str(head.dtype).removeprefix("torch."),
    }
    if (named := engine_layer_ids(config.feature_layers, (config.base_model or {}).get("layers"))) is not None:
        fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"], fields["layer_id_convention"] = named
    if config.target_hidden_size is not None:
        fields["target_hidden_size"] = config.target_hidden_size
    fields |= {name: True for name in FLAGS if getattr(config, name)}
    write_json(folder / "config.json", fields)


def _read_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """`eagle_config`, whose settings must be known ones."""
    settings = checkpoint.take("eagle_config") or {}
    known = {*PLAIN_SETTINGS, *FLAGS, "eagle_aux_hidden_state_layer_ids"}
    given = {**{name: checkpoint.config[name] for name in PLAIN_SETTINGS if name in checkpoint.config}, **settings}
    checkpoint.read |= set(PLAIN_SETTINGS)
    odd = [
        f"{name}={value!r}"
        for name, value in given.items()
        if name not in known or (name in PLAIN_SETTINGS and value not in PLAIN_SETTINGS[name])
    ]
    if odd:
        raise ValueError(f"The config of {checkpoint.where} asks for what heads do not do: {', '.join(odd)}.")
    return settings


def _settle_maps(weights: dict[str, Tensor], parts: TargetParts, encoding: str | None, where: str) -> dict[str, Tensor]:
    """The weights with both maps as a head holds them; without them where the draft vocabulary is the target's."""
    rest = {name: weight for name, weight in weights.items() if name not in ("d2t", "t2d")}
    if "d2t" not in weights:
        return rest
    d2t, t2d = read_maps(weights["d2t"], weights.get("t2d"), parts.vocab_size, encoding, where)
    if len(d2t) == parts.vocab_size:
        if d2t.any():
            raise ValueError(f"`d2t` of {where} reorders the target's whole vocabulary, which heads do not.")
        return rest
    return {**rest, "d2t": d2t, "t2d": t2d}


def _check_target_size(fields: dict[str, Any], parts: TargetParts, where: str) -> None:
    size = fields.get("target_hidden_size") or fields["transformer_layer_config"].hidden_size
    if size != parts.hidden_size:
        raise ValueError(
            f"The head in {where} reads hidden states of {size} values and the target has {parts.hidden_size}: it was made for "
            "another target."
        )
    if size == fields["transformer_layer_config"].hidden_size:
        fields["target_hidden_size"] = None


def _own_name(name: str) -> str:
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name
