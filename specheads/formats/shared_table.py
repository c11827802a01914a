"""Whether a checkpoint's embedding table is but a copy of the target's."""

from __future__ import annotations

import torch
from torch import Tensor

from ..heads.target_parts import TargetParts

TABLE = "embed_tokens.weight"


def settle_embeddings(weights: dict[str, Tensor], parts: TargetParts) -> tuple[dict[str, Tensor], bool]:
    """Leaves out a table that the target has anyway.

    Args:
        weights: The checkpoint's weights.
        parts: The target's parts.

    Returns:
        The weights that the head is to have, and whether an embedding table is among them.
    """
    table = weights.get(TABLE)
    if table is None:
        return weights, False
    own = parts.embedding_table.detach().cpu()
    if table.shape != own.shape or not torch.equal(table, own.to(table.dtype)):
        return weights, True
    return {name: weight for name, weight in weights.items() if name != TABLE}, False
