"""The config of a head's layer, out of a checkpoint's Llama or Qwen 3 config."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, Qwen3Config

from ..heads.layers import build_layer_config
from ..heads.target_parts import TargetParts
from .checkpoint import Checkpoint

FIELDS = (
    "attention_bias", "attention_dropout", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "partial_rotary_factor", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "use_sliding_window", "vocab_size",
)  # fmt: skip
REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def read_layer_config(checkpoint: Checkpoint, parts: TargetParts) -> LlamaConfig | Qwen3Config:
    """The config of the head's layer.

    Args:
        checkpoint: The checkpoint; the fields count as read.
        parts: The target's parts.

    Raises:
        ValueError: if a field is missing or cannot be served, or the vocabulary is not the target's.
    """
    fields = checkpoint.take_all(FIELDS)
    checkpoint.take("model_type")
    return layer_config_of({**fields, "model_type": kind_of(checkpoint)}, parts, checkpoint.where)


def layer_config_of(fields: dict[str, Any], parts: TargetParts, where: str) -> LlamaConfig | Qwen3Config:
    """The config of the head's layer from its fields; see `read_layer_config`."""
    absent = [name for name in REQUIRED if fields.get(name) is None]
    if absent:
        raise ValueError(f"The config of {where} lacks {', '.join(absent)}.")
    if fields["vocab_size"] != parts.vocab_size:
        raise ValueError(
            f"The head in {where} has a vocabulary of {fields['vocab_size']} and the target one of {parts.vocab_size}: it was "
            "made for another target."
        )
    if fields.get("use_sliding_window") or (fields["model_type"] == "llama" and fields.get("sliding_window")):
        raise ValueError(f"Heads have full attention, but the config of {where} asks for a sliding window.")
    size = fields["hidden_size"] // fields["num_attention_heads"]
    return build_layer_config({"bos_token_id": None, "eos_token_id": None, "head_dim": size, **fields})


def kind_of(checkpoint: Checkpoint) -> str:
    """The kind of layer, which the weights tell: Qwen 3's normalises queries."""
    return "qwen3" if any(name.endswith("self_attn.q_norm.weight") for name in checkpoint.weights) else "llama"
