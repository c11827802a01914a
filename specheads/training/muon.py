"""Muon for the matrices of a head's layers, AdamW for all else, as one optimiser (Jordan 2024).

Muon makes the update of a matrix orthogonal, so that all its directions learn alike. It is not for embeddings and output
layers, whose rows are tokens of very different frequency, nor for vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from ..heads import DraftHead

MOMENTUM = 0.95


class MuonWithAdamW(Optimizer):
    """Muon for some of a head's weights, AdamW for the others.

    Args:
        head: The head.
        learning_rate: Muon's; its updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982).
        weight_decay: Of all weights but vectors.
        adamw: Further arguments of AdamW, its learning rate `lr` among them.
    """

    def __init__(self, head: DraftHead, learning_rate: float, weight_decay: float, adamw: dict[str, Any]):
        matrices, tables, vectors = by_kind(head)
        decays = [{"params": tables, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.parts = (
            Muon(matrices, learning_rate, weight_decay, MOMENTUM, adjust_lr_fn="match_rms_adamw"),
            AdamW([group for group in decays if group["params"]], **adamw),
        )
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of both.

        Args:
            closure: Computes the loss anew, if given.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up a state that `state_dict` gave."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        # Schedules and checkpoints see the groups and the state of this optimiser; its parts work on the very same.
        muon, adamw = self.parts
        muon.param_groups, adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        muon.state = adamw.state = self.state


def by_kind(head: DraftHead) -> tuple[Sequence[nn.Parameter], Sequence[nn.Parameter], Sequence[nn.Parameter]]:
    """The weights of a head that are trained: matrices of layers, tables with a row for each token, and vectors."""
    sizes = {head.config.own_vocab_size, head.config.vocab_size}
    trained = [weight for weight in head.parameters() if weight.requires_grad]
    large = [weight for weight in trained if weight.ndim == 2]
    tables = [weight for weight in large if weight.shape[0] in sizes]
    matrices = [weight for weight in large if weight.shape[0] not in sizes]
    return matrices, tables, [weight for weight in trained if weight.ndim != 2]
