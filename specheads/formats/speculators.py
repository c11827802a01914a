"""EAGLE in the `speculators` layout, which vLLM serves: what `EagleHead.save_pretrained` writes for EAGLE-3.

Heads of this library are loaded with `EagleHead.from_pretrained`; here are those of others, with fewer or other fields.
Sources: vllm-project/speculators, vLLM's `transformers_utils/configs/speculators`.
"""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from ..heads import EagleHead
from ..heads.layers import FEATURE_COUNT
from ..heads.target_parts import TargetParts, parts_of
from . import eagle, eagle3
from .checkpoint import HARMLESS_FIELDS, Checkpoint
from .eagle3 import FLAGS
from .layer_config import FIELDS, kind_of, layer_config_of
from .layer_ids import feature_layers
from .naming import check_base_name

# How its EAGLE-1 names the weights of the layer and of what fuses its input.
EAGLE_1_NAMES = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
NOTES = ("speculators_version", "speculators_config", "speculators_model_type", "model_type", "embed_requires_grad",
         "has_no_defaults_at_init", "enable_sp_ulysses")  # fmt: skip


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is of this layout, which its config says by name."""
    return checkpoint.config.get("speculators_model_type") is not None


def read(
    checkpoint: Checkpoint, target: PreTrainedModel, layer_id_convention: str | None = None, d2t_encoding: str | None = None
) -> EagleHead:
    """Reads a head.

    Args:
        checkpoint: The checkpoint.
        target: The target that it is for.
        layer_id_convention: `"hidden_states"`, as the layout has it, or `"layer_outputs"` for a file known to deviate.
        d2t_encoding: `"offsets"` or `"ids"`, where `d2t` does not tell.

    Raises:
        ValueError: if the algorithm is another one, the weights are not complete or do not fit the target, or a field is not
            understood.
    """
    algorithm = checkpoint.take("speculators_model_type")
    if algorithm not in ("eagle", "eagle3"):
        raise ValueError(f"Of the speculators layout eagle and eagle3 are read, and {checkpoint.where} holds {algorithm!r}.")
    verifier = (checkpoint.config.get("speculators_config") or {}).get("verifier") or {}
    check_base_name(verifier.get("name_or_path"), target)
    for note in NOTES:
        checkpoint.take(note)
    layer = _read_layer(checkpoint, parts_of(target))
    if algorithm == "eagle":
        return _read_eagle_1(checkpoint, target, layer)
    return _read_eagle_3(checkpoint, target, layer, layer_id_convention, d2t_encoding)


def _read_layer(checkpoint: Checkpoint, parts: TargetParts) -> LlamaConfig | Qwen3Config:
    fields = dict(checkpoint.take("transformer_layer_config") or {})
    # How many feature layers there are, the ids say too.
    known = {*FIELDS, *HARMLESS_FIELDS, FEATURE_COUNT, "model_type"}
    unknown = {name: value for name, value in fields.items() if name not in known and value}
    if unknown:
        raise ValueError(f"`transformer_layer_config` of {checkpoint.where} has fields whose meaning is not known: {unknown}.")
    layer_fields = {name: value for name, value in fields.items() if name in FIELDS}
    return layer_config_of({**layer_fields, "model_type": kind_of(checkpoint)}, parts, checkpoint.where)


def _read_eagle_1(checkpoint: Checkpoint, target: PreTrainedModel, layer: LlamaConfig | Qwen3Config) -> EagleHead:
    if checkpoint.take("layernorms", False):
        raise ValueError(f"The config of {checkpoint.where} asks for layernorms=True, normalisations that heads do not have.")
    checkpoint.take("transformer_layer_architecture")
    stated = checkpoint.take("fusion_bias", False)
    weights = {}
    for name, weight in checkpoint.weights.items():
        prefix = next((prefix for prefix in EAGLE_1_NAMES if name.startswith(prefix)), "")
        weights[EAGLE_1_NAMES.get(prefix, "") + name.removeprefix(prefix)] = weight
    if stated != ("fc.bias" in weights):
        raise ValueError(f"The config of {checkpoint.where} says fusion_bias={stated}, and the weights do not.")
    return eagle.build_head(checkpoint, target, weights, layer, version=1)


def _read_eagle_3(
    checkpoint: Checkpoint,
    target: PreTrainedModel,
    layer: LlamaConfig | Qwen3Config,
    layer_id_convention: str | None,
    d2t_encoding: str | None,
) -> EagleHead:
    if "norm_before_residual" not in checkpoint.config:
        raise ValueError(
            f"The config of {checkpoint.where} does not say `norm_before_residual`, for which engines have different defaults; "
            "add it to config.json."
        )
    return eagle3.build_head(
        checkpoint,
        target,
        dict(checkpoint.weights),
        transformer_layer_config=layer,
        draft_vocab_size=checkpoint.take("draft_vocab_size"),
        eagle_aux_hidden_state_layer_ids=_layers(checkpoint, parts_of(target).layers, layer_id_convention),
        target_hidden_size=checkpoint.take("target_hidden_size"),
        d2t_encoding=d2t_encoding,
        **{name: bool(checkpoint.take(name, False)) for name in FLAGS},
    )


def write(head: EagleHead, folder: Path) -> None:
    """Writes a head with `save_pretrained`.

    Args:
        head: The head, of version 3.
        folder: Where to.

    Raises:
        ValueError: if the head is of another version.
    """
    if head.config.eagle_version != 3:
        raise ValueError(f"Engines read EAGLE-3 in this layout, and the head is of version {head.config.eagle_version}.")
    head.save_pretrained(folder)


def _layers(checkpoint: Checkpoint, layers: int, convention: str | None) -> list[int]:
    """The layout counts as `hidden_states` does; ids that are plainly the other convention's are refused until confirmed."""
    ids = checkpoint.take("eagle_aux_hidden_state_layer_ids")
    stated = convention or checkpoint.take("layer_id_convention") or "hidden_states"
    # Some files list the last layer too, whose hidden state the trainer needs and the head does not read.
    if ids is not None and len(ids) == 4 and ids[-1] == layers:
        ids = ids[:-1]
    return feature_layers(ids, layers, stated, checkpoint.where)
