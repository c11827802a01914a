"""Attention of a few tokens on a long cache, without copying the cache.

Where several query heads share a key-value head, the stock attention repeats keys and values for each of them as soon as there
is a mask, in every layer and pass: a copy that grows with the text. Torch's own attention takes shared heads as they are, on a
CPU by its fast kernel too.

Shapes: B rows, Q query heads, H key-value heads, n tokens, S slots, D head dimension.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

NAME = "sdpa_shared_heads"
STOCK = "sdpa"


def shared_heads_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The stock `sdpa` attention; on a CPU under a mask, with key-value heads shared instead of repeated.

    Args:
        module: The attention layer.
        query: `[B, Q, n, D]`.
        key: `[B, H, S, D]`.
        value: `[B, H, S, D']`.
        attention_mask: `[B, 1, n, S]` or `None`.
        dropout: Probability of dropping a weight.
        scaling: What the scores are multiplied by.
        **kwargs: What else the stock attention takes.

    Returns:
        `[B, n, Q, D']`, and no weights.
    """
    shares = attention_mask is not None and getattr(module, "num_key_value_groups", 1) > 1
    if not shares or query.device.type != "cpu" or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        stock = AttentionInterface()[STOCK]
        return stock(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    mixed = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, shared_heads_attention)
AttentionMaskInterface.register(NAME, AttentionMaskInterface()[STOCK])


def share_heads(model: PreTrainedModel) -> None:
    """Lets a model that attends by `sdpa` share its key-value heads under masks too, on a CPU. The numbers stay as they are."""
    _replace(model, STOCK, NAME)


def repeat_heads(model: PreTrainedModel) -> None:
    """Undoes `share_heads`."""
    _replace(model, NAME, STOCK)


def _replace(model: PreTrainedModel, old: str, new: str) -> None:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
        if shared and shared != heads and getattr(config, "_attn_implementation", None) == old:
            config._attn_implementation = new
