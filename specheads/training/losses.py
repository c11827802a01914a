"""What heads are trained to make small: one function per loss, from the laws at some positions to a value at each.

To add one, write the function and name it in `LOSSES`. Losses mix with weights; an `Objective` is such a mixture.

Where the head knows only some tokens, the divergences are those to p restricted to them and made to sum to 1, weighted with the
probability that p gives them: what cannot be drafted teaches nothing. Acceptance is always counted against p as it is.

Shapes: N positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .laws import Laws

Loss = Callable[..., Tensor]
# In place of the logarithm of 0, where the target excludes a token: enough to learn that, and finite.
LOG_FLOOR = -30.0


def cross_entropy(laws: Laws) -> Tensor:
    """-log q of the text's token; 0 where the head does not know it."""
    return -laws.token_log_probs.masked_fill(laws.tokens < 0, 0)


def forward_kl(laws: Laws) -> Tensor:
    """KL(p‖q), with the target's whole law in place of one token (Zhou et al. 2024, DistillSpec)."""
    target = laws.target
    cross = target.mass * laws.normaliser - (target.probs * laws.logits).sum(dim=-1)
    return cross + target.neg_entropy - torch.special.xlogy(target.mass, target.mass)


def reverse_kl(laws: Laws) -> Tensor:
    """KL(q‖p): q keeps to what p holds likely, and may leave some of it out."""
    target = laws.target
    log_target = target.log_probs.clamp(min=LOG_FLOOR) - _log_mass(target.mass)
    return target.mass * (laws.probs * (laws.log_probs - log_target)).sum(dim=-1)


def jensen_shannon(laws: Laws) -> Tensor:
    """The mean divergence of p and q to their mean; bounded, also where p excludes tokens."""
    target = laws.target
    known = target.probs / target.mass.clamp(min=_tiny(target.mass))[:, None]
    mean = (known + laws.probs) / 2
    entropy = torch.special.entr(mean).sum(dim=-1)
    parts = torch.special.entr(known).sum(dim=-1) - (laws.probs * laws.log_probs).sum(dim=-1)
    return target.mass * (entropy - parts / 2)


def total_variation(laws: Laws) -> Tensor:
    """1 - α: exactly how often a drafted token is rejected. Weak where q is far from p."""
    return 1 - laws.acceptance


def negative_log_acceptance(laws: Laws) -> Tensor:
    """-log α (LK-α, arXiv 2602.23881): the gradient of `total_variation` divided by α, so that it is strong from the start."""
    return -laws.acceptance.clamp(min=_tiny(laws.acceptance)).log()


def adaptive_kl_tv(laws: Laws, eta: float = 3.0) -> Tensor:
    """λ KL(p‖q) + (1 - λ) TV with λ = exp(-η α) per position (LK-λ, arXiv 2602.23881).

    KL finds the target's tokens while little is accepted, and total variation does the rest.

    Args:
        laws: The laws.
        eta: η; 3 for EAGLE-3, 10 for Medusa in the paper.
    """
    share = (-eta * laws.acceptance.detach()).exp()
    return share * forward_kl(laws) + (1 - share) * total_variation(laws)


def adaptive_kl_log(laws: Laws, eta: float = 3.0) -> Tensor:
    """As `adaptive_kl_tv`, with -log α in place of TV.

    Args:
        laws: The laws.
        eta: η.
    """
    share = (-eta * laws.acceptance.detach()).exp()
    return share * forward_kl(laws) + (1 - share) * negative_log_acceptance(laws)


def top_k_cross_entropy(laws: Laws, k: int = 10) -> Tensor:
    """-Σ p log q over the target's k most probable tokens (Zhang et al. 2025, HASS); goes with another loss.

    Args:
        laws: The laws.
        k: How many.
    """
    best = laws.target.probs.topk(min(k, laws.logits.shape[-1]), dim=-1)
    return -(best.values * (laws.logits.gather(-1, best.indices) - laws.normaliser[:, None])).sum(dim=-1)


