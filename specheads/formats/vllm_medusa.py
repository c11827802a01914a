"""Medusa as vLLM reads it: what `MedusaHeads.save_pretrained` writes, and what others wrote without this library's fields.

Sources: vLLM's `models/medusa.py` and `transformers_utils/configs/medusa.py`.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from transformers import PreTrainedModel

from ..heads import MedusaConfig, MedusaHeads
from ..heads.provenance import describe_target
from ..heads.target_parts import parts_of
from .checkpoint import Checkpoint, load_exactly

SIZES = ("num_heads", "num_hidden_layers", "hidden_size", "vocab_size", "truncated_vocab_size", "max_paths", "topk")
NOTES = ("model_type", "max_seq_len", "num_lookahead_tokens", "base_model_name_or_path")


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is of this layout: residual blocks under `blocks`."""
    return "blocks.0.layers.0.weight" in checkpoint.weights


def read(checkpoint: Checkpoint, target: PreTrainedModel) -> MedusaHeads:
    """Reads heads.

    Args:
        checkpoint: The checkpoint.
        target: The target that they are for.

    Raises:
        ValueError: if the weights are not complete or do not fit the target, or a field is not understood.
    """
    weights = dict(checkpoint.weights)
    fields = checkpoint.take_all(SIZES)
    shared = bool(checkpoint.take("original_lm_head", False))
    if shared and "lm_heads.0.weight" in weights:
        weights["lm_head.weight"] = weights.pop("lm_heads.0.weight")
    has_bias = "blocks.0.layers.0.bias" in weights
    if checkpoint.take("medusa_fc_bias", False) != has_bias:
        raise ValueError(
            f"The config of {checkpoint.where} says medusa_fc_bias={not has_bias}, and the weights have "
            f"{'biases' if has_bias else 'none'}: engines would leave them out."
        )
    config = MedusaConfig(
        **{**fields, "medusa_fc_bias": has_bias, "original_lm_head": shared},
        logit_scale=checkpoint.take("logit_scale", 1.0),
        hidden_state_layer_ids=[parts_of(target).layers],
    )
    for note in NOTES:
        checkpoint.take(note)
    checkpoint.check_config_read()
    config.check_against(target)
    config.base_model = describe_target(target)
    heads = MedusaHeads.fresh(config, checkpoint.dtype)
    load_exactly(heads, weights, checkpoint.where)
    return heads


def write(heads: MedusaHeads, folder: Path) -> None:
    """Writes heads with `save_pretrained`.

    Args:
        heads: The heads.
        folder: Where to.

    Warns:
        UserWarning: if vLLM leaves out a part of them that the drafts depend on.
    """
    config = heads.config
    parts = {f"the {config.dependence} dependence": config.dependence != "none", "the output biases": config.output_bias}
    left_out = [part for part, there in parts.items() if there]
    if left_out:
        warnings.warn(
            f"vLLM does not know {' and '.join(left_out)} of these heads: it drafts without, or refuses them, and fewer of its "
            "drafts will hold than here.",
            stacklevel=3,
        )
    heads.save_pretrained(folder)
