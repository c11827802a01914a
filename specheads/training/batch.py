"""A batch of texts to train on, and the places in it from which a head is trained to draft.

A *root* is the last committed token of a draft: token r of a row. Depth k of its draft is the token r + k, for k from 1 on; the
law that judges it is the target's after token r + k - 1, and what the head reads begins with the target's hidden state of token
r - 1, as when it drafts.

Shapes: B rows, T tokens, R roots, K depths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass
class TrainingBatch:
    """Texts side by side.

    Args:
        input_ids: `[B, T]`.
        attention_mask: `[B, T]` 1 for tokens and 0 for padding, on either side.
        position_ids: `[B, T]` the target's positions; they begin anew with each text of a packed row.
        loss_mask: `[B, T]` bool: the tokens that the assistant wrote, which are those to be predicted.
        segment_ids: `[B, T]` which text of a packed row a token belongs to; `None` if each row is one text.
        features: `[B, T, L t]` the target's hidden states that the head reads, from a feature store; `None` to run the target.
        last_hidden: `[B, T, t]` the target's last hidden states, from there too.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    segment_ids: Tensor | None = None
    features: Tensor | None = None
    last_hidden: Tensor | None = None

    @property
    def continues(self) -> Tensor:
        """`[B, T]` bool: the tokens whose text has a token before them."""
        exists = self.attention_mask.bool()
        together = exists[:, 1:] & exists[:, :-1]
        if self.segment_ids is not None:
            together = together & (self.segment_ids[:, 1:] == self.segment_ids[:, :-1])
        return pad(together, (1, 0), value=False)


@dataclass
class Roots:
    """Where drafts are trained, by row and then by place. On the CPU: what is computed for them is planned there.

    Args:
        rows: `[R]`.
        places: `[R]` the root's token, r.
        depths: `[R]` how many tokens after it are trained, 1 to K: the assistant wrote all of them, without a gap.
        deployed: `[R]` bool: whether the root is the assistant's own token. A draft from the prompt's last token is trained,
            but when the target generates it says the first token without a draft.
    """

    rows: Tensor
    places: Tensor
    depths: Tensor
    deployed: Tensor

    @classmethod
    def of(cls, batch: TrainingBatch, depth: int) -> Roots:
        """All roots of a batch.

        Args:
            batch: The texts.
            depth: K, how far drafts go.
        """
        depths = root_depths(batch, depth).cpu()
        rows, places = depths.nonzero(as_tuple=True)
        written = batch.loss_mask.bool().cpu()
        return cls(rows, places, depths[rows, places], written[rows, places])

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, kept: Tensor) -> Roots:
        """Those that are asked for by index or mask `[R]`."""
        return Roots(self.rows[kept], self.places[kept], self.depths[kept], self.deployed[kept])

    def flat(self, columns: int) -> Tensor:
        """`[R]` the places in a flattened `[B * columns]`."""
        return self.rows * columns + self.places


def root_depths(batch: TrainingBatch, depth: int) -> Tensor:
    """`[B, T]` how many tokens after each one are trained as its draft, 0 to K.

    Args:
        batch: The texts.
        depth: K.
    """
    continues = batch.continues
    trained = batch.loss_mask.bool() & continues
    # A root needs a token before it: the head reads the target's hidden state there.
    reached, depths = continues, torch.zeros_like(batch.input_ids)
    for _ in range(depth):
        trained = pad(trained[:, 1:], (0, 1), value=False)
        reached = reached & trained
        depths = depths + reached
    return depths


def count_trained(batch: TrainingBatch) -> Tensor:
    """How many tokens of a batch are trained; losses are divided by their number in all batches of an optimiser's step."""
    return (root_depths(batch, 1) > 0).sum()
