"""What a head gives for the drafts from some roots, whatever the head.

Shapes: R roots, N of them, S sets of states, K depths, h what the head reads, D the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass
class DepthOutput:
    """What a head says at one depth.

    Args:
        logits: `[N, D]`.
        confidence: `[N]` logits of acceptance, or `None`.
        states: `[N, h]` what the next step would read, for heads that feed on it.
    """

    logits: Tensor
    confidence: Tensor | None = None
    states: Tensor | None = None


class Drafts(Protocol):
    """The drafts from all roots of a batch.

    Attributes:
        states: `[S, R, h]` what has been computed for all of them; the logits come chunk by chunk.
    """

    states: Tensor

    def read(self, states: Tensor, roots: Tensor, chosen: Sequence[Tensor]) -> list[DepthOutput]:
        """What the head says at each depth.

        Args:
            states: `[S, N, h]` the roots' part of `states`.
            roots: `[N]` their indices.
            chosen: For each depth, which of the N are asked for.
        """
        ...
