"""An EAGLE head with its cache, in batches of rows of any lengths.

A round writes its nodes behind what each row has committed, and they are forgotten at its end: what was accepted of them is fed
again with the target's features in place of the head's own. A slot's position is its index.

Shapes: B lines, n positions of a pass, m positions of a round so far, S slots, h the head's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache import FIRST_CAPACITY, Layout, SlotCache, SlotLayer
from ..heads import EagleHead


class HeadRunner:
    """A head and the cache of one call.

    Args:
        head: The head.
        batch_size: B.
        tokens: How many slots a row may need.
    """

    def __init__(self, head: EagleHead, batch_size: int, tokens: int):
        self.head = head
        self.cache = _empty_cache(head, batch_size, min(tokens, FIRST_CAPACITY))
        self.written = 0

    def remember(self, tokens: Tensor, states: Tensor, counts: Sequence[int]) -> None:
        """A pass over committed positions whose outputs nothing reads (`EagleHead.remember`).

        Args:
            tokens: `[B, n]`.
            states: `[B, n, h]` what comes before them.
            counts: How many of them each row has; what it holds beyond them is anything.
        """
        size = tokens.shape[1]
        order = torch.arange(size, device=tokens.device)
        positions = self._open(order, size)
        has_more_layers = len(self.head.layers) > 1
        mask = self._mask((order[:, None] >= order).expand(len(tokens), -1, -1)) if has_more_layers else None
        self.head.remember(self._known(tokens), states, mask, positions, self.cache)
        self.commit(counts)

    def follow(self, tokens: Tensor, states: Tensor, depth: int) -> Tensor:
        """One more position per line, which attends to all before it: its hidden states `[B, 1, h]`.

        Args:
            tokens: `[B, 1]`.
            states: `[B, 1, h]` what comes before them.
            depth: Their position, counted from the row's committed length.
        """
        positions, mask = self._open(depth, 1), None
        if not self.cache.layout.is_uniform:  # else there is nothing to hide
            mask = self._mask(torch.ones(len(tokens), 1, self.written, dtype=torch.bool, device=tokens.device))
        return self.head.advance(self._known(tokens), states, mask, positions, self.cache)

    def advance(self, tokens: Tensor, states: Tensor, depths: Tensor, visible: Tensor) -> Tensor:
        """One pass over new positions of a round (`EagleHead.advance`).

        Args:
            tokens: `[B, n]`.
            states: `[B, n, h]` what comes before them.
            depths: `[B, n]` their positions, counted from the row's committed length.
            visible: `[B, n, m]` bool: which of the round's positions, these n last, each attends to.

        Returns:
            `[B, n, h]`.
        """
        positions = self._open(depths, tokens.shape[1])
        return self.head.advance(self._known(tokens), states, self._mask(visible), positions, self.cache)

    def commit(self, counts: Sequence[int]) -> None:
        """Ends a round: keeps each row's first positions of it, none to forget it."""
        if any(counts):
            self.cache.commit([range(count) for count in counts])
        self.written = 0

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Goes on with some lines: `lines[i]` becomes line i."""
        self.cache.keep_rows(lines)

    def _open(self, depths: Tensor | int, size: int) -> Tensor:
        """Makes room for a pass; gives its positions `[B, n]`."""
        self.cache.open(self.written, size)
        self.written += size
        return self.cache.layout.length_tensor[:, None] + depths

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens as the head can read them: padding may be one that the target cannot say."""
        return tokens.clamp(0, self.head.embedding_table().shape[0] - 1)

    def _mask(self, visible: Tensor) -> Tensor:
        """The additive mask `[B, 1, n, S]`."""
        layout, (batch_size, size, seen) = self.cache.layout, visible.shape
        mask = torch.zeros(batch_size, size, layout.end, dtype=self.head.dtype, device=visible.device)
        least = torch.finfo(mask.dtype).min
        if layout.is_uniform:
            mask[:, :, -seen:].masked_fill_(~visible, least)
            return mask[:, None]
        order = torch.arange(layout.end, device=visible.device) - layout.length_tensor[:, None]  # [B, S] negative: committed
        index = order.clamp(0, seen - 1)[:, None].expand(-1, size, -1)
        allowed = (order < 0)[:, None] | (visible.gather(2, index) & (order < seen)[:, None])
        return mask.masked_fill_(~allowed, least)[:, None]


def _empty_cache(head: EagleHead, batch_size: int, slots: int) -> SlotCache:
    config, device = head.config.transformer_layer_config, head.device
    layout = Layout([0] * batch_size, device)
    shape = (batch_size, config.num_key_value_heads, slots, config.head_dim)
    # Zeros: a slot that no row has written may be read under the mask, where 0 * NaN is NaN.
    buffers = [[torch.zeros(shape, dtype=head.dtype, device=device) for _ in range(2)] for _ in range(config.num_hidden_layers)]
    return SlotCache([SlotLayer(keys, values, layout, None) for keys, values in buffers], layout)
