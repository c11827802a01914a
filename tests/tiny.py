"""Small random models of every supported family."""

from __future__ import annotations

import copy
from functools import cache

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

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


def _build(family: str, vocab_size: int, **changes) -> PreTrainedModel:
    special = {**_special(vocab_size), **changes}
    shape = {name: special.pop(name, value) for name, value in SHAPE.items()}
    plain = {name: value for name, value in shape.items() if name != "head_dim"}
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, **special))
    if family == "mistral":
        return MistralForCausalLM(MistralConfig(**shape, sliding_window=WINDOW, **special))
    if family == "qwen2":
        kinds = ["full_attention", "sliding_attention"]
        config = Qwen2Config(**plain, use_sliding_window=True, sliding_window=WINDOW, layer_types=kinds, **special)
        return Qwen2ForCausalLM(config)
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**shape, **special))
    if family == "gemma3_text":
        kinds = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**shape, sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=8, **special)
        return Gemma3ForCausalLM(config)
    if family == "gpt2":
        config = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=shape["max_position_embeddings"], **special)
        return GPT2LMHeadModel(config)
    if family == "opt":
        config = OPTConfig(
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            word_embed_proj_dim=32,
            **special,
        )
        return OPTForCausalLM(config)
    if family == "t5":
        config = T5Config(
            d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, decoder_start_token_id=0, dropout_rate=0.0, **special
        )
        return T5ForConditionalGeneration(config)
    raise KeyError(family)


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
