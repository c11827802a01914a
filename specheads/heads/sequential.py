"""How parallel heads learn of the tokens drafted before; as they are, each guesses without knowing the one before.

Shapes: h the hidden size, V the target's vocabulary, T the heads' own, r the rank.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

DEPENDENCES = ("none", "hydra", "markov")


class ZeroLinear(nn.Linear):
    """A linear layer whose fresh weights are zero: what it adds to is unchanged at first."""


class ResidualBlocks(nn.Module):
    """A head's residual blocks x + SiLU(W x + b) (Cai et al. 2024, Medusa).

    Args:
        size: h.
        count: How many blocks.
        bias: Whether they have biases.
        conditions: How many embeddings of drafted tokens the first one reads beside the hidden state (Ankner et al. 2024,
            Hydra); its residual path is then a layer too, since it leads to a smaller size.
    """

    def __init__(self, size: int, count: int, bias: bool, conditions: int = 0):
        super().__init__()
        widths = [size * (conditions + 1), *[size] * (count - 1)][:count]
        self.layers = nn.ModuleList(ZeroLinear(width, size, bias=bias) for width in widths)
        self.residual = nn.Linear(widths[0], size, bias=bias) if conditions else None
        self.activation = nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., h]` from the hidden states, and what conditions them side by side, `[..., (conditions + 1) h]`."""
        for index, layer in enumerate(self.layers):
            kept = self.residual(hidden) if index == 0 and self.residual is not None else hidden
            hidden = kept + self.activation(layer(hidden))
        return hidden

    @torch.no_grad()
    def pass_through(self) -> None:
        """Makes the blocks give back the hidden state as it is."""
        for layer in self.layers:
            _zero(cast(nn.Linear, layer))
        if self.residual is not None:
            _zero(self.residual)
            size = self.residual.out_features
            self.residual.weight[:, :size] = torch.eye(size).to(self.residual.weight)


class MarkovHead(nn.Module):
    """Adds to the logits what the token before says, through a matrix V x T of low rank (DSpark, arXiv 2607.05147).

    Args:
        vocab_size: V.
        own_vocab_size: T.
        rank: r.
    """

    def __init__(self, vocab_size: int, own_vocab_size: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = ZeroLinear(rank, own_vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """What `[..., T]` the tokens `[...]` add to the logits of those after them."""
        return self.markov_w2(self.markov_w1(tokens))


def _zero(layer: nn.Linear) -> None:
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
