"""The laws that losses and metrics compare: the target's p and the draft's q, on a chunk of positions.

A head may know only some of the target's tokens. Then p is restricted to them and not made to sum to 1 again: what is outside
can be accepted of no draft.

Shapes: N positions, V the target's vocabulary, D the draft's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

LEAST_LOG = -69.0  # the logarithm of 1e-30


@dataclass(frozen=True)
class Sampling:
    """How text is sampled, as `generate` does it.

    Args:
        temperature: 0 for the most probable token.
        top_k: How many tokens are kept; 0 for all.
        top_p: The probability that the kept tokens have together at least.

    Raises:
        ValueError: if a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"Sampling needs a temperature and a top_k of at least 0 and a top_p in (0, 1], got {self.temperature}, "
                f"{self.top_k} and {self.top_p}."
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0

    def warp(self, logits: Tensor) -> Tensor:
        """Scores `[N, V]` whose softmax is the law that tokens are drawn from, by the warpers of `generate`."""
        warpers: list[TemperatureLogitsWarper | TopKLogitsWarper | TopPLogitsWarper] = []
        if self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        for warper in warpers:
            logits = warper(None, logits)
        return logits


class DraftVocabulary:
    """Which of the target's tokens a head knows.

    Args:
        ids: `[D]` the target's ids, in the head's order; `None` if it knows all.
        vocab_size: V.
    """

    def __init__(self, ids: Tensor | None, vocab_size: int):
        self.ids = ids
        self.places: Tensor | None = None
        if ids is not None:
            self.places = ids.new_full((vocab_size,), -1)
            self.places[ids] = torch.arange(len(ids), device=ids.device)

    def index(self, tokens: Tensor) -> Tensor:
        """The target's tokens `[N]` as indices into the draft vocabulary, -1 for those that it lacks."""
        return tokens if self.places is None else self.places[tokens]


@dataclass
class TargetLaws:
    """The target's laws on the draft vocabulary.

    Args:
        log_probs: `[N, D]` of the tokens that the head knows; -inf where warping took a token away.
        probs: `[N, D]`, summing to `mass`.
        mass: `[N]` the probability of all tokens that the head knows.
        neg_entropy: `[N]` Σ p log p over them.
    """

    log_probs: Tensor
    probs: Tensor
    mass: Tensor
    neg_entropy: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, scores: Tensor, draft_ids: Tensor | None) -> TargetLaws:
        """From scores over the target's vocabulary.

        Args:
            scores: `[N, V]` logits, warped or not.
            draft_ids: `[D]` the target's ids of the draft vocabulary; `None` if it is the target's.
        """
        normaliser = scores.logsumexp(dim=-1, keepdim=True)
        log_probs = (scores if draft_ids is None else scores.index_select(-1, draft_ids)) - normaliser
        probs = log_probs.exp()
        mass = torch.ones_like(probs[:, 0]) if draft_ids is None else probs.sum(dim=-1)
        return cls(log_probs, probs, mass, torch.special.entr(probs).sum(dim=-1).neg())

    def rows(self, index: Tensor) -> TargetLaws:
        """Those of some positions `[M]`, on the CPU; without a copy where they follow each other."""
        where: Tensor | slice = index.to(self.mass.device)
        if len(index) and int(index[-1] - index[0]) + 1 == len(index) and bool((index.diff() == 1).all()):
            where = slice(int(index[0]), int(index[-1]) + 1)
        return TargetLaws(self.log_probs[where], self.probs[where], self.mass[where], self.neg_entropy[where])


@dataclass
class Laws:
    """What a loss is computed from.

    Args:
        logits: `[N, D]` the draft's, warped or not.
        target: The target's laws at the same positions.
        tokens: `[N]` the text's tokens, as indices into the draft vocabulary; -1 for those that it lacks.
        states: `[N, h]` the head's hidden states that the next step reads, for losses on them; `None` if it has none.
        target_states: `[N, t]` the target's that they stand for.
    """

    logits: Tensor
    target: TargetLaws
    tokens: Tensor
    states: Tensor | None = None
    target_states: Tensor | None = None

    @cached_property
    def normaliser(self) -> Tensor:
        """`[N]` what the draft's logits have more than its log probabilities."""
        return self.logits.logsumexp(dim=-1)

    @cached_property
    def probs(self) -> Tensor:
        """`[N, D]` q."""
        return self.logits.softmax(dim=-1)

    @cached_property
    def log_probs(self) -> Tensor:
        """`[N, D]` log q."""
        return self.logits.log_softmax(dim=-1)

    @cached_property
    def acceptance(self) -> Tensor:
        """`[N]` α = Σ min(p, q), how often a token drawn from q is accepted."""
        return torch.minimum(self.target.probs, self.probs).sum(dim=-1)

    @property
    def token_log_probs(self) -> Tensor:
        """`[N]` log q of the text's tokens; -inf for those that the head does not know."""
        known = self.logits.gather(-1, self.tokens.clamp(min=0)[:, None])[:, 0] - self.normaliser
        return known.masked_fill(self.tokens < 0, -torch.inf)

    @property
    def token_ratio(self) -> Tensor:
        """`[N]` q/p of the text's tokens, 0 for those that the head does not know."""
        log_target = self.target.log_probs.gather(-1, self.tokens.clamp(min=0)[:, None])[:, 0]
        # A text that was not written under these settings may hold tokens that they exclude.
        return (self.token_log_probs - log_target.clamp(min=LEAST_LOG)).exp()
