"""Drafts of an EAGLE head in training.

Shapes: R roots, N of them, K depths, h the head's hidden size.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from ..heads import EagleHead
from .batch import Roots, TrainingBatch
from .drafting import DepthOutput
from .teacher import TeacherStates
from .unroll import unroll


class EagleDrafts:
    """The drafts of an EAGLE head from all roots of a batch (see `Drafts`).

    Args:
        head: The head.
        batch: The texts.
        given: The target's states of them.
        roots: The roots.
        depth: K.
    """

    def __init__(self, head: EagleHead, batch: TrainingBatch, given: TeacherStates, roots: Roots, depth: int):
        self.head = head
        self.states = unroll(head, batch, given.features, roots, depth)

    def read(self, states: Tensor, depth: int, roots: Tensor) -> DepthOutput:
        """What the head says at one depth (`Drafts.read`)."""
        output = self.head.read(states[depth])
        return DepthOutput(cast(Tensor, output.logits), output.confidence, output.hidden_states)

    @staticmethod
    def check_depth(head: EagleHead, depth: int) -> None:
        """An EAGLE head drafts as far as one likes."""
