"""Several examples in one row, each of which sees only itself.

Shapes: B rows of T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..evaluation.prompts import InputError
from ..families import family_of

PADDING = 0  # the segment of padding; examples count from 1


def check_packable(target: PreTrainedModel) -> None:
    """Refuses a target whose passes cannot keep the examples of a row apart.

    Raises:
        InputError: if its attention takes no mask or its positions cannot be stated.
    """
    family = family_of(target)
    if family.takes_trees:
        return
    because = "it carries a state along the row" if family.is_stateful else "its forward takes no position ids to tell them by"
    raise InputError(
        f"Examples cannot be packed for a target of type {target.config.model_type}: {because}, so that each would see those "
        "before it. Train without packing."
    )


def pack(dataset: Any, length: int) -> Any:
    """Puts examples together until rows are about as long as they may be; none is cut.

    Args:
        dataset: Of `input_ids` and `loss_mask`, none longer than `length`.
        length: T at most.

    Returns:
        The dataset, with `segment_ids` `[T]` besides: which example a token belongs to.
    """
    from trl.data_utils import pack_dataset

    packed = pack_dataset(dataset, seq_length=length, strategy="bfd", map_kwargs=_uncached(dataset))
    return packed.map(_segments, batched=True, remove_columns=["seq_lengths"], **_uncached(dataset))


def block_diagonal_mask(segment_ids: Tensor) -> Tensor:
    """Which tokens a token sees: those of its own segment, up to itself.

    Args:
        segment_ids: `[B, T]`.

    Returns:
        `[B, 1, T, T]`, true where attended to, as PyTorch's attention takes it.
    """
    length = segment_ids.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    return ((segment_ids[:, :, None] == segment_ids[:, None, :]) & earlier)[:, None]


def target_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a target's forward takes of a batch.

    Where no mask is given, transformers builds the block-diagonal one for each kind of layer from the positions, which begin
    anew with each example; a mask would switch that off.

    Args:
        batch: Of `Collator`.
    """
    names = ("input_ids", "position_ids") if "segment_ids" in batch else ("input_ids", "attention_mask", "position_ids")
    return {name: batch[name] for name in names}


def _segments(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
    lengths = batch["seq_lengths"]
    return {"segment_ids": [[number for number, n in enumerate(row, start=1) for _ in range(n)] for row in lengths]}


def _uncached(dataset: Any) -> dict[str, Any]:
    # The cache of `datasets` does not notice when our code changes. A stream has none.
    from datasets import IterableDataset

    return {} if isinstance(dataset, IterableDataset) else {"load_from_cache_file": False}
