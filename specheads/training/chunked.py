"""A loss over many positions, chunk by chunk, whose memory does not grow with their number.

Each chunk's gradients are worked out right after its loss and summed up, so that its logits are gone before those of the next
one are there, and nothing is computed a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ChunkLoss = Callable[[slice, Tensor], Tensor]


def chunked_loss(loss_of: ChunkLoss, chunks: Sequence[slice], states: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The sum of the chunks' losses.

    Args:
        loss_of: The loss, a number, of a chunk, from the slice and `states[:, slice]`. It may differ from call to call only in
            what it leaves behind.
        chunks: Slices of the second dimension of `states`.
        states: `[S, R, h]` what the loss is computed from.
        parameters: All weights with a gradient that the loss may read, besides what led to the states.

    Returns:
        The loss, in single precision at least. Its gradients reach the states and the parameters.
    """
    return _ChunkedLoss.apply(loss_of, chunks, states, *parameters)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss_of: ChunkLoss, chunks: Sequence[slice], states: Tensor, *parameters: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad[2:]
        sums: list[Tensor | None] = [None] * len(wanted)
        total: Tensor | None = None
        for chunk in chunks:
            leaf = states[:, chunk].detach().requires_grad_(wanted[0])
            with torch.set_grad_enabled(any(wanted)):
                loss = loss_of(chunk, leaf)
            total = loss.detach() if total is None else total + loss.detach()
            if loss.requires_grad:
                _add_gradients(sums, loss, [leaf, *parameters], wanted, states, chunk)
        ctx.gradients = [
            None if own is None else own.to(value.dtype) for own, value in zip(sums, [states, *parameters], strict=True)
        ]
        return states.new_zeros((), dtype=torch.float) if total is None else total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        scaled = [None if own is None else own * outer[0].to(own.dtype) for own in ctx.gradients]
        ctx.gradients = None
        return None, None, *scaled


def _add_gradients(
    sums: list[Tensor | None],
    loss: Tensor,
    inputs: Sequence[Tensor],
    wanted: Sequence[bool],
    states: Tensor,
    chunk: slice,
) -> None:
    """Adds a chunk's gradients, in single precision at least; those of the states at their place."""
    places = [place for place, is_wanted in enumerate(wanted) if is_wanted]
    gradients = torch.autograd.grad(loss, [inputs[place] for place in places], allow_unused=True)
    for place, gradient in zip(places, gradients, strict=True):
        if gradient is None:
            continue
        own = sums[place]
        if own is None:
            like = states if place == 0 else gradient
            own = sums[place] = torch.zeros(like.shape, dtype=loss.dtype, device=like.device)
        (own[:, chunk] if place == 0 else own).add_(gradient)