def feature_smooth_l1(laws: Laws) -> Tensor:
    """How far the head's hidden states are from the target's (Li et al. 2024, EAGLE); goes with another loss.

    Raises:
        ValueError: if the head does not stand in for the target's last hidden states.
    """
    if laws.states is None or laws.target_states is None or laws.states.shape != laws.target_states.shape:
        raise ValueError(
            "`feature_smooth_l1` compares hidden states, and this head does not predict the target's; it is for EAGLE "
            "versions 1 and 2."
        )
    target = laws.target_states.to(laws.states.dtype)
    return nn.functional.smooth_l1_loss(laws.states, target, reduction="none").mean(dim=-1)


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "lk": adaptive_kl_tv,
    "lk_log": adaptive_kl_log,
    "top_k": top_k_cross_entropy,
    "feature_smooth_l1": feature_smooth_l1,
}
# These say too little by themselves.
ONLY_MIXED = ("top_k", "feature_smooth_l1")
# These move q where it has some probability already: a fresh head stays on what it began with, and one that `forward_kl` has
# trained gets better.
FOR_TRAINED_HEADS = ("reverse_kl", "jensen_shannon", "total_variation", "negative_log_acceptance")
# Mixtures with names.
RECIPES: dict[str, dict[str, float]] = {
    "eagle": {"feature_smooth_l1": 1.0, "forward_kl": 0.1},
    "hass": {"feature_smooth_l1": 1.0, "forward_kl": 0.1, "top_k": 1.0},
    "dspark": {"cross_entropy": 0.1, "total_variation": 1.8},  # 0.9 times the L1 distance
}


@dataclass(frozen=True)
class Objective:
    """A mixture of losses.

    Args:
        terms: Each loss with its weight, under its name.
    """

    terms: dict[str, tuple[float, Loss]]

    @classmethod
    def parse(cls, wanted: str | Mapping[str, Any]) -> Objective:
        """An objective from how a user writes it.

        Args:
            wanted: The name of a loss or of a mixture; or names with weights; or names with a dict of a `weight` and the
                loss's own arguments, as in `{"lk": {"eta": 10}}`.

        Raises:
            ValueError: if a name, a weight or an argument is not one.
        """
        if isinstance(wanted, str):
            wanted = RECIPES.get(wanted, {wanted: 1.0})
        unknown = [name for name in wanted if name not in LOSSES]
        if unknown or not wanted:
            raise ValueError(f"Unknown loss {', '.join(unknown) or wanted}; known are {', '.join([*LOSSES, *RECIPES])}.")
        if not set(wanted) - set(ONLY_MIXED):
            raise ValueError(f"{' and '.join(wanted)} must be mixed with another loss, as in {RECIPES['hass']}.")
        return cls({name: _term(name, value) for name, value in wanted.items()})

    @property
    def is_for_trained_heads(self) -> bool:
        """Whether a fresh head would learn little from it."""
        return set(self.terms) <= {*FOR_TRAINED_HEADS, *ONLY_MIXED}

    def __call__(self, laws: Laws) -> Tensor:
        """The loss `[N]`."""
        return torch.stack([weight * loss(laws) for weight, loss in self.terms.values()]).sum(dim=0)


def _term(name: str, value: Any) -> tuple[float, Loss]:
    settings = dict(value) if isinstance(value, Mapping) else {"weight": value}
    weight = settings.pop("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise ValueError(f"The weight of {name} must be a number above 0, got {weight!r}.")
    own = list(inspect.signature(LOSSES[name]).parameters)[1:]
    if set(settings) - set(own):
        raise ValueError(f"{name} takes {', '.join(own) or 'no arguments'}, got {', '.join(settings)}.")
    return float(weight), partial(LOSSES[name], **settings) if settings else LOSSES[name]


def _log_mass(mass: Tensor) -> Tensor:
    return mass.clamp(min=_tiny(mass)).log()[:, None]


def _tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny
