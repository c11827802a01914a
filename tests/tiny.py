"""Small random models of every supported family."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
WINDOW = 8


def _special(vocab_size: int) -> dict[str, int]:
    return {"vocab_size": vocab_size, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _kinds(first: str) -> dict[str, list[str]]:
    other = {"sliding_attention": "full_attention", "full_attention": "sliding_attention"}[first]
    return {"layer_types": [first, other]}


# family: model class, config class, the shape's names that the config knows, and what else it needs
PLAIN = tuple(name for name in SHAPE if name != "head_dim")
SLIDING = {"sliding_window": WINDOW}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "cohere": ("CohereForCausalLM", "CohereConfig", PLAIN, {}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", PLAIN, {**SLIDING, **_kinds("sliding_attention")}),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", PLAIN, {**SLIDING, **_kinds("sliding_attention")}),
    "falcon": ("FalconForCausalLM", "FalconConfig", ("hidden_size", "num_hidden_layers", "num_attention_heads"), {}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", tuple(SHAPE), {}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", tuple(SHAPE), {**SLIDING, "query_pre_attn_scalar": 8}),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        tuple(SHAPE),
        {**SLIDING, **_kinds("sliding_attention"), "query_pre_attn_scalar": 8},
    ),
    "glm": ("GlmForCausalLM", "GlmConfig", tuple(SHAPE), {}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", tuple(SHAPE), {}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", ("max_position_embeddings",), {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        {},
    ),
    "gptj": (
        "GPTJForCausalLM",
        "GPTJConfig",
        ("max_position_embeddings",),
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    ),
    "granite": ("GraniteForCausalLM", "GraniteConfig", PLAIN, {}),
    "helium": ("HeliumForCausalLM", "HeliumConfig", tuple(SHAPE), {}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", tuple(SHAPE), {}),
    "ministral": ("MinistralForCausalLM", "MinistralConfig", tuple(SHAPE), SLIDING),
    "mistral": ("MistralForCausalLM", "MistralConfig", tuple(SHAPE), SLIDING),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", PLAIN, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", PLAIN, {}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", PLAIN, {}),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", PLAIN, {**SLIDING, **_kinds("sliding_attention")}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        {"ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", PLAIN, {}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", PLAIN, {}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        PLAIN,
        {**SLIDING, **_kinds("full_attention"), "use_sliding_window": True},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", tuple(SHAPE), {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", tuple(SHAPE), {"num_experts": 4, **EXPERTS}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", PLAIN, {"no_rope_layers": [1, 0]}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", PLAIN, {}),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", PLAIN, SLIDING),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        (),
        {
            "d_model": 32,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "d_kv": 8,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.0,
        },
    ),
}


def _build(family: str, vocab_size: int, **changes: Any) -> PreTrainedModel:
    model_class, config_class, names, extra = FAMILIES[family]
    settings = {**_special(vocab_size), **{name: SHAPE[name] for name in names}, **extra, **changes}
    return getattr(hf, model_class)(getattr(hf, config_class)(**settings))


@cache
def _cached(family: str, vocab_size: int, seed: int, spread: float, attention: str, changes: tuple) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = _build(family, vocab_size, **dict(changes)).eval().double()
    model.set_attn_implementation(attention)
    with torch.no_grad():
        # Fresh weights are so small that all tokens are about equally probable: spread them.
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=spread, generator=torch.Generator().manual_seed(seed + len(name)))
    return model


def tiny(family: str = "llama", vocab_size: int = 32, seed: int = 0, spread: float = 0.3, attention: str = "sdpa", **changes):
    """A fresh copy of a small random double-precision model."""
    return copy.deepcopy(_cached(family, vocab_size, seed, spread, attention, tuple(sorted(changes.items()))))


def perturbed(model: PreTrainedModel, amount: float = 0.03, seed: int = 1) -> PreTrainedModel:
    """A model close to another one, so that its drafts are now accepted and now rejected."""
    near = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in near.parameters():
            if parameter.dim() > 1:
                parameter += amount * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return near
