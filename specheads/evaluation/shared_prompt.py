"""One pass over a prompt for many texts after it.

Shapes: P tokens of a prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from .. import compat


class SharedPrompt:
    """A prompt whose cache many texts begin with. What a target cannot begin with is run anew for each text.

    Args:
        model: The target.
        inputs: The prompt, as a batch of a single row: ids and mask, both `[1, P]`.
    """

    def __init__(self, model: Any, inputs: Mapping[str, Tensor]):
        self.model = model
        self.inputs = dict(inputs)
        self.cache = _cache_of_all_but_the_last(model, inputs)

    def for_texts(self, count: int) -> dict[str, Any]:
        """The arguments of `generate` for that many texts (`num_return_sequences`) after the prompt.

        Args:
            count: How many.
        """
        if self.cache is None:
            return self.inputs
        cache = copy.deepcopy(self.cache)  # `generate` writes into it
        cache.batch_repeat_interleave(count)
        return {**self.inputs, compat.CACHE: cache}


def _cache_of_all_but_the_last(model: Any, inputs: Mapping[str, Tensor]) -> Cache | None:
    """The keys and values of a prompt without its last token; `None` where a state or an encoder goes with them."""
    if model.config.is_encoder_decoder or inputs["input_ids"].shape[1] < 2:
        return None
    cache = compat.new_cache(model)
    if not all(type(layer) is DynamicLayer for layer in getattr(cache, "layers", ())):
        return None
    head = {name: values[:, :-1] for name, values in inputs.items()}
    with torch.no_grad():
        model(**head, use_cache=True, **{compat.cache_name(model): cache})
    return cache
