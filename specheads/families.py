"""What the stock forward of each model type accepts: trees, chains, or chains that are fed again; or why it is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from .attention import NAME as SHARED_HEADS
from .proof import tried_family
from .signature import forward_takes


@dataclass(frozen=True)
class Family:
    """What a model type's stock forward accepts.

    Args:
        takes_trees: A 4-D mask and explicit positions: trees, and rows of different lengths. Else chains, rows in step.
        masks_by_layer_type: The mask is a dict by layer type.
        position_table: The setting that says how many positions there are, where they are looked up; `None` if they do not end.
        is_stateful: Has layers whose state cannot be shortened: what a draft did to it is undone, and what was accepted is fed
            again. Chains, rows in step.
    """

    takes_trees: bool = True
    masks_by_layer_type: bool = False
    position_table: str | None = None
    is_stateful: bool = False


TREES = Family()
TREES_BY_LAYER_TYPE = Family(masks_by_layer_type=True)
TREES_WITH_TABLE = Family(position_table="max_position_embeddings")
CHAINS = Family(takes_trees=False)
CHAINS_WITH_TABLE = Family(takes_trees=False, position_table="max_position_embeddings")
REPLAYED = Family(takes_trees=False, is_stateful=True)
# What a model that is not listed is tried for.
TRIED = Family(position_table="max_position_embeddings")

# A family is listed once the tests prove it, and the tests go through this list.
FAMILIES: dict[str, Family] = {
    "bamba": REPLAYED,
    "bart": CHAINS_WITH_TABLE,
    "biogpt": TREES_WITH_TABLE,
    "bloom": CHAINS,
    "codegen": TREES_WITH_TABLE,
    "cohere": TREES,
    "cohere2": TREES_BY_LAYER_TYPE,
    "deepseek_v2": TREES,
    "deepseek_v3": TREES,
    "exaone4": TREES_BY_LAYER_TYPE,
    "falcon": TREES,
    "falcon_h1": REPLAYED,
    "gemma": TREES,
    "gemma2": TREES_BY_LAYER_TYPE,
    "gemma3_text": TREES_BY_LAYER_TYPE,
    "glm": TREES,
    "glm4": TREES,
    "gpt2": TREES_WITH_TABLE,
    "gpt_bigcode": TREES_WITH_TABLE,
    "gpt_neo": CHAINS_WITH_TABLE,
    "gpt_neox": TREES,
    "gpt_oss": TREES_BY_LAYER_TYPE,
    "gptj": TREES_WITH_TABLE,
    "granite": TREES,
    "granitemoe": TREES,
    "granitemoehybrid": REPLAYED,
    "helium": TREES,
    "hunyuan_v1_dense": TREES,
    "lfm2": REPLAYED,
    "llama": TREES,
    "llama4_text": CHAINS,
    "mamba2": REPLAYED,
    "marian": CHAINS_WITH_TABLE,
    "mbart": CHAINS_WITH_TABLE,
    "ministral": TREES,
    "mistral": TREES,
    "mixtral": TREES,
    "mpt": Family(takes_trees=False, position_table="max_seq_len"),
    "mt5": CHAINS,
    "nemotron": TREES,
    "olmo": TREES,
    "olmo2": TREES,
    "olmo3": TREES_BY_LAYER_TYPE,
    "olmo_hybrid": REPLAYED,
    "olmoe": TREES,
    "opt": TREES_WITH_TABLE,
    "pegasus": CHAINS_WITH_TABLE,
    "persimmon": TREES,
    "phi": TREES,
    "phi3": TREES,
    "phimoe": TREES,
    "qwen2": TREES_BY_LAYER_TYPE,
    "qwen2_moe": TREES_BY_LAYER_TYPE,
    "qwen3": TREES_BY_LAYER_TYPE,
    "qwen3_5_moe_text": REPLAYED,
    "qwen3_5_text": REPLAYED,
    "qwen3_moe": TREES,
    "qwen3_next": REPLAYED,
    "seed_oss": TREES,
    "smollm3": TREES,
    "stablelm": TREES,
    "starcoder2": TREES,
    "t5": CHAINS,
    "umt5": CHAINS,
    "whisper": Family(takes_trees=False, position_table="max_target_positions"),
    "xglm": TREES,
}
# Models that see, and write through a language model: it decides, where it is in the list above.
SEEING: dict[str, Family | None] = {
    "gemma3": None,
    "idefics3": None,
    "internvl": None,
    "llava": None,
    "paligemma": None,
    "qwen2_5_vl": TREES,
    "qwen2_vl": TREES,
    "qwen3_5": REPLAYED,
    "qwen3_vl": TREES,
    "smolvlm": None,
}
# Known not to work, and why.
REFUSED = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), "a pass of several tokens starts its scan from an empty state"),
    "recurrent_gemma": "its state is in the modules and not in a cache",
    **dict.fromkeys(("zamba2", "nemotron_h"), "a pass of several tokens bounds its time steps as a pass of one does not"),
}

ATTENTION = ("sdpa", "eager")  # that one may choose; packing has one of its own
# Their frequencies follow the largest position of a pass, so that a drafted token would turn those before it.
ROPE_BY_LENGTH = ("dynamic", "longrope")
UNBOUNDED = (0.0, float("inf"))


def family_of(model: PreTrainedModel) -> Family:
    """The family of a model.

    Raises:
        ValueError: if the family, or the attention implementation, is not among the proven ones.
    """
    family = _listed(type(model), model.config) or tried_family(model, (TRIED, replace(TRIED, takes_trees=False)))
    if family is None:
        raise ValueError(
            f"Speculative generation is not proven for the model type {model.config.model_type!r}, and a trial of "
            f"{type(model).__name__} showed that its forward does not take a draft as others do, so it is refused; listed are "
            f"{', '.join(sorted([*FAMILIES, *SEEING]))}. Call `generate` without `speculative`."
        )
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention not in (*ATTENTION, SHARED_HEADS):
        raise ValueError(
            f"Speculative generation needs attention that takes a mask, {' or '.join(ATTENTION)}, but the model was loaded "
            f"with {attention!r}; load it with `attn_implementation='sdpa'`."
        )
    _check_rope(model.config)
    if family.takes_trees and not forward_takes(model, "position_ids"):
        family = replace(family, takes_trees=False)  # it counts its positions itself
    if family.is_stateful and any(
        tuple(getattr(module, "time_step_limit", UNBOUNDED)) != UNBOUNDED for module in model.modules()
    ):
        raise ValueError(
            "The model's state space layers bound their time steps (`time_step_limit`) in passes of several tokens and not in "
            "passes of one: drafts would change the text, so speculative generation is refused."
        )
    return family


def _listed(model_class: type, config: Any) -> Family | None:
    """A model's entry in the lists above; a class of one's own counts as the listed one that it is derived from."""
    derived = (getattr(base, "config_class", None) for base in model_class.__mro__)
    names = [config.model_type, *(base.model_type for base in derived if base is not None)]
    name = next((name for name in names if name in FAMILIES or name in SEEING or name in REFUSED), names[0])
    if name in REFUSED:
        raise ValueError(
            f"Speculative generation is not possible with transformers' {name!r} models: {REFUSED[name]}. "
            "Call `generate` without `speculative`."
        )
    if name in SEEING:
        return SEEING[name] or _seeing(name, config.get_text_config(decoder=True))
    if getattr(config, "alibi", False):
        return CHAINS  # the bias by distance is made from a 2-D mask
    return FAMILIES.get(name)


def _seeing(name: str, text_config: Any) -> Family:
    text = text_config.model_type
    if text not in FAMILIES:
        raise ValueError(
            f"Speculative generation is not proven for the model type {text!r} within {name!r}, so it is refused. "
            "Call `generate` without `speculative`."
        )
    if name == "paligemma" and FAMILIES[text].masks_by_layer_type:
        return CHAINS  # it does not hand on masks by layer type
    return FAMILIES[text]


def _check_rope(config: Any) -> None:
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in [parameters, *by_layer_type]:
        if rope.get("rope_type") in ROPE_BY_LENGTH:
            raise ValueError(
                f"The model's rotary positions are of type {rope['rope_type']!r}, which depends on the longest position of a "
                "pass: drafts would change what comes before them, so speculative generation is refused."
            )


def position_limit(model: PreTrainedModel) -> int | None:
    """How many positions a model has; `None` if they do not end."""
    return _positions(model, family_of(model))


def known_position_limit(model: PreTrainedModel) -> int | None:
    """How many positions a model has for certain: the setting of one not listed may say something else."""
    return _positions(model, _listed(type(model), model.config))


def _positions(model: PreTrainedModel, family: Family | None) -> int | None:
    table = None if family is None else family.position_table
    return None if table is None else getattr(model.config.get_text_config(decoder=True), table, None)
