"""Medusa heads: several output layers that draft from one hidden state of the target (Cai et al. 2024).

Head k, counted from 0, reads the target's last hidden state at position i and gives the law of token i + k + 2: the target
itself says token i + 1. With a sequential dependence it also reads the tokens i + 1 to i + k + 1. Config and weights are named
as vLLM reads them; what it does not know, it leaves aside.

Shapes: B rows, N positions, n heads, h the hidden size, V the target's vocabulary, T the heads' own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from .base import ConfidenceHead, DraftHead, HeadConfig
from .facts import HeadFacts
from .provenance import describe_target
from .sequential import DEPENDENCES, MarkovHead, ResidualBlocks, ZeroLinear
from .target_parts import parts_of, transform_logits
from .vocabulary import DraftVocabulary

LITERATURE = {
    "medusa": "Cai et al. 2024, Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, "
    "arXiv 2401.10774",
    "hydra": "Ankner et al. 2024, Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding, arXiv 2402.05109",
}


class MedusaConfig(HeadConfig):
    """The config of `MedusaHeads`; see `HeadConfig` for what all heads have.

    Args:
        num_heads: n, how many tokens the heads draft.
        num_hidden_layers: Residual blocks of each head.
        hidden_size: h.
        vocab_size: V.
        truncated_vocab_size: T; `None` for the target's vocabulary.
        medusa_fc_bias: Whether the residual blocks have biases.
        original_lm_head: Whether the heads share one output layer; else each has its own.
        output_bias: Whether the output layers have biases.
        hidden_state_layer_ids: The layer that the heads read, as an index into `hidden_states`: the target's last.
        dependence: `"none"`; `"hydra"`: heads read the embeddings of the tokens drafted before; `"markov"`: the token before
            adds to the logits.
        markov_rank: The rank of the latter.
        max_paths: The most paths of a tree of drafts; for engines that ask.
        topk: The most tokens that a head offers for a tree; for engines that ask.
        head_accuracies: For each head, how often its most probable token, its second, ... were right when that was measured;
            `None` if it was not. The shape of draft trees follows from it.
    """

    model_type = "medusa"
    engine_architectures: ClassVar[list[str]] = ["MedusaModel"]

    num_heads: int = 4
    num_hidden_layers: int = 1
    hidden_size: int = 4096
    vocab_size: int = 32000
    truncated_vocab_size: int | None = None
    medusa_fc_bias: bool = True
    original_lm_head: bool = False
    output_bias: bool = False
    hidden_state_layer_ids: list[int] | None = None
    dependence: str = "none"
    markov_rank: int = 0
    max_paths: int = 64
    topk: int = 10
    head_accuracies: list[list[float]] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.truncated_vocab_size = self.vocab_size if self.truncated_vocab_size is None else self.truncated_vocab_size
        for name, least in {"num_heads": 1, "num_hidden_layers": 0, "hidden_size": 1, "vocab_size": 1}.items():
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                raise ValueError(f"`{name}` must be an integer of at least {least}, got {getattr(self, name)!r}.")
        if not 1 <= self.truncated_vocab_size <= self.vocab_size:
            raise ValueError(
                f"`truncated_vocab_size` must be between 1 and the target's {self.vocab_size}, got {self.truncated_vocab_size}."
            )
        self._check_dependence()
        self._check_accuracies()
        super().__post_init__(**kwargs)

    @classmethod
    def from_target(
        cls, target: PreTrainedModel, num_heads: int = 4, tokenizer: Any = None, revision: str | None = None, **fields: Any
    ) -> MedusaConfig:
        """A config of heads that fit a target.

        Args:
            target: The target.
            num_heads: n.
            tokenizer: The target's tokenizer, so that the config can tell it from others.
            revision: The revision that the target was loaded at.
            fields: Further fields of the config.

        Raises:
            ValueError: if the target has no usable output layer, or a field is not known or does not fit.
        """
        parts = parts_of(target)
        settings: dict[str, Any] = {
            "num_heads": num_heads,
            "hidden_size": parts.hidden_size,
            "vocab_size": parts.vocab_size,
            "output_bias": parts.output_bias is not None,
            "hidden_state_layer_ids": [parts.layers],
            "logit_scale": parts.logit_scale,
            "final_logit_softcapping": parts.final_logit_softcapping,
            "embedding_multiplier": parts.embedding_multiplier,
            "base_model": describe_target(target, tokenizer, revision),
        }
        return cls(**{**settings, **fields})

    @property
    def feature_layers(self) -> list[int]:
        """The layer whose hidden state the heads read, as an index into `hidden_states`."""
        return list(self.hidden_state_layer_ids or [])

    def target_shapes(self) -> dict[str, int]:
        """What a target must have for the heads to fit: `hidden_size` and `vocab_size`."""
        return {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size}

    def check_layers(self, count: int) -> None:
        """Checks the feature layer against the target's number of layers.

        Raises:
            ValueError: if it is not the last.
        """
        if self.feature_layers not in ([], [count]):
            raise ValueError(
                f"The heads read the hidden state {self.feature_layers}, and it must be the target's last, {count}."
            )

    def facts(self) -> HeadFacts:
        """What the heads are, in words for their model card."""
        # vLLM would leave the others aside, and accept less.
        is_plain = self.dependence == "none" and not self.output_bias and self.final_logit_softcapping is None
        beside = "" if self.dependence == "none" else f" with {self.dependence.capitalize()} dependence"
        return HeadFacts(
            kind=f"{self.num_heads} Medusa draft heads{beside}",
            tags=("medusa", *(("hydra",) if self.dependence == "hydra" else ())),
            literature=tuple(LITERATURE[name] for name in ("medusa", self.dependence) if name in LITERATURE),
            vllm={"method": "medusa", "num_speculative_tokens": self.num_heads} if is_plain else None,
        )

    @property
    def own_vocab_size(self) -> int:
        """T, how many tokens the heads know."""
        return self.vocab_size if self.truncated_vocab_size is None else self.truncated_vocab_size

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether the heads know a part of the target's vocabulary only."""
        return self.truncated_vocab_size != self.vocab_size

    def _check_accuracies(self) -> None:
        accuracies = self.head_accuracies
        if accuracies is None:
            return
        shares = [share for head in accuracies for share in head]
        if len(accuracies) != self.num_heads or not all(accuracies) or not all(0 <= share <= 1 for share in shares):
            raise ValueError(
                f"`head_accuracies` must have a list of shares between 0 and 1 for each of the {self.num_heads} heads, got "
                f"{accuracies}."
            )

    def _check_dependence(self) -> None:
        if self.dependence not in DEPENDENCES:
            raise ValueError(f"`dependence` must be one of {', '.join(DEPENDENCES)}, got {self.dependence!r}.")
        if (self.markov_rank > 0) != (self.dependence == "markov"):
            raise ValueError(
                f'`markov_rank` must be at least 1 with `dependence="markov"` and 0 without, got {self.markov_rank} with '
                f"{self.dependence!r}."
            )
        if self.dependence == "hydra" and self.num_hidden_layers < 1:
            raise ValueError('`dependence="hydra"` needs `num_hidden_layers` of at least 1.')


