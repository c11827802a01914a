"""The decoder layers of heads: stock ones of transformers, of the kind that the target's own are.

Shapes: B rows, N positions, S positions seen, h the head's hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from .. import compat
from ..families import ROPE_BY_LENGTH
from .target_parts import HEAD_SIZE, INTERMEDIATE_SIZE, NORM_EPSILON, TargetParts, first_of, normalises_queries

# The kinds of layer that serving engines have for heads. Qwen 3's normalises queries and keys head by head.
KINDS: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaDecoderLayer),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer),
}
# What a file says of the number of feature layers; the config of the head itself has it otherwise.
FEATURE_COUNT = "num_aux_hidden_states"
# Both kinds have the same normalisation and the same rotary positions.
RMSNorm = LlamaRMSNorm
RotaryEmbedding = LlamaRotaryEmbedding


def layer_config_from(target: PreTrainedModel, parts: TargetParts, **changes: Any) -> LlamaConfig | Qwen3Config:
    """The config of a head's layers that fit a target: its sizes, its rotary positions, its normalisation of queries.

    Args:
        target: The target.
        parts: What `parts_of` finds in it.
        changes: Fields to set otherwise.

    Raises:
        ValueError: if the target's rotary positions depend on the length of the text.
    """
    config = parts.config
    heads = first_of(config, ("num_attention_heads",))
    # A target without attention says nothing of its heads.
    head_size = first_of(config, HEAD_SIZE, parts.hidden_size // heads) if heads else min(64, parts.hidden_size)
    heads = heads or max(1, parts.hidden_size // head_size)
    kind = "qwen3" if normalises_queries(target, head_size) else "llama"
    fields = {
        "vocab_size": parts.vocab_size,
        "hidden_size": parts.hidden_size,
        "intermediate_size": first_of(config, INTERMEDIATE_SIZE, 4 * parts.hidden_size),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": first_of(config, ("num_key_value_heads",), heads),
        "head_dim": head_size,
        "max_position_embeddings": first_of(config, ("max_position_embeddings", "n_positions"), 2048),
        "rms_norm_eps": first_of(config, NORM_EPSILON, 1e-6),
        "rope_parameters": _rope_parameters(config),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return build_layer_config({"model_type": kind, **fields, **changes})


def build_layer_config(fields: dict[str, Any]) -> LlamaConfig | Qwen3Config:
    """Builds the config of a head's layers from its fields, `model_type` among them.

    Raises:
        ValueError: if the kind of layer is not known.
    """
    kind = fields.get("model_type", "llama")
    if kind not in KINDS:
        raise ValueError(f"Heads have layers of the kinds {', '.join(KINDS)}, got {kind!r}.")
    # Files have the rotary positions under their old names too, for older engines.
    mirrored = ("rope_theta", "rope_scaling") if fields.get("rope_parameters") else ()
    absent = {name for name, value in fields.items() if value is None}
    left_out = {"model_type", "transformers_version", FEATURE_COUNT, *mirrored, *absent}
    left_out -= {"bos_token_id", "eos_token_id"}
    config = KINDS[kind][0](**{name: value for name, value in fields.items() if name not in left_out})
    _refuse_other_attention(config)
    return config


def layer_fields(config: LlamaConfig | Qwen3Config) -> dict[str, Any]:
    """The fields of a layer config as engines read them: written out, rotary positions under their old names too."""
    fields = {name: value for name, value in config.to_diff_dict().items() if name != "transformers_version"}
    rope = dict(config.rope_parameters)
    fields["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = rope
    return fields


def build_layers(config: LlamaConfig | Qwen3Config, reads_pairs: bool, norm_before_residual: bool) -> nn.ModuleList:
    """A head's layers.

    Args:
        config: Their config.
        reads_pairs: Whether the first one reads an embedding beside the hidden state (EAGLE-3); else it reads what was fused
            before it, without a normalisation at its entry (EAGLE-1).
        norm_before_residual: Whether that first layer's residual stream starts from the normalised hidden state.
    """
    stock = KINDS[config.model_type][1]
    layers = [stock(config, index) for index in range(config.num_hidden_layers)]
    if reads_pairs:
        layers[0] = PairLayer(layers[0], config, norm_before_residual)
    else:
        layers[0].input_layernorm = nn.Identity()
    return nn.ModuleList(layers)


class PairLayer(nn.Module):
    """A stock layer whose attention reads a token's embedding beside the hidden state before it (Li et al. 2025, EAGLE-3).

    Args:
        stock: The layer; its attention is widened.
        config: Its config.
        norm_before_residual: Whether the residual stream starts from the normalised hidden state.
    """

    def __init__(self, stock: Any, config: LlamaConfig | Qwen3Config, norm_before_residual: bool):
        super().__init__()
        self.self_attn, self.mlp = stock.self_attn, stock.mlp
        self.input_layernorm, self.post_attention_layernorm = stock.input_layernorm, stock.post_attention_layernorm
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)

    def forward(self, embeddings: Tensor, hidden: Tensor, **arguments: Any) -> Tensor:
        """Runs the layer.

        Args:
            embeddings: `[B, N, h]` of the tokens.
            hidden: `[B, N, h]` the hidden states before them.
            arguments: What stock attention takes: mask, positions, cache.

        Returns:
            `[B, N, h]`.
        """
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        attended, _ = self.self_attn(hidden_states=self._pairs(embeddings, normed), **arguments)
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def attention_input(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """What its attention reads `[B, N, 2 h]`."""
        return self._pairs(embeddings, self.hidden_norm(hidden))

    def _pairs(self, embeddings: Tensor, normed: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embeddings), normed], dim=-1)


def attention_input(layer: Any, *inputs: Tensor) -> Tensor:
    """What the attention of a layer of either kind reads, given what the layer reads."""
    return layer.attention_input(*inputs) if isinstance(layer, PairLayer) else layer.input_layernorm(*inputs)


def store_keys(attention: Any, read: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: Cache) -> None:
    """Writes keys and values as a stock attention does that computes its outputs too.

    Args:
        attention: The attention.
        read: `[B, N, ...]` what it reads.
        position_embeddings: Cosines and sines of the positions.
        cache: Where to.
    """
    shape = (*read.shape[:-1], -1, attention.head_dim)
    keys, values = attention.k_proj(read).view(shape), attention.v_proj(read).view(shape).transpose(1, 2)
    if hasattr(attention, "k_norm"):
        keys = attention.k_norm(keys)
    keys = keys.transpose(1, 2)
    _, keys = apply_rotary_pos_emb(keys[:, :0], keys, *position_embeddings)
    cache.update(keys, values, attention.layer_idx)


def attention_arguments(
    rotary: nn.Module, hidden: Tensor, mask: Tensor | None, positions: Tensor | None, cache: Cache | None
) -> dict[str, Any]:
    """What every stock layer of a pass takes.

    Args:
        rotary: The head's rotary positions.
        hidden: `[B, N, h]`, for its shape and precision.
        mask: `[B, S]` 1 for tokens and 0 for padding, or additive `[B, 1, N, S]`; `None` if nothing is padded.
        positions: `[B, N]`, or `None` to count them.
        cache: What was seen before, or `None`.
    """
    size = hidden.shape[1]
    seen = cache.get_seq_length() if cache is not None else 0
    if positions is None:
        positions = _counted_positions(mask, seen, size, hidden.device).expand(hidden.shape[0], -1)
    if mask is None or mask.dim() == 2:
        mask = causal_mask(mask, seen, size, hidden)
    return {
        "attention_mask": mask,
        "position_ids": positions,
        "position_embeddings": rotary(hidden, positions),
        compat.CACHE: cache,
        "use_cache": cache is not None,
    }


def causal_mask(padding: Tensor | None, seen: int, size: int, like: Tensor) -> Tensor | None:
    """The additive mask `[B or 1, 1, N, S]` under which each position sees itself and those before it.

    Args:
        padding: `[B, S]` 1 for tokens and 0 for padding, or `None`.
        seen: How many positions the cache holds.
        size: N.
        like: For device and precision.

    Returns:
        The mask, `None` where it would hide nothing.
    """
    if padding is None and size == 1:
        return None
    order = torch.arange(seen + size, device=like.device)
    allowed = (order[None, :] <= order[seen:, None])[None]
    if padding is not None:
        # Padding sees itself: where nothing is seen, attention is not a number, and spreads.
        allowed = (allowed & padding[:, None].bool()) | (order[None, :] == order[seen:, None])
    mask = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~allowed, torch.finfo(like.dtype).min)[:, None]


def _counted_positions(mask: Tensor | None, seen: int, size: int, device: torch.device) -> Tensor:
    if mask is not None and mask.dim() == 2:
        return (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -size:]
    return torch.arange(seen, seen + size, device=device)[None]


def _refuse_other_attention(config: Any) -> None:
    """Refuses settings under which stock full attention would compute something else than the head's maker meant."""
    kinds = getattr(config, "layer_types", None) or []
    if any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"Heads have full attention, but `layer_types` asks for {', '.join(map(str, kinds))}.")
    factor = (config.rope_parameters or {}).get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if factor not in (None, 1, 1.0):
        raise ValueError(f"Heads rotate their whole keys, but `partial_rotary_factor` is {factor}.")


def _rope_parameters(config: Any) -> dict[str, Any] | None:
    """The target's rotary positions; those of its layers with full attention where it has several."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    if parameters.get("rope_type") in ROPE_BY_LENGTH:
        raise ValueError(
            f"The target's rotary positions are of type {parameters['rope_type']!r}, which depends on the length of the text; "
            "heads for such targets are not supported."
        )
    # A head rotates its whole keys, also where the target rotates a part of them only.
    return {name: value for name, value in parameters.items() if name != "partial_rotary_factor"} or None
