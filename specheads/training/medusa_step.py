"""Drafts of Medusa heads in training: all heads together.

Shapes: R roots, N of them, K depths, t the target's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..heads import MedusaHeads
from .batch import Roots, TrainingBatch
from .drafting import DepthOutput
from .teacher import TeacherStates


class MedusaDrafts:
    """The drafts of Medusa heads from all roots of a batch (see `Drafts`).

    Args:
        head: The heads.
        batch: The texts.
        given: The target's states of them.
        roots: The roots.
        depth: K.
    """

    def __init__(self, head: MedusaHeads, batch: TrainingBatch, given: TeacherStates, roots: Roots, depth: int):
        self.head = head
        device = given.features.device
        rows, places = roots.rows.to(device), roots.places.to(device)
        self.states = given.features[rows, places - 1][None]
        # Each root and the tokens after it, as far as the heads read them.
        reach = torch.arange(depth, device=device)
        last = batch.input_ids.shape[1] - 1
        self.paths = batch.input_ids[rows[:, None], (places[:, None] + reach).clamp(max=last)]
        self.paths = self.paths.clamp(0, head.config.vocab_size - 1)

    def read(self, states: Tensor, roots: Tensor, chosen: Sequence[Tensor]) -> list[DepthOutput]:
        """What each of the heads says (`Drafts.read`)."""
        paths = self.paths[roots]
        return [
            DepthOutput(*self.head.head(depth, states[0, places], paths[places, : depth + 1]))
            for depth, places in enumerate(chosen)
        ]

    @staticmethod
    def check_depth(head: MedusaHeads, depth: int) -> None:
        """Checks that there are as many heads.

        Raises:
            ValueError: if not.
        """
        if depth > head.config.num_heads:
            raise ValueError(f"{head.config.num_heads} heads draft that many tokens, and the training is to go {depth} deep.")
