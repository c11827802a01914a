"""Every line that depends on the version of transformers. Proven from 5.22 to 5.24."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedModel
from transformers.generation import utils as generation
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import ModelOutput, output_capturing

# 5.24 renamed the argument that carries the cache.
CACHE = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"

try:  # 5.24 builds multi-token-prediction layers
    from transformers.modeling_layers import MtpModel as _MtpModel
except ImportError:
    _MtpModel = None
MtpModel: Any = _MtpModel

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# Inputs that the pass over the prompt takes, and those after it do without.
PROMPT_INPUTS = frozenset(getattr(generation, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))

SAMPLE_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)

# 5.24 takes a list of the hidden states that a pass is to return, the others being `None`; before, it is all or none.
SELECTS_HIDDEN_STATES = hasattr(output_capturing, "selected_hidden_states")


def prefill(model: PreTrainedModel, ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """The stock pass over the prompt, with everything `generate` prepared for it."""
    return model._prefill(ids, generation_config, model_kwargs)


def hidden_states_request(layers: Sequence[int], asked: Any) -> Any:
    """The `output_hidden_states` under which a pass returns some hidden states besides those that the user asked for.

    Args:
        layers: Indices into `hidden_states`.
        asked: What the user said: nothing, a flag, an index or a list of them.
    """
    if not layers:
        return asked
    if asked is True or not SELECTS_HIDDEN_STATES:
        return True
    own = [] if not asked else [asked] if isinstance(asked, int) else list(asked)
    return [*own, *layers]


def cache_name(model: PreTrainedModel) -> str:
    """The argument of a model's forward, and the field of its outputs, that carries the cache."""
    has_own = CACHE == "past_key_values" and "cache_params" in inspect.signature(model.forward).parameters
    return "cache_params" if has_own else CACHE


def cache_of(model: PreTrainedModel, outputs: Any) -> Cache:
    """The cache in a model's outputs."""
    return outputs[cache_name(model)]


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty stock cache for a model."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    return DynamicCache(config=config)


def columns(cache: Cache, ids: Tensor) -> int:
    """How many columns a cache holds after the pass over a prompt `[B, P]`; one with nothing but states does not count them."""
    layers = getattr(cache, "layers", ())
    has_states_only = bool(layers) and all(hasattr(layer, "conv_states") and not hasattr(layer, "keys") for layer in layers)
    return ids.shape[1] if has_states_only else cache.get_seq_length()


def next_position(model: PreTrainedModel, ids: Tensor, cache: Cache, model_kwargs: dict[str, Any], name: str) -> Tensor | None:
    """The position `[..., B, 1]` that a model's own preparation gives to the first token after the prompt, if it gives one."""
    if model_kwargs.get(name) is None:
        return None
    given = model._update_model_kwargs_for_generation(
        ModelOutput({cache_name(model): cache}), dict(model_kwargs), is_encoder_decoder=model.config.is_encoder_decoder
    )
    longer = torch.cat([ids, ids.new_zeros(len(ids), 1)], dim=1)
    return model.prepare_inputs_for_generation(longer, next_sequence_length=1, **given).get(name)


def is_plain_cache(cache: Any) -> bool:
    """Whether a cache is one that a round can be built on: dynamic, not offloaded, not quantised."""
    getattr(cache, "layers", None)  # one that is filled on demand is so from here on
    if isinstance(cache, EncoderDecoderCache):
        return is_plain_cache(cache.self_attention_cache) and is_plain_cache(cache.cross_attention_cache)
    return type(cache) is DynamicCache and not getattr(cache, "offloading", False)


def pad_token(generation_config: Any) -> torch.Tensor | None:
    """The padding token that `generate` settled on."""
    return generation_config._pad_token_tensor


def repository_of_recipe() -> str | None:
    """The repository or folder that the running `generate(custom_generate=...)` named, `None` if there is no such call.

    The recipe is called with all arguments but this one, and from a copy of its file that does not lie in the repository.
    """
    frame = inspect.currentframe()
    while frame is not None:
        named = frame.f_locals.get("custom_generate") if frame.f_code.co_name == "generate" else None
        if isinstance(named, str) and frame.f_globals.get("__name__") == generation.__name__:
            return named
        frame = frame.f_back
    return None
