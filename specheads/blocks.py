"""Searches of a vocabulary by way of blocks: first for the block, then in it.

On a CPU the maxima and the sums of blocks take a fraction of the time that `argmax`, `topk` and `cumsum` take over all tokens.

Shapes: R lines, V vocabulary, W tokens asked for, D whole blocks in V.
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
    if scores.shape[-1] // BLOCK <= 2 * count:
        return scores.topk(count).indices
    maxima = block_maxima(scores) if maxima is None else maxima
    tokens = _candidates(scores, maxima.topk(count).indices)
    return tokens.gather(-1, scores.gather(-1, tokens).topk(count).indices)


def keep_best(scores: Tensor, count: int) -> Tensor | None:
    """What `TopKLogitsWarper` makes of scores `[R, V]`: all but the `count` best are `-inf`; `None` if it takes a full search.

    Only the blocks with the greatest maxima are looked into. Where the next one is not below all that is kept, since scores are
    equal or NaN, the processor may keep more.
    """
    if scores.device.type != "cpu" or scores.shape[-1] // BLOCK <= 2 * count:
        return None
    maxima, blocks = block_maxima(scores).topk(count + 1)
    tokens = _candidates(scores, blocks[:, :count])
    candidates = scores.gather(-1, tokens)
    last = candidates.topk(count).values[:, -1:]
    if not bool((maxima[:, -1:] < last).all()):
        return None
    return torch.full_like(scores, -torch.inf).scatter_(-1, tokens, candidates.masked_fill(candidates < last, -torch.inf))


def _candidates(scores: Tensor, blocks: Tensor) -> Tensor:
    """The tokens in some blocks `[..., W]` of scores `[..., V]`, and those in none."""
    whole = scores.shape[-1] // BLOCK * BLOCK
    tokens = (blocks[..., None] * BLOCK + torch.arange(BLOCK, device=scores.device)).flatten(-2)
    if whole == scores.shape[-1]:
        return tokens
    rest = torch.arange(whole, scores.shape[-1], device=scores.device).expand(*tokens.shape[:-1], -1)
    return torch.cat([tokens, rest], dim=-1)


def block_sums(weights: Tensor) -> Tensor:
    """The sums `[R, D + 1]` of weights `[R, V]` in each whole block, and of what is left over of V."""
    rest = weights[:, weights.shape[-1] // BLOCK * BLOCK :]
    return torch.cat([_blocks(weights).sum(dim=-1), rest.sum(dim=-1, keepdim=True)], dim=-1)


def inside_block(weights: Tensor, block: Tensor) -> Tensor:
    """The weights `[R, BLOCK]` of one block `[R, 1]` of weights `[R, V]`, zero beyond V."""
    tokens, last = block * BLOCK + torch.arange(BLOCK, device=block.device), weights.shape[-1] - 1
    return weights.gather(1, tokens.clamp(max=last)).masked_fill_(tokens > last, 0)


def _blocks(scores: Tensor) -> Tensor:
    blocks = scores.shape[-1] // BLOCK
    return scores[..., : blocks * BLOCK].unflatten(-1, (blocks, BLOCK))
