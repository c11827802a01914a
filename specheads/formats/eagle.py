"""EAGLE-1 and 2, and HASS: a Llama config and the weights of one layer.

    embed_tokens.weight                     a copy of the target's, mostly
    fc.{weight,bias}                        reads embedding and hidden state, in this order; the bias is optional
    layers.0.self_attn.*, layers.0.mlp.*    a Llama layer without normalisation at its entry
    layers.0.post_attention_layernorm.weight
    embedding_layernorm.weight, hidden_states_layernorm.weight    HASS, with `add_para_norm`

The output layer is the target's. Sources: SafeAILab/EAGLE's `cnets1.py`, vLLM's `llama_eagle.py`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from ..heads import EagleConfig, EagleHead
from ..heads.layers import layer_fields
from ..heads.provenance import describe_target
from ..heads.saving import write_json, write_weights
from ..heads.target_parts import parts_of
from .checkpoint import Checkpoint, load_exactly
from .layer_config import read_layer_config
from .shared_table import settle_embeddings


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is of this layout: a fusing layer before a layer without normalisation at its entry."""
    names = checkpoint.weights
    return "fc.weight" in names and "layers.0.input_layernorm.weight" not in names and "norm.weight" not in names


def read(checkpoint: Checkpoint, target: PreTrainedModel, version: int = 2) -> EagleHead:
    """Reads a head.

    Args:
        checkpoint: The checkpoint.
        target: The target that it is for.
        version: 1 or 2; the weights are the same.

    Raises:
        ValueError: if the weights are not complete, or do not fit the target.
    """
    layer = read_layer_config(checkpoint, parts_of(target))
    has_bias = "fc.bias" in checkpoint.weights
    if (stated := checkpoint.take("bias", has_bias)) != has_bias:
        raise ValueError(
            f"The config of {checkpoint.where} says bias={stated} for `fc`, and the weights have "
            f"{'one' if has_bias else 'none'}."
        )
    return build_head(checkpoint, target, checkpoint.weights, layer, version)


def build_head(
    checkpoint: Checkpoint,
    target: PreTrainedModel,
    weights: dict[str, Tensor],
    layer: LlamaConfig | Qwen3Config,
    version: int,
) -> EagleHead:
    """A head of version 1 or 2 out of weights under its own names.

    Args:
        checkpoint: Where they come from.
        target: The target.
        weights: The weights.
        layer: The config of the layer.
        version: 1 or 2.

    Raises:
        ValueError: if something is missing, not known, or does not fit.
    """
    parts = parts_of(target)
    weights, own_embeddings = settle_embeddings(weights, parts)
    config = EagleConfig(
        eagle_version=version,
        transformer_layer_config=layer,
        eagle_aux_hidden_state_layer_ids=[parts.layers],
        fc_bias="fc.bias" in weights,
        add_para_norm=bool(checkpoint.take("add_para_norm", False)),
        own_embeddings=own_embeddings,
        logit_scale=checkpoint.take("logit_scale", parts.logit_scale),
        final_logit_softcapping=parts.final_logit_softcapping,
        base_model=describe_target(target),
    )
    checkpoint.check_config_read()
    head = EagleHead.fresh(config, checkpoint.dtype)
    load_exactly(head, weights, checkpoint.where)
    return head


def write(head: EagleHead, folder: Path) -> None:
    """Writes a head of version 1 or 2.

    Args:
        head: The head, bound to its target unless it has its own embedding table: the layout wants the table.
        folder: Where to.

    Raises:
        ValueError: if the head is of version 3, has a confidence output, or is not bound.

    Warns:
        UserWarning: if the head has a bias that vLLM leaves out.
    """
    config = head.config
    if config.eagle_version == 3 or config.confidence:
        what = "a confidence output" if config.confidence else "version 3"
        raise ValueError(f"The layout of EAGLE-1 has no place for a head with {what}.")
    if config.fc_bias:
        warnings.warn(
            "vLLM leaves the bias of the fusing layer out, and then hardly any of its drafts holds; to serve an EAGLE-1 head "
            "there, train it with `fc_bias=False`.",
            stacklevel=3,
        )
    weights = dict(head.state_dict())
    if not config.own_embeddings:
        weights["embed_tokens.weight"] = head.embedding_table().to(head.dtype)
    if config.embedding_multiplier != 1.0:
        # The layout has no multiplier; what reads the embeddings can take it over.
        fused = weights["fc.weight"].clone()
        fused[:, : config.hidden_size] *= config.embedding_multiplier
        weights["fc.weight"] = fused
    write_weights(folder / "model.safetensors", weights)
    fields: dict[str, Any] = layer_fields(config.transformer_layer_config)
    fields |= {"architectures": ["LlamaForCausalLM"], "bias": config.fc_bias, "dtype": str(head.dtype).removeprefix("torch.")}
    if config.add_para_norm:
        fields["add_para_norm"] = True
    if config.logit_scale != 1.0:
        fields["logit_scale"] = config.logit_scale
    write_json(folder / "config.json", fields)
