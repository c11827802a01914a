"""A stock model's forward for the passes after the prompt's: what it takes under which name.

Shapes: B rows, n tokens of a pass, P columns of the prompt, S columns seen.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from . import compat
from .signature import forward_takes


def column_mask(hidden: Tensor | None, columns: int) -> Tensor | None:
    """A stock attention mask `[B, S]` of ones, and zeros for the hidden columns `[B, P]`; `None` if there are none."""
    if hidden is None:
        return None
    return nn.functional.pad(~hidden, (0, columns - hidden.shape[1]), value=True).long()


class StockForward:
    """Calls a stock model for a pass after the prompt's.

    Args:
        model: The model.
        cache: Its cache.
        inputs: What every pass needs besides.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, inputs: dict[str, Any]):
        self.model = model
        self.always = {compat.cache_name(model): cache, "use_cache": True, "return_dict": True, **inputs}
        prefix = "decoder_" if model.config.is_encoder_decoder else ""
        self.ids, self.mask, self.positions = (f"{prefix}{name}" for name in ("input_ids", "attention_mask", "position_ids"))
        self.takes_positions = forward_takes(model, self.positions)

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Any) -> Any:
        """The model's outputs for tokens `[B, n]` at some positions `[..., B, n]`."""
        arguments = {**self.always, self.ids: tokens}
        if self.takes_positions:
            arguments[self.positions] = positions
        if mask is not None:
            arguments[self.mask] = mask
        return self.model(**arguments)
