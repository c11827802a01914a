"""EAGLE heads: one decoder layer that drafts from the target's hidden states (Li et al. 2024, 2024, 2025).

At position i the head reads token i + 1 beside the target's hidden state of position i, and gives the law of token i + 2. Where
the target has not been yet, it reads its own hidden state of the step before instead. So its positions, and the slots of its
cache, are those of the hidden states: once the target has committed n tokens and said the next one, the head has n positions.

Versions 1 and 2 share weights: the last hidden state is fused with the embedding before the layer, and the target's output
layer gives the logits. Version 3 fuses hidden states of several layers, lets the layer's attention read both, and has its own
output layer over a vocabulary that may be smaller. The config's file is the `speculators` layout, which serving engines read,
with a few more keys.

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
from .base import ConfidenceHead, DraftHead, HeadConfig
from .layers import (
    FEATURE_COUNT,
    RMSNorm,
    RotaryEmbedding,
    attention_arguments,
    build_layer_config,
    build_layers,
    layer_config_from,
    layer_fields,
)
from .provenance import describe_target
from .target_parts import TargetParts, parts_of, transform_logits

VERSIONS = (1, 2, 3)
# Fields by version: others must keep their default.
ONLY_VERSION_3 = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size")
ONLY_EARLIER = ("fc_bias", "add_para_norm", "logit_scale", "final_logit_softcapping")


class EagleConfig(HeadConfig):
    """The config of an `EagleHead`; see `HeadConfig` for what all heads have.

    Args:
        eagle_version: 1, 2 (the weights of 1, drafting dynamic trees) or 3.
        transformer_layer_config: The config of the head's layers, a Llama or Qwen 3 config, or a dict of its fields.
        draft_vocab_size: D; `None` for the target's.
        eagle_aux_hidden_state_layer_ids: The feature layers, as indices into `hidden_states`, increasing.
        target_hidden_size: t, if it is not h.
        norm_before_residual: Whether the residual stream starts from the normalised hidden state.
        norm_before_fc: Whether the feature layers are normalised together before they are fused.
        fc_norm: Whether each of them is normalised on its own before.
        norm_output: Whether the head feeds its hidden state on after its final norm.
        fc_bias: Whether the fusing layer of versions 1 and 2 has a bias.
        add_para_norm: Whether versions 1 and 2 normalise embedding and hidden state before they are fused (HASS).
        own_embeddings: Whether the head has its own embedding table; else the target's.
        embed_requires_grad: Whether that table is trained.
        speculators_model_type: `"eagle3"`, or `"eagle"` for versions 1 and 2.
        speculators_version: The version of the layout.
        speculators_config: What engines read: how many tokens are drafted, and for which target.
    """

    model_type = "speculators"

    eagle_version: int | None = None
    transformer_layer_config: Any = None
    draft_vocab_size: int | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = True
    add_para_norm: bool = False
    own_embeddings: bool = False
    embed_requires_grad: bool = False
    speculators_model_type: str | None = None
    speculators_version: str = "0.5.0"
    speculators_config: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.transformer_layer_config, dict | None):
            self.transformer_layer_config = self.transformer_layer_config.to_dict()
        self.transformer_layer_config = build_layer_config(self.transformer_layer_config or {})
        self._settle_version()
        self.draft_vocab_size = self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size
        self._check_fields()
        kwargs.pop("tie_word_embeddings", None)
        super().__post_init__(**kwargs)

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        version: int = 3,
        draft_vocab_size: int | None = None,
        tokenizer: Any = None,
        revision: str | None = None,
        **fields: Any,
    ) -> EagleConfig:
        """A config of a head that fits a target.

        Args:
            target: The target.
            version: 1, 2 or 3.
            draft_vocab_size: D, for version 3; `None` for the target's vocabulary.
            tokenizer: The target's tokenizer, so that the config can tell it from others.
            revision: The revision that the target was loaded at.
            fields: Further fields of the config. `transformer_layer_config` may be a dict of the fields to change.

        Raises:
            ValueError: if the target has no usable output layer or positions, or a field is not known or does not fit.
        """
        parts = parts_of(target)
        layer = layer_config_from(target, parts, **fields.pop("transformer_layer_config", {}))
        settings: dict[str, Any] = {
            "eagle_version": version,
            "transformer_layer_config": layer,
            "draft_vocab_size": draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": default_feature_layers(parts.layers) if version == 3 else [parts.layers],
            "base_model": describe_target(target, tokenizer, revision),
        }
        if layer.hidden_size != parts.hidden_size:
            settings |= {"target_hidden_size": parts.hidden_size, "own_embeddings": True}
        if version != 3:
            settings |= _target_settings(parts)
        return cls(**{**settings, **fields})

    @property
    def hidden_size(self) -> int:
        """The head's hidden size."""
        return self.transformer_layer_config.hidden_size

    @property
    def vocab_size(self) -> int:
        """V, the size of the target's vocabulary."""
        return self.transformer_layer_config.vocab_size

    @property
    def feature_layers(self) -> list[int]:
        """The layers whose hidden states the head reads, as indices into `hidden_states`."""
        return list(self.eagle_aux_hidden_state_layer_ids or [])

    def target_shapes(self) -> dict[str, int]:
        """What a target must have for the head to fit: `hidden_size` and `vocab_size`."""
        return {"hidden_size": self.target_hidden_size or self.hidden_size, "vocab_size": self.vocab_size}

    def check_layers(self, count: int) -> None:
        """Checks the feature layers against the target's number of layers.

        Raises:
            ValueError: if they are not those of a target with that many.
        """
        # The last layer's output is normalised in `hidden_states`, and is not where engines take it from for EAGLE-3.
        is_third = self.eagle_version == 3
        last = count - 1 if is_third else count
        if self.feature_layers and (self.feature_layers[-1] > last if is_third else self.feature_layers != [last]):
            expected = f"at most {last}" if is_third else f"its last, {last}"
            raise ValueError(
                f"EAGLE version {self.eagle_version} reads hidden states of a target with {count} layers under the ids "
                f"{self.feature_layers}, and they must be {expected}."
            )

    @property
    def feature_size(self) -> int:
        """What one position's features hold: L t."""
        return len(self.feature_layers) * self.target_shapes()["hidden_size"]

    @property
    def own_vocab_size(self) -> int:
        """D, how many tokens the head knows."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether the head knows a part of the target's vocabulary only."""
        return self.draft_vocab_size != self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        """The fields as they go into `config.json`: the `speculators` layout and our own."""
        fields = super().to_dict()
        fields["architectures"] = ["Eagle3Speculator" if self.eagle_version == 3 else "EagleSpeculator"]
        fields["speculators_config"] = self.speculators_config or self._default_speculators_config()
        layer = layer_fields(self.transformer_layer_config)
        if (count := len(self.feature_layers)) not in (0, 3):
            layer[FEATURE_COUNT] = count  # vLLM looks for it here, and takes it for three where it is not said
        fields["transformer_layer_config"] = layer
        return fields

    def _settle_version(self) -> None:
        kind = self.speculators_model_type
        if self.eagle_version is None:
            self.eagle_version = 1 if kind == "eagle" else 3
        if self.eagle_version not in VERSIONS:
            raise ValueError(f"`eagle_version` must be one of {', '.join(map(str, VERSIONS))}, got {self.eagle_version!r}.")
        own_kind = "eagle3" if self.eagle_version == 3 else "eagle"
        if kind not in (None, own_kind):
            raise ValueError(f"`speculators_model_type` of EAGLE version {self.eagle_version} is {own_kind!r}, got {kind!r}.")
        self.speculators_model_type = own_kind

    def _check_fields(self) -> None:
        others = ONLY_EARLIER if self.eagle_version == 3 else ONLY_VERSION_3
        changed = [name for name in others if getattr(self, name) != type(self).__dataclass_fields__[name].default]
        if changed:
            raise ValueError(f"EAGLE version {self.eagle_version} has no {', '.join(changed)}; leave out such fields.")
        if not 1 <= (self.draft_vocab_size or 0) <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` must be between 1 and the target's {self.vocab_size}, got {self.draft_vocab_size!r}."
            )
        if self.eagle_version != 3 and self.has_own_vocabulary:
            raise ValueError(f"EAGLE version {self.eagle_version} has the target's vocabulary; leave out `draft_vocab_size`.")
        if (self.target_hidden_size or self.hidden_size) != self.hidden_size and not self.own_embeddings:
            raise ValueError("A head with another hidden size than the target's needs `own_embeddings=True`.")
        self._check_feature_layers()

    def _check_feature_layers(self) -> None:
        layers = self.eagle_aux_hidden_state_layer_ids
        if layers is None:
            return
        if self.eagle_version != 3 and len(layers) != 1:
            raise ValueError(f"EAGLE version {self.eagle_version} reads one hidden state, got the layers {layers}.")
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0:
            raise ValueError(
                "`eagle_aux_hidden_state_layer_ids` are indices into `hidden_states`, increasing, from 0 (the embeddings) on; "
                f"got {layers}."
            )
        if (count := (self.base_model or {}).get("layers")) is not None:
            self.check_layers(count)

    def _default_speculators_config(self) -> dict[str, Any]:
        made_for = self.base_model or {}
        return {
            "algorithm": self.speculators_model_type,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {
                "name_or_path": made_for.get("name_or_path"), "architectures": made_for.get("architectures") or []
            },
        }  # fmt: skip


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


class EagleHead(DraftHead):
    """An EAGLE head.

    Args:
        config: Its config.

    Raises:
        ValueError: if the config does not say which feature layers the head reads.
    """

    config_class = EagleConfig
    config: EagleConfig
    base_model_prefix = ""
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

    def set_draft_vocabulary(self, ids: Iterable[int] | Tensor) -> None:
        """Sets which of the target's tokens the head knows.

        Args:
            ids: D ids of the target.

        Raises:
            ValueError: if the head has the target's vocabulary, or the ids do not fit.
        """
        if not self.config.has_own_vocabulary:
            raise ValueError("The head has the target's whole vocabulary; make it with a `draft_vocab_size`.")
        known = vocabulary.check_ids(ids, self.config.own_vocab_size, self.config.vocab_size).to(self.d2t.device)
        self.d2t.copy_(vocabulary.offsets_from_ids(known))
        self.t2d.copy_(vocabulary.known_tokens(known, self.config.vocab_size))

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
        embeddings = self.embed(input_ids).to(hidden_states.dtype)
        arguments = attention_arguments(self.rotary_emb, hidden_states, attention_mask, position_ids, cache)
        if self.config.eagle_version == 3:
            hidden = self.layers[0](embeddings, hidden_states, **arguments)
        else:
            hidden = self.layers[0](self._fused_pair(embeddings, hidden_states), **arguments)
        for layer in self.layers[1:]:
            hidden = layer(hidden, **arguments)
        return hidden

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

    def scatter(self, logits: Tensor) -> Tensor:
        """Logits `[..., D]` as logits `[..., V]` over the target's vocabulary, -inf for tokens that the head does not know."""
        ids = self.draft_ids
        return logits if ids is None else vocabulary.scatter_logits(logits, ids, self.config.vocab_size)

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

    def _fused_pair(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        if self.config.add_para_norm:
            embeddings, hidden = self.embedding_layernorm(embeddings), self.hidden_states_layernorm(hidden)
        return self.fc(torch.cat([embeddings, hidden], dim=-1))

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


def default_feature_layers(layers: int) -> list[int]:
    """The feature layers of EAGLE-3 for a target with that many layers: low, middle and high (Li et al. 2025, and its code)."""
    if layers >= 7:  # with fewer, two of them are one
        return [2, layers // 2, layers - 3]
    return sorted({0, layers // 2, layers - 1})


def _target_settings(parts: TargetParts) -> dict[str, Any]:
    """What versions 1 and 2 need to use the target's embeddings and output layer as the target does."""
    return {
        "embedding_multiplier": parts.embedding_multiplier,
        "logit_scale": parts.logit_scale,
        "final_logit_softcapping": parts.final_logit_softcapping,
    }
