"""Attention masks of training: texts that share a row do not see each other, and drafts see what they see when drafted.

Shapes: B rows, T tokens, n drafts of a row, S keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible_before(groups: Tensor, window: int | None = None) -> Tensor:
    """`[B, T, T]` bool: each place sees itself and those before it of its own group.

    Args:
        groups: `[B, T]` numbers; places with a number of their own see themselves only.
        window: How many places are seen at most.
    """
    order = torch.arange(groups.shape[1], device=groups.device)
    distance = order[:, None] - order
    near = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return near & (groups[:, :, None] == groups[:, None])


def alone(groups: Tensor, lonely: Tensor) -> Tensor:
    """Groups `[B, T]` from 0 on in which some places `[B, T]` are by themselves."""
    own = -1 - torch.arange(groups.shape[1], device=groups.device)
    return torch.where(lonely, own, groups)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask `[B, 1, n, S]` that attention adds to its scores."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
