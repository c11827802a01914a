"""EAGLE heads: one decoder layer that drafts from the target's hidden states (Li et al. 2024, 2024, 2025).

At position i the head reads token i + 1 beside the target's hidden state of position i, and gives the law of token i + 2. Where
the target has not been yet, it reads its own hidden state of the step before instead. So its positions, and the slots of its
cache, are those of the hidden states: once the target has committed n tokens and said the next one, the head has n positions.

Versions 1 and 2 share weights: the last hidden state is fused with the embedding before the layer, and the target's output
layer gives the logits. Version 3 fuses hidden states of several layers, lets the layer's attention read both, and has its own
output layer over a vocabulary that may be smaller.

Shapes: B rows, N positions, L feature layers, t the target's hidden size, h the head's, V the target's vocabulary, D the
draft's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from . import vocabulary
from .base import ConfidenceHead, DraftHead
from .eagle_config import EagleConfig
from .layers import RMSNorm, RotaryEmbedding, attention_arguments, attention_input, build_layers, store_keys
from .target_parts import transform_logits


@dataclass
class EagleOutput(ModelOutput):
    """What a pass of an `EagleHead` gives.

    Args:
        logits: `[B, N, D]` over the draft vocabulary.
        hidden_states: `[B, N, h]` what the next step reads in place of the target's features.
        confidence: `[B, N]` logits of acceptance, or `None`.
    """

    logits: Tensor | None = None
    hidden_states: Tensor | None = None
    confidence: Tensor | None = None


class EagleHead(vocabulary.DraftVocabulary, DraftHead):
    """An EAGLE head.

    Args:
        config: Its config.

    Raises:
        ValueError: if the config does not say which feature layers the head reads.
    """

    config_class = EagleConfig
    config: EagleConfig
    base_model_prefix = ""
    vocabulary_field = "draft_vocab_size"
    separate_weights: ClassVar[tuple[str, ...]] = ("confidence_head.",)
    # They are loaded from that file, and missed there.
    _keys_to_ignore_on_load_missing: ClassVar[list[str]] = [r"^confidence_head\."]

    def __init__(self, config: EagleConfig):
        if not config.feature_layers:
            raise ValueError(
                "A head needs to know its feature layers: set `eagle_aux_hidden_state_layer_ids`, or make the config with "
                "`EagleConfig.from_target`."
            )
        super().__init__(config)
        layer, size = config.transformer_layer_config, config.hidden_size
        # Stock attention asks its own config which implementation to use.
        layer._attn_implementation = config._attn_implementation
        is_third = config.eagle_version == 3
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
            self.embed_tokens.weight.requires_grad = config.embed_requires_grad
        self.fc = nn.Linear(config.feature_size, size, bias=False) if is_third else nn.Linear(2 * size, size, config.fc_bias)
        self.layers = build_layers(layer, is_third, config.norm_before_residual)
        self.rotary_emb = RotaryEmbedding(layer)
        self._add_norms(config)
        if is_third:
            self.norm = RMSNorm(size, eps=layer.rms_norm_eps)
            self.lm_head = nn.Linear(size, config.own_vocab_size, bias=False)
        if config.has_own_vocabulary:
            ids = torch.arange(config.own_vocab_size)
            self.register_buffer("d2t", vocabulary.offsets_from_ids(ids))
            self.register_buffer("t2d", vocabulary.known_tokens(ids, config.vocab_size))
        if config.confidence:
            self.confidence_head = ConfidenceHead(size)
        self.post_init()

    @classmethod
    def from_target(
        cls, target: PreTrainedModel, version: int = 3, draft_tokens: Iterable[int] | None = None, **fields: Any
    ) -> EagleHead:
        """A fresh head for a target, in its precision and place, bound to it; its output layer starts from the target's.

        Args:
            target: The target.
            version: 1, 2 or 3.
            draft_tokens: The target's ids that the head shall know, for version 3; `None` for all.
            fields: Arguments of `EagleConfig.from_target`.
        """
        ids = None if draft_tokens is None else list(draft_tokens)
        config = EagleConfig.from_target(target, version, None if ids is None else len(ids), **fields)
        head = cls.fresh(config, target.dtype, target.device)
        head.bind(target)
        if ids is not None:
            head.set_draft_vocabulary(ids)
        head.warm_start(target)
        return head

    @property
    def draft_ids(self) -> Tensor | None:
        """`[D]` the target's ids of the draft vocabulary; `None` if it is the target's."""
        return vocabulary.ids_from_offsets(self.d2t) if self.config.has_own_vocabulary else None

    @torch.no_grad()
    def warm_start(self, target: PreTrainedModel) -> None:
        """Copies from the target what the head has of its own: an embedding table, and for version 3 the output layer.

        Args:
            target: The target; where its hidden size is another one, nothing is copied.
        """
        parts = self.check_against(target)
        if parts.hidden_size != self.config.hidden_size:
            return
        if self.config.own_embeddings:
            self.embed_tokens.weight.copy_(parts.embedding_table[: self.config.vocab_size])
        if self.config.eagle_version == 3:
            ids = self.draft_ids
            rows = parts.output_weight if ids is None else parts.output_weight[ids]
            self.lm_head.weight.copy_(rows * parts.logit_scale)

    def check_loaded(self) -> None:
        """Checks that `d2t` holds offsets, and `t2d` the same tokens.

        Raises:
            ValueError: if not.
        """
        if self.config.has_own_vocabulary:
            vocabulary.check_maps(self.d2t, self.t2d)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features as the hidden states that `forward` reads.

        Args:
            features: `[B, N, L t]` the target's hidden states of `config.feature_layers`, side by side in that order.

        Returns:
            `[B, N, h]`.

        Raises:
            ValueError: if the features are of another size.
        """
        config = self.config
        if features.shape[-1] != config.feature_size:
            raise ValueError(
                f"The head reads the hidden states of the layers {config.feature_layers}, {config.feature_size} values for "
                f"each position, got {features.shape[-1]}."
            )
        features = features.to(self.fc.weight.dtype)
        if config.eagle_version != 3:
            return features
        if config.norm_before_fc:
            features = self.input_norm(features)
        if config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> EagleOutput:
        """One pass.

        Args:
            input_ids: `[B, N]` tokens: at position i the token i + 1.
            hidden_states: `[B, N, h]` what comes before them: `fuse` of the target's features at position i, or the head's
                own hidden state of the step before.
            attention_mask: `[B, S]` 1 for tokens and 0 for padding, or additive `[B, 1, N, S]`; `None` for a plain chain.
            position_ids: `[B, N]` the positions of the hidden states; counted if left out.
            cache: A cache with a layer for each of the head's; what it holds is seen.

        Returns:
            The logits of the tokens after `input_ids`, and what the next step reads.

        Raises:
            ValueError: if the hidden states are of another size, or the head is to be bound first.
        """
        return self.read(self.advance(input_ids, hidden_states, attention_mask, position_ids, cache))

    def advance(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The part of `forward` that comes before its outputs: the hidden states `[B, N, h]` that `read` takes."""
        if hidden_states.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"`hidden_states` must have {self.config.hidden_size} values for each position, got {hidden_states.shape[-1]}; "
                "pass the target's features through `fuse` first."
            )
        arguments = attention_arguments(self.rotary_emb, hidden_states, attention_mask, position_ids, cache)
        inputs = self._inputs(input_ids, hidden_states)
        for layer in self.layers:
            inputs = (layer(*inputs, **arguments),)
        return inputs[0]

    def remember(
        self, input_ids: Tensor, hidden_states: Tensor, attention_mask: Tensor | None, position_ids: Tensor, cache: Cache
    ) -> None:
        """Takes positions into the cache whose outputs nothing reads: of the last layer, keys and values are enough.

        Args:
            input_ids: `[B, N]`, as for `forward`.
            hidden_states: `[B, N, h]`.
            attention_mask: Additive `[B, 1, N, S]`; a head of one layer does without.
            position_ids: `[B, N]`.
            cache: Where to.
        """
        inputs = self._inputs(input_ids, hidden_states)
        *before, last = self.layers
        if before:
            arguments = attention_arguments(self.rotary_emb, hidden_states, attention_mask, position_ids, cache)
            for layer in before:
                inputs = (layer(*inputs, **arguments),)
        store_keys(last.self_attn, attention_input(last, *inputs), self.rotary_emb(hidden_states, position_ids), cache)

    def embed(self, input_ids: Tensor) -> Tensor:
        """The embeddings `[B, N, h]` of tokens `[B, N]`."""
        embeddings = nn.functional.embedding(input_ids, self.embedding_table())
        multiplier = self.config.embedding_multiplier
        return embeddings if multiplier == 1.0 else embeddings * multiplier

    def embedding_table(self) -> Tensor:
        """`[V, h]` the head's own embedding table, or the target's, which is not trained."""
        if self.config.own_embeddings:
            return self.embed_tokens.weight
        return cast(Tensor, self._of_target("embedding").weight).detach()

    def read(self, hidden: Tensor) -> EagleOutput:
        """The outputs of `forward` for some positions' hidden states `[..., h]`, as `advance` gives them."""
        confidence = self.confidence_head(hidden) if self.config.confidence else None
        if self.config.eagle_version == 3:
            normed = self.norm(hidden)
            return EagleOutput(self.lm_head(normed), normed if self.config.norm_output else hidden, confidence)
        output = self._of_target("output")
        # The target may be of another precision than the head.
        logits = output(hidden.to(cast(Tensor, output.weight).dtype))
        logits = transform_logits(logits, self.config.logit_scale, self.config.final_logit_softcapping)
        return EagleOutput(logits, hidden, confidence)

    def feed(self, hidden: Tensor) -> Tensor:
        """What the next step reads `[..., h]` after the hidden states `[..., h]` of `advance`: `read` without the logits."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def _store_draft_ids(self, ids: Tensor) -> None:
        self.d2t.copy_(vocabulary.offsets_from_ids(ids))
        self.t2d.copy_(vocabulary.known_tokens(ids, self.config.vocab_size))

    def _inputs(self, input_ids: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """What the first layer reads: for version 3 embeddings and hidden states, else both fused."""
        embeddings = self.embed(input_ids).to(hidden.dtype)
        if self.config.eagle_version == 3:
            return embeddings, hidden
        if self.config.add_para_norm:
            embeddings, hidden = self.embedding_layernorm(embeddings), self.hidden_states_layernorm(hidden)
        return (self.fc(torch.cat([embeddings, hidden], dim=-1)),)

    def _add_norms(self, config: EagleConfig) -> None:
        size, epsilon = config.hidden_size, config.transformer_layer_config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.feature_size, eps=epsilon)
        if config.fc_norm:
            count = len(config.feature_layers)
            self.fc_norm = nn.ModuleList(RMSNorm(config.feature_size // count, eps=epsilon) for _ in range(count))
        if config.add_para_norm:
            self.embedding_layernorm = RMSNorm(size, eps=epsilon)
            self.hidden_states_layernorm = RMSNorm(size, eps=epsilon)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, EagleHead) and self.config.has_own_vocabulary:
            ids = torch.arange(self.config.own_vocab_size)
            init.copy_(module.d2t, vocabulary.offsets_from_ids(ids))
            init.copy_(module.t2d, vocabulary.known_tokens(ids, self.config.vocab_size))
