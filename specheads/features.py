"""The target's hidden states of the prompt, for drafters that read them.

What the pass over the prompt did not run on, because a cache came with the call, has no features: a drafter goes by the rest.

Shapes: B rows, C columns, L layers, H the target's hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .target import Pass


@dataclass
class PromptFeatures:
    """The prompt's last columns, as many as have both a token and features.

    Args:
        tokens: `[B, C]`.
        features: `[B, C, L H]` the target's hidden states at these tokens.
        hidden: `[B, C]` bool: columns of padding; `None` if there are none.
    """

    tokens: Tensor
    features: Tensor
    hidden: Tensor | None

    @classmethod
    def of(cls, ids: Tensor, features: Tensor | None, hidden: Tensor | None) -> PromptFeatures | None:
        """What is known of a prompt; `None` if no features were asked for.

        Args:
            ids: `[B, P]`; fewer columns than the prompt has where it came as embeddings.
            features: `[B, C', L H]` of the last C' columns.
            hidden: `[B, at least C']` bool: all columns that are padding, or `None`.
        """
        if features is None:
            return None
        count = min(ids.shape[1], features.shape[1])
        first = features.shape[1] - count
        own = None if hidden is None else hidden[:, hidden.shape[1] - count :]
        return cls(ids[:, ids.shape[1] - count :].to(features.device), features[:, first:], own)


@contextmanager
def collected(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Collects the features of every pass within, in order: a prompt may go through the model in chunks.

    Args:
        model: The target.
        layers: The layers.
    """
    chunks: list[Tensor] = []
    if not layers:
        yield chunks
        return
    thread = threading.get_ident()

    def note(module: Any, arguments: Any, outputs: Any) -> None:
        if threading.get_ident() == thread:  # calls in other threads go through the same module
            chunks.append(cast(Tensor, Pass.of(outputs).features(layers)))

    hook = model.register_forward_hook(note)
    try:
        yield chunks
    finally:
        hook.remove()


def joined(chunks: Sequence[Tensor]) -> Tensor | None:
    """The chunks' features in one `[B, C, L H]`, `None` if there are none."""
    return None if not chunks else chunks[0] if len(chunks) == 1 else torch.cat(list(chunks), dim=1)
