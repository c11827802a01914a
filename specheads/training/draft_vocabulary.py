"""Which of the target's tokens a head is to know: the most frequent ones of its data."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..evaluation.prompts import InputError

STREAMED_EXAMPLES = 10_000  # how many examples of a stream are counted


def token_counts(dataset: Any, vocab_size: int) -> Tensor:
    """How often the assistant wrote each of the target's tokens.

    Args:
        dataset: Of `input_ids` and `loss_mask`.
        vocab_size: V.

    Returns:
        `[V]`.
    """
    from datasets import IterableDataset

    counts = np.zeros(vocab_size, dtype=np.int64)
    if isinstance(dataset, IterableDataset):
        for example in islice(dataset, STREAMED_EXAMPLES):
            written = np.asarray(example["input_ids"])[np.asarray(example["loss_mask"], dtype=bool)]
            counts += np.bincount(written, minlength=vocab_size)
        return torch.from_numpy(counts)
    columns = dataset.select_columns(["input_ids", "loss_mask"]).with_format("arrow")
    for table in columns.iter(batch_size=10_000):
        ids = table["input_ids"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        mask = table["loss_mask"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        counts += np.bincount(ids[mask], minlength=vocab_size)
    return torch.from_numpy(counts)


def most_frequent(counts: Tensor, size: int, kept: set[int]) -> Tensor:
    """The tokens of a draft vocabulary: exactly so many, all different.

    Args:
        counts: `[V]` how often each token occurs.
        size: D.
        kept: Tokens that belong to it however rare they are: those that end a text, for instance.

    Returns:
        `[D]` ids, increasing. Of equally frequent tokens the lower ids are taken, so that every process takes the same.

    Raises:
        InputError: if there are too few tokens, or too few places for those to be kept.
    """
    kept = {token for token in kept if 0 <= token < len(counts)}
    if not len(kept) <= size <= len(counts) or size < 1:
        raise InputError(
            f"`draft_vocab_size` must be between {max(1, len(kept))} (the special tokens, which are kept) and the target's "
            f"{len(counts)}, got {size}."
        )
    ranked = counts.clone()
    ranked[sorted(kept)] = counts.max() + 1
    return ranked.argsort(descending=True, stable=True)[:size].sort().values


def special_tokens(tokenizer: Any, target: Any) -> set[int]:
    """The tokens that must not be missing: the tokenizer's special ones, and those that end the target's texts."""
    ends = getattr(target.generation_config, "eos_token_id", None)
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    return {int(token) for token in [*tokenizer.all_special_ids, *ends] if token is not None}
