"""Drafts of an EAGLE head in training.

Shapes: R roots, N of them, K depths, h the head's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
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

    def read(self, states: Tensor, roots: Tensor, chosen: Sequence[Tensor]) -> list[DepthOutput]:
        """What the head says at each depth (`Drafts.read`); the output layer, and its gradient, go over all of them at once."""
        output = self.head.read(torch.cat([states[depth, places] for depth, places in enumerate(chosen)]))
        sizes = [len(places) for places in chosen]
        confidence = [None] * len(sizes) if output.confidence is None else output.confidence.split(sizes)
        logits, fed = cast(Tensor, output.logits).split(sizes), cast(Tensor, output.hidden_states).split(sizes)
        return [DepthOutput(*own) for own in zip(logits, confidence, fed, strict=True)]

    @staticmethod
    def check_depth(head: EagleHead, depth: int) -> None:
        """An EAGLE head drafts as far as one likes."""
