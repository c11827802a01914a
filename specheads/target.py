"""A model with its cache behind one call: forward some nodes, keep a path, forget the rest.

Stock modelling code runs unchanged. Where a family takes a 4-D mask and explicit positions, a pass holds any tree for rows of
any lengths; where it derives positions from the cache, rows go in step and drafts are chains.

Shapes: B rows, n tokens of a pass, m tokens of a round so far, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache, PreTrainedModel

from . import compat
from .cache import SlotCache


@dataclass(frozen=True)
class Family:
    """What a model type's stock forward accepts.

    Args:
        takes_trees: A 4-D mask and explicit positions: trees, and rows of different lengths. Else chains, rows in step.
        masks_by_layer_type: The mask is a dict by layer type.
        has_position_table: Positions are looked up, and there are none beyond `max_position_embeddings`.
    """

    takes_trees: bool = True
    masks_by_layer_type: bool = False
    has_position_table: bool = False


# A family is listed once the tests prove it, and the tests go through this list.
FAMILIES: dict[str, Family] = {
    "cohere": Family(),
    "cohere2": Family(masks_by_layer_type=True),
    "exaone4": Family(masks_by_layer_type=True),
    "falcon": Family(),
    "gemma": Family(),
    "gemma2": Family(masks_by_layer_type=True),
    "gemma3_text": Family(masks_by_layer_type=True),
    "glm": Family(),
    "glm4": Family(),
    "gpt2": Family(has_position_table=True),
    "gpt_neox": Family(),
    "gptj": Family(has_position_table=True),
    "granite": Family(),
    "helium": Family(),
    "llama": Family(),
    "ministral": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "nemotron": Family(),
    "olmo2": Family(),
    "olmo3": Family(masks_by_layer_type=True),
    "opt": Family(has_position_table=True),
    "phi": Family(),
    "phi3": Family(),
    "qwen2": Family(masks_by_layer_type=True),
    "qwen3": Family(masks_by_layer_type=True),
    "qwen3_moe": Family(),
    "smollm3": Family(),
    "stablelm": Family(),
    "starcoder2": Family(),
    "t5": Family(takes_trees=False),
}

ATTENTION = ("sdpa", "eager")
# Their frequencies follow the largest position of a pass, so that a drafted token would turn those before it.
ROPE_BY_LENGTH = ("dynamic", "longrope")


def family_of(model: PreTrainedModel) -> Family:
    """The family of a model.

    Raises:
        ValueError: if the family, or the attention implementation, is not among the proven ones.
    """
    name = model.config.model_type
    if name not in FAMILIES:
        raise ValueError(
            f"Speculative generation is not proven for the model type {name!r}, so it is refused; "
            f"proven are {', '.join(FAMILIES)}. Call `generate` without `speculative`."
        )
    attention = model.config._attn_implementation
    if attention not in ATTENTION:
        raise ValueError(
            f"Speculative generation needs attention that takes a mask, {' or '.join(ATTENTION)}, but the model was loaded "
            f"with {attention!r}; load it with `attn_implementation='sdpa'`."
        )
    _check_rope(model.config)
    if getattr(model.config, "alibi", False):
        raise ValueError(
            "The model's attention is biased by distance (ALiBi), which a mask for drafts does not carry yet, so speculative "
            "generation is refused."
        )
    return FAMILIES[name]


def _check_rope(config: Any) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in [parameters, *by_layer_type]:
        if rope.get("rope_type") in ROPE_BY_LENGTH:
            raise ValueError(
                f"The model's rotary positions are of type {rope['rope_type']!r}, which depends on the longest position of a "
                "pass: drafts would change what comes before them, so speculative generation is refused."
            )


def position_limit(model: PreTrainedModel) -> int | None:
    """How many positions a model has; `None` if they do not end."""
    return model.config.max_position_embeddings if family_of(model).has_position_table else None


class ModelRunner:
    """A model and the cache of one call.

    A round begins with `extend`, perhaps several times, each adding tokens behind what the rows have committed, and ends with
    `commit`, which keeps a path of them.

    Args:
        model: The model.
        cache: What the stock pass over the prompt left in its cache; taken over.
        mask: `[B, P]` the prompt's attention mask, `None` without padding.
        tokens: How many more slots a row may need.
        inputs: What else every pass needs: for an encoder-decoder the encoder's outputs and mask, one line per row.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, mask: Tensor | None, tokens: int, inputs: dict[str, Any]):
        self.model = model
        self.family = family_of(model)
        self.inputs = inputs
        self.is_encoder_decoder = bool(model.config.is_encoder_decoder)
        if isinstance(cache, EncoderDecoderCache):
            self.slots = SlotCache.adopt(cache.self_attention_cache, mask, tokens)
            self.cache: Cache = EncoderDecoderCache(self.slots, cache.cross_attention_cache)
        else:
            self.slots = SlotCache.adopt(cache, mask, tokens)
            self.cache = self.slots
        self.written = 0
        self.round_depths = torch.empty(0)

    @property
    def lengths(self) -> list[int]:
        """Per row, how many tokens are committed to the cache."""
        return self.slots.layout.lengths

    def extend(self, tokens: Tensor, depths: Tensor, visible: Tensor) -> Tensor:
        """One pass over some tokens behind what is committed.

        Args:
            tokens: `[B, n]`.
            depths: `[B, n]` position of each token, counted from the row's committed length.
            visible: `[B, n, m]` bool: which of the round's tokens, these n last, each token attends to.

        Returns:
            `[B, n, V]` logits.
        """
        device = self.slots.layout.device
        tokens, depths, visible = tokens.to(device), depths.to(device), visible.to(device)
        self.slots.open(self.written, tokens.shape[1])
        self.round_depths = torch.cat([self.round_depths, depths], dim=1) if self.written else depths
        self.written += tokens.shape[1]
        arguments: dict[str, Any] = {compat.CACHE: self.cache, "use_cache": True, "return_dict": True, **self.inputs}
        if self.is_encoder_decoder:
            arguments["decoder_input_ids"] = tokens
        else:
            arguments["input_ids"] = tokens
            arguments["position_ids"] = self.slots.layout.length_tensor[:, None] + depths
            arguments["attention_mask"] = self._masks(depths, visible)
        return self.model(**arguments).logits

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Ends the round.

        Args:
            kept: Per row, which of the round's tokens stay, in order, as indices into what `extend` was given since the last
                commit.
        """
        self.slots.commit(kept)
        self.written = 0

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forgets the ends of rows, down to the given lengths."""
        self.slots.rewind(lengths)

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Keeps some rows: `kept[i]` becomes row i."""
        self.slots.keep_rows(kept)
        if self.is_encoder_decoder:
            index = torch.tensor(kept, device=self.slots.layout.device)
            self.cache.cross_attention_cache.batch_select_indices(index)
            self.inputs = {name: _select(value, index) for name, value in self.inputs.items()}

    def _masks(self, depths: Tensor, visible: Tensor) -> Any:
        """The additive mask `[B, 1, n, S]`, one per kind of layer where the family wants that; `None` if all is visible."""
        layout = self.slots.layout
        if depths.shape[1] == 1 and layout.is_uniform and self.written == 1:
            # A single token per row behind rows of one length sees every slot, and the stock code takes its fastest way.
            return None
        windows = {layer.window for layer in self.slots.slot_layers}
        masks = {window: self._mask(window, depths, visible) for window in windows}
        if not self.family.masks_by_layer_type:
            (mask,) = masks.values()
            return mask
        return {"sliding_attention" if window else "full_attention": mask for window, mask in masks.items()}

    def _mask(self, window: int | None, depths: Tensor, visible: Tensor) -> Tensor:
        layout = self.slots.layout
        lengths = layout.length_tensor[:, None]
        slots = torch.arange(layout.first(window), layout.end, device=depths.device)
        order = slots - lengths  # [B, S] negative: committed; else which token of the round
        seen = visible.shape[-1]
        index = order.clamp(0, seen - 1)[:, None].expand(-1, depths.shape[1], -1)
        allowed = (order < 0)[:, None] | (visible.gather(2, index) & (order < seen)[:, None])
        if window is not None:
            # A tree's nodes do not stand at the position of their slot, but at that of their depth.
            position = torch.where(order < 0, order, self.round_depths.gather(1, order.clamp(0, seen - 1)))
            allowed &= depths[:, :, None] - position[:, None] < window
        dtype = self.model.dtype
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def _select(value: Any, index: Tensor) -> Any:
    """Some rows of an encoder's outputs or mask."""
    if isinstance(value, Tensor):
        return value[index]
    return type(value)({name: item[index] for name, item in value.items() if isinstance(item, Tensor)})


def run_prompt(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, inputs: dict[str, Any], tokens: int) -> ModelRunner:
    """Runs a model over a prompt from scratch; for draft models, whose prompt `generate` does not prepare.

    Args:
        model: The model.
        ids: `[B, P]` prompt, padded or not.
        mask: `[B, P]` its attention mask, or `None`.
        inputs: What every pass needs besides (see `ModelRunner`).
        tokens: How many more slots a row may need.
    """
    arguments: dict[str, Any] = {compat.CACHE: compat.new_cache(model), "use_cache": True, "return_dict": True, **inputs}
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids
    else:
        arguments["input_ids"] = ids
        if mask is not None:
            arguments["attention_mask"] = mask
            arguments["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        if model._supports_logits_to_keep():
            arguments["logits_to_keep"] = 1
    return ModelRunner(model, compat.cache_of(model(**arguments)), mask, tokens, inputs)
