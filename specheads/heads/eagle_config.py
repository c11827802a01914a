"""The config of EAGLE heads. Its file is the `speculators` layout, which serving engines read, with a few more keys.

Shapes: L feature layers, t the target's hidden size, h the head's, V the target's vocabulary, D the draft's.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .base import HeadConfig
from .facts import HeadFacts
from .layers import FEATURE_COUNT, build_layer_config, layer_config_from, layer_fields
from .provenance import describe_target
from .target_parts import TargetParts, parts_of

VERSIONS = (1, 2, 3)
# Fields by version: others must keep their default.
ONLY_VERSION_3 = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size")
ONLY_EARLIER = ("fc_bias", "add_para_norm", "logit_scale", "final_logit_softcapping")
LITERATURE = {
    1: "Li et al. 2024, EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty, arXiv 2401.15077",
    2: "Li et al. 2024, EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees, arXiv 2406.16858",
    3: "Li et al. 2025, EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test, "
    "arXiv 2503.01840",
}


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
        fc_bias: Whether the fusing layer of versions 1 and 2 has a bias; vLLM leaves it out.
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
    fc_bias: bool = False
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

    def facts(self) -> HeadFacts:
        """What the head is, in words for its model card."""
        settings = self.speculators_config or self._default_speculators_config()
        drafted = settings["proposal_methods"][0]["speculative_tokens"]
        return HeadFacts(
            kind=f"EAGLE-{self.eagle_version} draft head",
            tags=(f"eagle{self.eagle_version}",),
            literature=(LITERATURE[self.eagle_version or 3],),
            vllm={"method": "eagle3", "num_speculative_tokens": drafted} if self.eagle_version == 3 else None,
            engines="Engines read EAGLE-1 and 2 in the layout of EAGLE's own code, which "
            '`specheads.export_head(head, folder, format="eagle")` writes.',
        )

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

    def suggest(self, draft_tokens: int) -> None:
        """Tells engines how many tokens are best drafted; where nothing is told, it is 5."""
        self.speculators_config = self.speculators_config or self._default_speculators_config()
        self.speculators_config["proposal_methods"][0]["speculative_tokens"] = draft_tokens

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