@dataclass
class MedusaOutput(ModelOutput):
    """What a pass of `MedusaHeads` gives.

    Args:
        logits: `[B, N, n, T]` over the heads' vocabulary.
        confidence: `[B, N, n]` logits of acceptance, or `None`.
    """

    logits: Tensor | None = None
    confidence: Tensor | None = None


class MedusaHeads(DraftVocabulary, DraftHead):
    """Medusa heads.

    Args:
        config: Their config.
    """

    config_class = MedusaConfig
    config: MedusaConfig
    base_model_prefix = ""
    vocabulary_field = "truncated_vocab_size"

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        conditions = [index + 1 if config.dependence == "hydra" else 0 for index in range(config.num_heads)]
        self.blocks = nn.ModuleList(
            ResidualBlocks(config.hidden_size, config.num_hidden_layers, config.medusa_fc_bias, count) for count in conditions
        )
        if config.original_lm_head:
            self.lm_head = self._new_output(config)
        else:
            self.lm_heads = nn.ModuleList(self._new_output(config) for _ in range(config.num_heads))
        if config.has_own_vocabulary:
            self.register_buffer("token_map", torch.arange(config.own_vocab_size))
        if config.dependence == "markov":
            self.markov_head = MarkovHead(config.vocab_size, config.own_vocab_size, config.markov_rank)
        if config.confidence:
            self.confidence_head = ConfidenceHead(config.hidden_size)
        self.post_init()

    @classmethod
    def from_target(
        cls, target: PreTrainedModel, num_heads: int = 4, draft_tokens: Iterable[int] | None = None, **fields: Any
    ) -> MedusaHeads:
        """Heads for a target, in its precision and place, bound to it, that start from its own next-token law.

        Args:
            target: The target.
            num_heads: n.
            draft_tokens: The target's ids that the heads shall know; `None` for all.
            fields: Arguments of `MedusaConfig.from_target`.
        """
        ids = None if draft_tokens is None else list(draft_tokens)
        if ids is not None:
            fields["truncated_vocab_size"] = len(ids)
        heads = cls.fresh(MedusaConfig.from_target(target, num_heads, **fields), target.dtype, target.device)
        heads.bind(target)
        if ids is not None:
            heads.set_draft_vocabulary(ids)
        heads.warm_start(target)
        return heads

    @property
    def draft_ids(self) -> Tensor | None:
        """`[T]` the target's ids of the heads' vocabulary; `None` if it is the target's."""
        return self.token_map if self.config.has_own_vocabulary else None

    @torch.no_grad()
    def warm_start(self, target: PreTrainedModel) -> None:
        """Makes every head give the target's next-token law: blocks that change nothing, and the target's output layer.

        Args:
            target: The target.
        """
        parts = self.check_against(target)
        for blocks in self.blocks:
            cast(ResidualBlocks, blocks).pass_through()
        ids = torch.arange(parts.vocab_size) if self.draft_ids is None else self.draft_ids
        for layer in [self.lm_head] if self.config.original_lm_head else self.lm_heads:
            output = cast(nn.Linear, layer)
            output.weight.copy_(parts.output_weight[ids])
            if self.config.output_bias and parts.output_bias is not None:
                output.bias.copy_(parts.output_bias[ids])

    def shares_output(self) -> bool:
        """Whether the output layer that the heads share is still the target's.

        Raises:
            ValueError: if the heads are not bound to their target.
        """
        output = self._of_target("output")
        own, theirs = self.lm_head.weight, cast(Tensor, output.weight)
        return own.shape == theirs.shape and torch.equal(own, theirs.to(own))

    def forward(self, hidden_states: Tensor, paths: Tensor | None = None) -> MedusaOutput:
        """All heads at once.

        Args:
            hidden_states: `[B, N, h]` the target's last hidden states.
            paths: `[B, N, n]` at position i the tokens i + 1 to i + n (`paths_along`); for heads with a sequential dependence.

        Returns:
            The logits of the tokens i + 2 to i + n + 1.

        Raises:
            ValueError: if the heads need `paths`, or the hidden states are of another size.
        """
        self._check_path(paths)
        output = self.without_markov(hidden_states, paths)
        if self.config.dependence == "markov" and paths is not None:
            output.logits = output.logits + self.markov_head(paths)
        return output

    def without_markov(self, hidden_states: Tensor, paths: Tensor | None = None) -> MedusaOutput:
        """All heads at once, without what a Markov head adds: a draft adds `markov_head` of its tokens as it goes.

        Args:
            hidden_states: `[B, N, h]` the target's last hidden states.
            paths: `[B, N, n]` as for `forward`, for heads with Hydra's dependence.
        """
        before = [None if paths is None else paths[..., : index + 1] for index in range(self.config.num_heads)]
        states = torch.stack([self._state(index, hidden_states, path) for index, path in enumerate(before)], dim=-2)
        if self.config.original_lm_head:
            logits = self.lm_head(states)
        else:
            logits = torch.stack([output(states[..., index, :]) for index, output in enumerate(self.lm_heads)], dim=-2)
        return MedusaOutput(self._transformed(logits), self.confidence_head(states) if self.config.confidence else None)

    def head(self, index: int, hidden_states: Tensor, path: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """One head; a draft with Hydra's dependence goes head by head.

        Args:
            index: Which one.
            hidden_states: `[..., h]` the target's last hidden states.
            path: `[..., index + 1]` the tokens after them: the target's own and those drafted so far.

        Returns:
            `[..., T]` the logits of the token after the path, and `[...]` logits of its acceptance or `None`.

        Raises:
            ValueError: if the head needs a `path`, or the hidden states are of another size.
        """
        self._check_path(path)
        state = self._state(index, hidden_states, path)
        output = self.lm_head if self.config.original_lm_head else self.lm_heads[index]
        logits = self._transformed(output(state))
        if self.config.dependence == "markov" and path is not None:
            logits = logits + self.markov_head(path[..., -1])
        return logits, self.confidence_head(state) if self.config.confidence else None

    def _store_draft_ids(self, ids: Tensor) -> None:
        self.token_map.copy_(ids)

    def _check_path(self, path: Tensor | None) -> None:
        if path is None and self.config.dependence != "none":
            raise ValueError(f'Heads with `dependence="{self.config.dependence}"` need the tokens before: pass `paths`.')

    def _state(self, index: int, hidden: Tensor, path: Tensor | None) -> Tensor:
        """`[..., h]` what a head's output layer reads."""
        if hidden.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"The heads read {self.config.hidden_size} values for each position, the target's last hidden state, got "
                f"{hidden.shape[-1]}."
            )
        hidden = hidden.to(self.dtype)
        if self.config.dependence == "hydra" and path is not None:
            hidden = self._conditioned(hidden, path)
        return self.blocks[index](hidden)

    def _transformed(self, logits: Tensor) -> Tensor:
        return transform_logits(logits, self.config.logit_scale, self.config.final_logit_softcapping)

    def _conditioned(self, hidden: Tensor, path: Tensor) -> Tensor:
        table = cast(Tensor, self._of_target("embedding").weight).detach()
        embeddings = nn.functional.embedding(path, table).to(hidden.dtype) * self.config.embedding_multiplier
        return torch.cat([hidden, embeddings.flatten(-2)], dim=-1)

    @staticmethod
    def _new_output(config: MedusaConfig) -> nn.Linear:
        return nn.Linear(config.hidden_size, config.own_vocab_size, bias=config.output_bias)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ZeroLinear):
            init.zeros_(module.weight)
        elif isinstance(module, MedusaHeads) and self.config.has_own_vocabulary:
            init.copy_(module.token_map, torch.arange(self.config.own_vocab_size))


def paths_along(input_ids: Tensor, heads: int) -> Tensor:
    """`[B, N, n]` at each position its token and those after it, as `MedusaHeads` reads them; 0 beyond the end.

    Args:
        input_ids: `[B, N]` at position i the token i + 1.
        heads: n.
    """
    padded = nn.functional.pad(input_ids, (0, heads - 1))
    return padded.unfold(1, heads, 1)
