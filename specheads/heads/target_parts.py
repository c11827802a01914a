"""What a head takes from its target, whatever the target's family.

The target's own accessors are used, so that tied and untied output layers, padded vocabularies and families that rescale their
embeddings or logits all go one way.

Shapes: h the target's hidden size, V the rows of its logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# The number of layers, heads, ... under the names that the families give them, the first that is there counts.
LAYERS = ("num_decoder_layers", "num_hidden_layers")
INTERMEDIATE_SIZE = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size")
HEAD_SIZE = ("head_dim", "d_kv")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k")
NORM_EPSILON = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")


@dataclass(frozen=True)
class TargetParts:
    """A target as a head sees it.

    Args:
        config: The config of its text decoder.
        embedding: Its input embeddings.
        output: Its output layer, without what the family does to the logits afterwards.
        hidden_size: h.
        vocab_size: V, rows of the output layer; more than the tokenizer has where the vocabulary is padded.
        layers: How many decoder layers it has; `hidden_states[layers]` is the last one's output after the final norm.
        embedding_multiplier: What it multiplies the rows of its embedding table by.
        logit_scale: What it multiplies the output layer's result by.
        final_logit_softcapping: The bound c of its `c * tanh(logits / c)`, or `None`.
        final_bias: `[V]` what is added to the logits at last (Marian), or `None`.
    """

    config: Any
    embedding: nn.Module
    output: nn.Module
    hidden_size: int
    vocab_size: int
    layers: int
    embedding_multiplier: float
    logit_scale: float
    final_logit_softcapping: float | None
    final_bias: Tensor | None = None

    @property
    def embedding_table(self) -> Tensor:
        """`[at least V, h]` the embeddings' rows."""
        return cast(Tensor, self.embedding.weight)

    @property
    def output_weight(self) -> Tensor:
        """`[V, h]` the output layer's weight."""
        return cast(Tensor, self.output.weight)

    @property
    def output_bias(self) -> Tensor | None:
        """`[V]` what is added to the output layer's product, `None` if nothing is."""
        own = getattr(self.output, "bias", None)
        return own if self.final_bias is None else self.final_bias if own is None else own + self.final_bias


def parts_of(target: PreTrainedModel) -> TargetParts:
    """Finds the parts of a target.

    Raises:
        ValueError: if it has no output layer over a vocabulary, or that layer does not read the last hidden state as it is.
    """
    config = target.config.get_text_config(decoder=True)
    embedding, output = target.get_input_embeddings(), target.get_output_embeddings()
    if embedding is None or output is None:
        raise ValueError(
            f"A head needs a target with input embeddings and an output layer, and {type(target).__name__} lacks one; "
            "load the target with AutoModelForCausalLM."
        )
    if output.weight.shape[1] != config.hidden_size:
        raise ValueError(
            f"The output layer of {type(target).__name__} reads {output.weight.shape[1]} values and its hidden states have "
            f"{config.hidden_size}; a head needs both to be the same."
        )
    return TargetParts(
        config=config,
        embedding=embedding,
        output=output,
        hidden_size=config.hidden_size,
        vocab_size=output.weight.shape[0],
        layers=first_of(config, LAYERS),
        embedding_multiplier=_embedding_multiplier(config, embedding),
        logit_scale=_logit_scale(config),
        final_logit_softcapping=getattr(config, "final_logit_softcapping", None),
        final_bias=_final_bias(target),
    )


def first_of(config: Any, names: tuple[str, ...], default: Any = None) -> Any:
    """The first of some fields that a config has and that is set."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def active_experts(config: Any) -> float:
    """The share of a layer's routed experts that a token goes to; 1 where the config does not say, or there are none."""
    every, active = first_of(config, EXPERTS), first_of(config, EXPERTS_PER_TOKEN)
    return min(1.0, active / every) if every and isinstance(active, int) else 1.0


def transform_logits(logits: Tensor, scale: float, softcapping: float | None) -> Tensor:
    """What a family does to the logits `[..., V]` of its output layer: Cohere and Granite scale them, Gemma bounds them."""
    logits = logits if scale == 1.0 else logits * scale
    return logits if softcapping is None else torch.tanh(logits / softcapping) * softcapping


def normalises_queries(target: PreTrainedModel, head_size: int) -> bool:
    """Whether the target's attention normalises queries and keys head by head, as Qwen 3 does."""
    names = target.named_parameters()
    return any(name.endswith("q_norm.weight") and value.shape == (head_size,) for name, value in names)


def _final_bias(target: PreTrainedModel) -> Tensor | None:
    bias = getattr(target, "final_logits_bias", None)  # often there, and zero
    return bias.flatten() if isinstance(bias, Tensor) and bias.any() else None


def _embedding_multiplier(config: Any, embedding: nn.Module) -> float:
    scale = getattr(embedding, "scalar_embed_scale", None)  # Gemma's embedding module multiplies by itself
    return float(scale if scale is not None else getattr(config, "embedding_multiplier", 1.0))


def _logit_scale(config: Any) -> float:
    # T5 and its kin scale what their output layer reads; UMT5 of transformers 5.22 does so where it is tied, without saying so.
    implied = config.model_type == "umt5" and config.tie_word_embeddings
    if getattr(config, "scale_decoder_outputs", implied):
        return float(config.hidden_size) ** -0.5
    divisor = getattr(config, "logits_scaling", None)  # Granite's
    return 1.0 / divisor if divisor else float(getattr(config, "logit_scale", None) or 1.0)
