"""The most probable tokens, found by way of blocks: the greatest scores are in the blocks with the greatest maxima.

On a CPU the maxima take a fraction of the time that `argmax` and `topk` take over a vocabulary.

Shapes: V vocabulary, W tokens asked for, D whole blocks in V.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64  # tokens of a block


def block_maxima(scores: Tensor) -> Tensor:
    """The greatest score `[..., D]` in each whole block of scores `[..., V]`; what is left over of V is in none."""
    return _blocks(scores).amax(dim=-1)


def best_token(scores: Tensor, maxima: Tensor | None = None) -> Tensor:
    """`argmax` of scores `[..., V]` over the last dimension.

    Args:
        scores: `[..., V]`.
        maxima: `[..., D]` their `block_maxima`, if known.
    """
    blocks = scores.shape[-1] // BLOCK
    if scores.device.type != "cpu" or blocks < BLOCK:
        return scores.argmax(dim=-1)
    maxima, whole = block_maxima(scores) if maxima is None else maxima, blocks * BLOCK
    place = torch.cat([maxima, scores[..., whole:]], dim=-1).argmax(dim=-1)
    index = place.clamp(max=blocks - 1)[..., None, None].expand(*place.shape, 1, BLOCK)
    inside = _blocks(scores).gather(-2, index)[..., 0, :].argmax(dim=-1)
    return torch.where(place < blocks, place * BLOCK + inside, place + whole - blocks)


def best_tokens(scores: Tensor, count: int, maxima: Tensor | None = None) -> Tensor:
    """The `count` tokens `[..., W]` with the greatest of scores `[..., V]`, the best first.

    Args:
        scores: `[..., V]`.
        count: W, at most V.
        maxima: `[..., D]` their `block_maxima`, if known.
    """
    blocks = scores.shape[-1] // BLOCK
    if blocks <= 2 * count:
        return scores.topk(count).indices
    maxima, whole = block_maxima(scores) if maxima is None else maxima, blocks * BLOCK
    chosen = maxima.topk(count).indices  # [..., W]
    tokens = (chosen[..., None] * BLOCK + torch.arange(BLOCK, device=scores.device)).flatten(-2)
    if whole < scores.shape[-1]:
        rest = torch.arange(whole, scores.shape[-1], device=scores.device).expand(*tokens.shape[:-1], -1)
        tokens = torch.cat([tokens, rest], dim=-1)
    return tokens.gather(-1, scores.gather(-1, tokens).topk(count).indices)


def _blocks(scores: Tensor) -> Tensor:
    blocks = scores.shape[-1] // BLOCK
    return scores[..., : blocks * BLOCK].unflatten(-1, (blocks, BLOCK))
