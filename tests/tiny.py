"""Small random models of every supported family."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

import specheads

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


# family: model class, config class, the shape's names that the config knows, and what else it needs; where that has a
# `text_config`, the shape goes there
PLAIN = tuple(name for name in SHAPE if name != "head_dim")
SLIDING = {"sliding_window": WINDOW}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 8}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "dropout": 0.0,
}
T5 = {
    "d_model": 32,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 8,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
# Not among the tokens that tests make prompts of.
IMAGE_TOKEN = 30
IMAGE_LENGTH = 4  # how many of them a picture takes
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
}
QWEN3_VISION = {**QWEN_VISION, "intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 16}
QWEN_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 31,
    "vision_start_token_id": 28,
    "vision_end_token_id": 29,
}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
FAMILIES: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "bamba": (
        "BambaForCausalLM",
        "BambaConfig",
        PLAIN,
        {**MAMBA, "attn_layer_indices": [1]},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", ("max_position_embeddings",), BART),
    "biogpt": (
        "BioGptForCausalLM",
        "BioGptConfig",
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        {},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", ("hidden_size",), {"n_layer": 2, "n_head": 4}),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", (), {**GPT, "n_positions": 256, "rotary_dim": 4}),
    "cohere": ("CohereForCausalLM", "CohereConfig", PLAIN, {}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", PLAIN, {**SLIDING, **_kinds("sliding_attention")}),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        {**LATENT, **EXPERTS},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        {**LATENT, **EXPERTS, "n_group": 2, "topk_group": 1},
    ),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", PLAIN, {**SLIDING, **_kinds("sliding_attention")}),
    "falcon": ("FalconForCausalLM", "FalconConfig", ("hidden_size", "num_hidden_layers", "num_attention_heads"), {}),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        PLAIN,
        {**MAMBA, "mamba_d_ssm": 64},
    ),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", tuple(SHAPE), {}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", tuple(SHAPE), {**SLIDING, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        tuple(SHAPE),
        {
            "text_config": {
                "model_type": "gemma3_text",
                **SLIDING,
                **_kinds("sliding_attention"),
                "query_pre_attn_scalar": 8,
            },
            "vision_config": {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "image_token_id": IMAGE_TOKEN,
            "image_token_index": IMAGE_TOKEN,
            "boi_token_index": 28,
            "eoi_token_index": 29,
        },
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        tuple(SHAPE),
        {**SLIDING, **_kinds("sliding_attention"), "query_pre_attn_scalar": 8},
    ),
    "glm": ("GlmForCausalLM", "GlmConfig", tuple(SHAPE), {}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", tuple(SHAPE), {}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", ("max_position_embeddings",), GPT),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", (), {**GPT, "n_positions": 256}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        ("hidden_size", "max_position_embeddings"),
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        {},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        tuple(SHAPE),
        {**SLIDING, **_kinds("sliding_attention"), **LOCAL_EXPERTS},
    ),
    "gptj": (
        "GPTJForCausalLM",
        "GPTJConfig",
        ("max_position_embeddings",),
        {**GPT, "rotary_dim": 4},
    ),
    "granite": ("GraniteForCausalLM", "GraniteConfig", PLAIN, {}),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", PLAIN, LOCAL_EXPERTS),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        PLAIN,
        {
            **MAMBA,
            **LOCAL_EXPERTS,
            "shared_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "helium": ("HeliumForCausalLM", "HeliumConfig", tuple(SHAPE), {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", tuple(SHAPE), {}),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        tuple(SHAPE),
        {
            "text_config": {"model_type": "llama"},
            "vision_config": {"model_type": "idefics3_vision", **VISION},
            "image_token_id": IMAGE_TOKEN,
            "scale_factor": 1,
        },
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        PLAIN,
        {
            "text_config": {"model_type": "qwen2"},
            "vision_config": {"model_type": "internvl_vision", **VISION, "image_size": [32, 32], "patch_size": [8, 8]},
            "image_token_id": IMAGE_TOKEN,
            "image_seq_length": 4,
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", PLAIN, {"layer_types": ["conv", "full_attention"]}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", tuple(SHAPE), {}),
    "llama4_text": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        tuple(SHAPE),
        {
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "moe_layers": [1],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": WINDOW,
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        tuple(SHAPE),
        {
            "text_config": {"model_type": "llama"},
            "vision_config": {"model_type": "clip_vision_model", **VISION, "projection_dim": 32},
            "image_token_id": IMAGE_TOKEN,
            "image_token_index": IMAGE_TOKEN,
            "image_seq_length": 4,
            "vision_feature_layer": -1,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        ("hidden_size", "num_hidden_layers"),
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    ),
    "marian": (
        "MarianMTModel",
        "MarianConfig",
        ("max_position_embeddings",),
        {**BART, "decoder_start_token_id": 0},
    ),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", ("max_position_embeddings",), BART),
    "ministral": ("MinistralForCausalLM", "MinistralConfig", tuple(SHAPE), SLIDING),
    "mistral": ("MistralForCausalLM", "MistralConfig", tuple(SHAPE), SLIDING),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", PLAIN, LOCAL_EXPERTS),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        (),
        {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, "use_cache": True},
    ),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", (), T5),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", PLAIN, {}),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", PLAIN, {}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", PLAIN, {}),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", PLAIN, {**SLIDING, **_kinds("sliding_attention")}),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", PLAIN, {**DELTA, "linear_num_value_heads": 2}),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", PLAIN, {"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        {"ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        tuple(SHAPE),
        {
            "text_config": {"model_type": "gemma"},
            "vision_config": {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
            "projection_dim": 32,
            "image_token_id": IMAGE_TOKEN,
            "image_token_index": IMAGE_TOKEN,
        },
    ),
    "pegasus": (
        "PegasusForConditionalGeneration",
        "PegasusConfig",
        ("max_position_embeddings",),
        {**BART, "decoder_start_token_id": 0},
    ),
    "persimmon": (
        "PersimmonForCausalLM",
        "PersimmonConfig",
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        {},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", PLAIN, {}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", PLAIN, {}),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", PLAIN, LOCAL_EXPERTS),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        PLAIN,
        {**SLIDING, **_kinds("full_attention"), "use_sliding_window": True},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        PLAIN,
        {
            "text_config": {"model_type": "qwen2_5_vl_text", "rope_parameters": SECTIONS},
            "vision_config": {
                "model_type": "qwen2_5_vl_vision",
                **QWEN_VISION,
                "out_hidden_size": 32,
                "intermediate_size": 48,
                "window_size": 8,
                "fullatt_block_indexes": [0],
            },
            **QWEN_TOKENS,
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        PLAIN,
        {
            **SLIDING,
            **_kinds("full_attention"),
            **EXPERTS,
            "use_sliding_window": True,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        PLAIN,
        {
            "text_config": {"model_type": "qwen2_vl_text", "rope_parameters": SECTIONS},
            "vision_config": {"model_type": "qwen2_vl_vision", **QWEN_VISION, "embed_dim": 32},
            **QWEN_TOKENS,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", tuple(SHAPE), {}),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        tuple(SHAPE),
        {
            "text_config": {
                "model_type": "qwen3_5_text",
                **DELTA,
                "rope_parameters": {**SECTIONS, "partial_rotary_factor": 1.0},
            },
            "vision_config": {"model_type": "qwen3_5_vision", **QWEN3_VISION},
            **QWEN_TOKENS,
        },
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        tuple(name for name in SHAPE if name != "intermediate_size"),
        {**DELTA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", tuple(SHAPE), DELTA),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", tuple(SHAPE), {"num_experts": 4, **EXPERTS}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        tuple(SHAPE),
        {**DELTA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        tuple(SHAPE),
        {
            "text_config": {"model_type": "qwen3_vl_text", "rope_parameters": SECTIONS},
            "vision_config": {"model_type": "qwen3_vl", **QWEN3_VISION, "deepstack_visual_indexes": [0]},
            **QWEN_TOKENS,
        },
    ),
    "seed_oss": ("SeedOssForCausalLM", "SeedOssConfig", tuple(SHAPE), {}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", PLAIN, {"no_rope_layers": [1, 0]}),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        "SmolVLMConfig",
        tuple(SHAPE),
        {
            "text_config": {"model_type": "llama"},
            "vision_config": {"model_type": "smolvlm_vision", **VISION},
            "image_token_id": IMAGE_TOKEN,
            "scale_factor": 1,
        },
    ),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", PLAIN, {}),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", PLAIN, SLIDING),
    "t5": ("T5ForConditionalGeneration", "T5Config", (), T5),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", (), T5),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        (),
        {
            **BART,
            "num_mel_bins": 8,
            "max_source_positions": 32,
            "max_target_positions": 64,
            "begin_suppress_tokens": None,
            "decoder_start_token_id": 1,
        },
    ),
    "xglm": (
        "XGLMForCausalLM",
        "XGLMConfig",
        ("max_position_embeddings",),
        {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    ),
}


def _build(family: str, vocab_size: int, **changes: Any) -> PreTrainedModel:
    model_class, config_class, names, extra = FAMILIES[family]
    special, shape = _special(vocab_size), {name: SHAPE[name] for name in names}
    if "text_config" in extra:
        text = {**special, **shape, **extra["text_config"]}
        settings = {**special, **extra, "text_config": text, **changes}
        settings = {name: value for name, value in settings.items() if name != "vocab_size"}
    else:
        settings = {**special, **shape, **extra, **changes}
    settings = copy.deepcopy(settings)  # configs change what they are given
    return getattr(hf, model_class)(getattr(hf, config_class)(**settings))


@cache
def _cached(family: str, vocab_size: int, seed: int, spread: float, attention: str, changes: tuple) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = _build(family, vocab_size, **dict(changes)).eval().double()
    if model._supports_sdpa or attention != "sdpa":  # else there is but one way
        model.set_attn_implementation(attention)
    with torch.no_grad():
        # Fresh weights are so small that all tokens are about equally probable: spread them.
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=spread, generator=torch.Generator().manual_seed(seed + len(name)))
    return model


def image_inputs(family: str, ids: Tensor, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """What a prompt with one picture per row needs besides `ids` `[B, P]`, where `IMAGE_LENGTH` image tokens stand for it."""
    generator = torch.Generator().manual_seed(7)
    shape: tuple[int, ...] = (len(ids), 3, 16, 16)
    more = {}
    if family.startswith("qwen"):
        shape = (len(ids) * 16, 3 * 4 * 4)  # 4 x 4 patches of 4 x 4 pixels, merged 2 x 2
        more = {
            "image_grid_thw": torch.tensor([[1, 4, 4]] * len(ids)),
            "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
        }
    elif family in ("idefics3", "smolvlm"):
        shape = (len(ids), 1, 3, 16, 16)
    elif family == "internvl":
        shape = (len(ids), 3, 32, 32)
    elif family == "gemma3":
        more = {"token_type_ids": (ids == IMAGE_TOKEN).long()}
    return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype), **more}


def sound_inputs(batch_size: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """What Whisper hears."""
    generator = torch.Generator().manual_seed(7)
    return {"input_features": torch.randn(batch_size, 8, 64, generator=generator, dtype=torch.float64).to(dtype)}


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


def with_head(target: PreTrainedModel, head: Any) -> PreTrainedModel:
    """A target that drafts with a head alone, without copies of earlier text."""
    return specheads.enable(target, drafter=specheads.load_drafter(head, target, with_suffix=False))
