"""The order in which examples are trained on: known from seed and epoch alone, so that a resumed run meets the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

POOL = 50  # how many batches are sorted by length together


class LengthGrouped(Sampler[int]):
    """Examples in batches of about one length, so that little is padding; the batches in random order.

    Args:
        lengths: Of the examples.
        batch_size: How many go into a batch.
        seed: Of the order.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int):
        self.lengths = torch.as_tensor(lengths)
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        shuffled = torch.randperm(len(self.lengths), generator=generator)
        batches: list[torch.Tensor] = []
        for pool in shuffled.split(self.batch_size * POOL):
            batches += pool[self.lengths[pool].argsort(descending=True, stable=True)].split(self.batch_size)
        # A batch that is not full stays at the end, else those after it would be cut otherwise.
        whole = [batch for batch in batches if len(batch) == self.batch_size]
        rest = [batch for batch in batches if len(batch) < self.batch_size]
        order = torch.randperm(len(whole), generator=generator).tolist()
        for batch in [*(whole[place] for place in order), *rest]:
            yield from batch.tolist()
