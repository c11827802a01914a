"""What an EAGLE head is fed of the committed text: pairs of a token and the target's features of the position before it.

Shapes: B lines, M pairs, N draft nodes, F values of features, C columns of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..features import PromptFeatures
from ..few_rows import filled_columns
from .base import Accepted


@dataclass
class Pairs:
    """Some pairs of every line.

    Args:
        tokens: `[B, M]`.
        features: `[B, M, F]`.
        counts: How many each line has; what it holds beyond them is anything.
    """

    tokens: Tensor
    features: Tensor
    counts: list[int]

    @classmethod
    def of_prompt(cls, known: PromptFeatures) -> Pairs:
        """Those of which the prompt has both parts: the last features wait for the token that the target says."""
        tokens, features = known.tokens[:, 1:], known.features[:, :-1]
        count = tokens.shape[1]
        if known.hidden is None:
            return cls(tokens, features, [count] * len(tokens))
        exists = ~(known.hidden[:, 1:] | known.hidden[:, :-1])
        order = (~exists).int().argsort(dim=1, stable=True)  # padding goes to the end
        index = order[:, :, None].expand(-1, -1, features.shape[2])
        return cls(tokens.gather(1, order), features.gather(1, index), exists.sum(dim=1).tolist())

    def split(self, size: int) -> list[Pairs]:
        """The pairs in pieces of at most `size` of each line."""
        starts = range(0, max(self.counts), size)
        return [
            Pairs(
                self.tokens[:, start : start + size],
                self.features[:, start : start + size],
                [max(0, min(size, count - start)) for count in self.counts],
            )
            for start in starts
        ]


class PendingPairs:
    """The pairs that the head has not been fed, of one or more rounds.

    Args:
        batch_size: B.
    """

    def __init__(self, batch_size: int):
        self.tokens: list[list[int]] = [[] for _ in range(batch_size)]
        self.places: list[list[int]] = [[] for _ in range(batch_size)]
        self.features: list[Tensor] = []
        self.width = 0

    def add(self, accepted: Accepted) -> None:
        """Takes in a round: each kept token goes with the features of the node before it."""
        assert accepted.features is not None
        for line, (path, kept) in enumerate(zip(accepted.paths, accepted.tokens, strict=True)):
            self.places[line] += [self.width + node for node in (0, *path)][: len(kept)]
            self.tokens[line] += kept
        self.features.append(accepted.features)
        self.width += accepted.features.shape[1]

    def together(self, fills: bool) -> Pairs:
        """All of them; as many columns as products are quick with if they are to be filled up (`few_rows`)."""
        counts = [len(tokens) for tokens in self.tokens]
        size = filled_columns(len(counts), max(counts)) if fills else max(counts)
        features = self.features[0] if len(self.features) == 1 else torch.cat(self.features, dim=1)
        table = [[*line, *[0] * (size - len(line))] for lines in (self.tokens, self.places) for line in lines]
        tokens, places = torch.tensor(table, device=features.device).view(2, len(counts), size)
        lines = torch.arange(len(counts), device=features.device)[:, None]
        return Pairs(tokens, features[lines, places], counts)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Keeps the lines that go on."""
        self.tokens = [self.tokens[line] for line in lines]
        self.places = [self.places[line] for line in lines]
        self.features = [features[list(lines)] for features in self.features]
