"""Synthetic checkpoints of every published layout, with the names and shapes that those have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny import tiny

H, V, D, I, HEADS, PAIRS, SIZE, LAYERS = 32, 40, 10, 48, 4, 2, 8, 8  # noqa: E741
DRAFT_IDS = torch.tensor([1, 2, 3, 7, 8, 12, 20, 21, 35, 39])


def target(**changes):
    model = tiny("llama", vocab_size=V, num_hidden_layers=LAYERS, **changes)
    model.config._name_or_path = "someone/model"
    return model


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(torch.float16)


def save(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file({key: weight.contiguous() for key, weight in weights.items()}, folder / name)
    else:
        torch.save(weights, folder / name)
    return folder


def llama_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": H,
        "initializer_range": 0.02,
        "intermediate_size": I,
        "max_position_embeddings": 256,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": PAIRS,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.41.0",
        "use_cache": True,
        "vocab_size": V,
        **changes,
    }


def layer(prefix: str, reads: int, kind: str = "llama") -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (HEADS * SIZE, reads),
        "self_attn.k_proj": (PAIRS * SIZE, reads),
        "self_attn.v_proj": (PAIRS * SIZE, reads),
        "self_attn.o_proj": (H, HEADS * SIZE),
        "mlp.gate_proj": (I, H),
        "mlp.up_proj": (I, H),
        "mlp.down_proj": (H, I),
        "post_attention_layernorm": (H,),
    }
    if kind == "qwen3":
        shapes |= {"self_attn.q_norm": (SIZE,), "self_attn.k_norm": (SIZE,)}
    return {f"{prefix}{name}.weight": drawn(*shape, seed=place) for place, (name, shape) in enumerate(shapes.items())}


def eagle(bias: bool = True, table: Tensor | None = None, norms: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    weights = {"fc.weight": drawn(H, 2 * H), **layer("layers.0.", H)}
    if bias:
        weights["fc.bias"] = drawn(H)
    if table is not None:
        weights["embed_tokens.weight"] = table
    if norms:
        weights |= {f"{name}_layernorm.weight": drawn(H, seed=len(name)) for name in ("embedding", "hidden_states")}
    return llama_config(bias=bias, **({"add_para_norm": True} if norms else {})), weights


def eagle3(
    prefix: str = "midlayer.", maps: str = "both", encoding: str = "offsets", kind: str = "llama", **config: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    size = V if maps == "none" else D
    weights = {
        "fc.weight": drawn(H, 3 * H),
        **layer(prefix, 2 * H, kind),
        f"{prefix}input_layernorm.weight": drawn(H, seed=1),
        f"{prefix}hidden_norm.weight": drawn(H, seed=2),
        "norm.weight": drawn(H, seed=3),
        "lm_head.weight": drawn(size, H),
    }
    if maps != "none":
        weights["d2t"] = DRAFT_IDS - torch.arange(D) if encoding == "offsets" else DRAFT_IDS.clone()
    if maps == "both":
        weights["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, DRAFT_IDS, True)
    return llama_config(**{"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": size, **config}), weights


def speculators(**changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, weights = eagle3("layers.0.")
    weights["embed_tokens.weight"] = drawn(V, H)
    layer_config = {name: value for name, value in config.items() if name not in ("architectures", "draft_vocab_size")}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": D,
        "eagle_aux_hidden_state_layer_ids": [2, LAYERS // 2, LAYERS - 3],
        "embed_requires_grad": False,
        "norm_before_residual": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "someone/model"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "target_hidden_size": None,
        "transformer_layer_config": layer_config,
        "transformers_version": "4.57.0",
        **changes,
    }
    return config, weights


def medusa(version: str = "1", heads: int = 3, blocks: int = 1, prefix: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    weights = {}
    for head in range(heads):
        for block in range(blocks):
            weights[f"{prefix}{head}.{block}.linear.weight"] = drawn(H, H, seed=10 * head + block)
            weights[f"{prefix}{head}.{block}.linear.bias"] = drawn(H, seed=10 * head + block)
        if version == "1":
            weights[f"{prefix}{head}.{blocks}.weight"] = drawn(V, H, seed=head)
    config = {"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": "someone/model"}
    return config, weights


def vllm_medusa(bias: bool = True, shared: bool = False, truncated: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    size = D if truncated else V
    weights = {}
    for head in range(3):
        weights[f"blocks.{head}.layers.0.weight"] = drawn(H, H, seed=head)
        if bias:
            weights[f"blocks.{head}.layers.0.bias"] = drawn(H, seed=head)
        if not shared or head == 0:
            weights[f"lm_heads.{head}.weight"] = drawn(size, H, seed=head)
    if truncated:
        weights["token_map"] = DRAFT_IDS.clone()
    config = {
        "architectures": ["MedusaModel"],
        "hidden_size": H,
        "medusa_fc_bias": bias,
        "model_type": "medusa",
        "num_heads": 3,
        "num_hidden_layers": 1,
        "original_lm_head": shared,
        "truncated_vocab_size": size,
        "vocab_size": V,
    }
    return config, weights


def hydra(heads: int = 2, blocks: int = 2) -> tuple[dict[str, Any], dict[str, Tensor]]:
    weights = {}
    for head in range(heads):
        for block in range(blocks):
            reads = (head + 2) * H if block == 0 else H
            weights[f"hydra_mlp.{head}.{block}.linear.weight"] = drawn(H, reads, seed=head)
            weights[f"hydra_mlp.{head}.{block}.linear.bias"] = drawn(H, seed=head)
        weights[f"hydra_mlp.{head}.0.res_connection.weight"] = drawn(H, (head + 2) * H, seed=head + 5)
        weights[f"hydra_mlp.{head}.0.res_connection.bias"] = drawn(H, seed=head + 5)
        weights[f"hydra_lm_head.{head}.weight"] = drawn(V, H, seed=head)
        weights[f"hydra_lm_head.{head}.bias"] = drawn(V, seed=head)
    config = {
        "base_model_name_or_path": "someone/model",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "hydra_head_arch": "mlp",
        "hydra_num_heads": heads,
        "hydra_num_layers": blocks,
    }
    return config, weights
