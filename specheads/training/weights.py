"""How much each depth of a draft counts: a token far down is drafted in vain when one before it is rejected.

Shapes: R roots, K depths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Weighting = Callable[[Tensor, Tensor, float], Tensor]


def geometric(acceptance: Tensor, trained: Tensor, decay: float) -> Tensor:
    """`decay` to the power of k - 1: 0.8 in Medusa and EAGLE-3, exp(-1 / 4) = 0.78 in DSpark; 1 for equal weights."""
    depths = torch.arange(acceptance.shape[1], device=acceptance.device, dtype=acceptance.dtype)
    return (decay**depths).expand_as(acceptance)


def length_aware(acceptance: Tensor, trained: Tensor, smoothing: float) -> Tensor:
    """w_k = Σ_{m ≥ k} Π_{j ≤ m} ((1 - s) α_j + s), without a gradient.

    Without smoothing, Σ w_k (-log α_k) has minus the gradient of the expected accepted length Σ_m Π_{j ≤ m} α_j: a position
    counts as much as is accepted up to it and after it. While nothing is accepted that is nothing, so some smoothing is needed
    to start with (arXiv 2605.18810, D-PACE).

    Args:
        acceptance: `[R, K]` α, anything where nothing is trained.
        trained: `[R, K]` bool.
        smoothing: s, between 0 and 1.
    """
    smoothed = ((1 - smoothing) * acceptance + smoothing) * trained
    reached = smoothed.cumprod(dim=1)
    return reached.flip(1).cumsum(dim=1).flip(1)


WEIGHTINGS: dict[str, tuple[Weighting, float]] = {
    "geometric": (geometric, 0.8),
    "length_aware": (length_aware, 0.5),
}


@dataclass(frozen=True)
class DepthWeights:
    """A way to weigh depths.

    Args:
        name: One of `WEIGHTINGS`.
        value: Its setting, between 0 and 1; `None` for what is usual.

    Raises:
        ValueError: if the name is not known, or the value is out of range.
    """

    name: str = "length_aware"
    value: float | None = None

    def __post_init__(self) -> None:
        if self.name not in WEIGHTINGS:
            raise ValueError(f"Unknown depth weights {self.name!r}; known are {', '.join(WEIGHTINGS)}.")
        if self.value is not None and not 0 <= self.value <= 1:
            raise ValueError(f"The setting of depth weights must be between 0 and 1, got {self.value}.")

    @classmethod
    def parse(cls, wanted: str | Mapping[str, float]) -> DepthWeights:
        """From a name, or a name with its setting as in `{"geometric": 0.8}`."""
        if isinstance(wanted, str):
            return cls(wanted)
        if len(wanted) != 1:
            raise ValueError(f"Depth weights are one name with its setting, got {dict(wanted)}.")
        ((name, value),) = wanted.items()
        return cls(name, value)

    @torch.no_grad()
    def __call__(self, acceptance: Tensor, trained: Tensor) -> Tensor:
        """The weights `[R, K]`.

        Args:
            acceptance: `[R, K]` α of each depth.
            trained: `[R, K]` bool: which depths are trained.
        """
        weigh, usual = WEIGHTINGS[self.name]
        return weigh(acceptance, trained, usual if self.value is None else self.value)
