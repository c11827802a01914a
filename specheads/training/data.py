"""Training data: datasets in, batches of token ids out.

Shapes: B examples of a batch, T tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..evaluation.prompts import InputError
from .encoding import Encoder, Example
from .packing import PADDING, pack

logger = logging.getLogger(__name__)


@dataclass
class Counts:
    """How much there is to learn from.

    Args:
        examples: Examples, without those left out.
        left_out: Examples whose replies all begin after `max_length`.
        tokens: Their tokens.
        learned: Their tokens that the assistant wrote.
    """

    examples: int = 0
    left_out: int = 0
    tokens: int = 0
    learned: int = 0

    @property
    def share(self) -> float:
        """The share of the tokens on which there is a loss."""
        return self.learned / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        left_out = f"; {self.left_out} left out, whose replies begin after the greatest length" if self.left_out else ""
        return (
            f"{self.examples} examples, {self.learned} of {self.tokens} tokens are the assistant's ({self.share:.1%}){left_out}"
        )


def training_dataset(
    rows: Any,
    tokenizer: Any,
    template_arguments: Mapping[str, Any] | None = None,
    max_length: int = 2048,
    packing: bool = False,
    name: str = "the dataset",
    num_proc: int | None = None,
) -> Any:
    """Encodes a dataset and logs how many of its tokens are learned.

    Args:
        rows: A `Dataset` or `IterableDataset` of rows that `read_row` takes.
        tokenizer: Of the target, a fast one.
        template_arguments: Further arguments of its chat template, those that the answers were written under.
        max_length: T at most.
        packing: Put several examples into a row. The target must allow it: see `check_packable`.
        name: What to call the dataset in messages.
        num_proc: Processes that encode. Of no use to a stream.

    Returns:
        A dataset of the same kind, of `input_ids` `[T]`, `loss_mask` `[T]` and, packed, `segment_ids` `[T]`.

    Raises:
        InputError: if a row cannot be used, or none is left. A stream raises it when it gets there.
    """
    from datasets import IterableDataset

    given = {"encoder": Encoder(tokenizer, template_arguments, max_length), "name": name}
    if isinstance(rows, IterableDataset):
        columns = rows.column_names or list(next(iter(rows), {}))
        encoded = rows.map(_encode_rows, batched=True, with_indices=True, remove_columns=columns, fn_kwargs=given)
        counted = encoded.filter(_StreamCounter(name))
        return pack(counted, max_length) if packing else counted
    encoded = rows.map(
        _encode_rows,
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        fn_kwargs=given,
        num_proc=num_proc,
        load_from_cache_file=False,  # it would not notice when our code changes
        desc="tokenising",
    )
    counts, kept = _count(encoded)
    logger.info("%s: %s", name, counts)
    if not kept:
        raise InputError(f"{name}: no example is left of {len(rows)} rows ({counts}); raise the greatest length.")
    encoded = encoded if len(kept) == len(encoded) else encoded.select(kept)
    return pack(encoded, max_length) if packing else encoded


class Collator:
    """Puts examples into a batch, padded at the right.

    Args:
        pad_token_id: The id that fills up; it is never learned and never seen.
    """

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collates.

        Args:
            examples: Of `training_dataset`.

        Returns:
            `input_ids`, `attention_mask`, `position_ids` (counted within each segment) and `loss_mask` (bool), and
            `segment_ids` if the examples are packed (0 at padding), all `[B, T]`.
        """
        length = max(len(example["input_ids"]) for example in examples)
        batch = {
            "input_ids": _filled(examples, "input_ids", length, self.pad_token_id),
            "loss_mask": _filled(examples, "loss_mask", length, False).bool(),
        }
        lengths = torch.tensor([len(example["input_ids"]) for example in examples])
        batch["attention_mask"] = (torch.arange(length) < lengths[:, None]).long()
        if "segment_ids" in examples[0]:
            batch["segment_ids"] = _filled(examples, "segment_ids", length, PADDING)
            batch["position_ids"] = _positions(batch["segment_ids"])
        else:
            batch["position_ids"] = torch.arange(length).expand(len(examples), -1).contiguous()
        return batch


class WithPrompts:
    """Makes batches in which prompts are learned too: the target has a law over what it did not write.

    Args:
        collator: Makes the batches.
    """

    def __init__(self, collator: Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]]):
        self.collator = collator

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """A batch of the collator's, whose `loss_mask` has all tokens but padding."""
        batch = self.collator(examples)
        return {**batch, "loss_mask": batch["attention_mask"].bool()}


def _filled(examples: Sequence[Mapping[str, Any]], name: str, length: int, value: int) -> Tensor:
    rows = [torch.as_tensor(example[name]).long() for example in examples]
    return torch.stack([torch.nn.functional.pad(row, (0, length - len(row)), value=value) for row in rows])


def _positions(segment_ids: Tensor) -> Tensor:
    """Positions that begin anew where the segment changes."""
    places = torch.arange(segment_ids.shape[1]).expand_as(segment_ids)
    is_first = torch.ones_like(segment_ids, dtype=torch.bool)
    is_first[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return places - torch.where(is_first, places, 0).cummax(dim=1).values


def _encode_rows(batch: dict[str, list[Any]], indices: list[int], encoder: Encoder, name: str) -> Example:
    columns: Example = {"input_ids": [], "loss_mask": []}
    for line, index in enumerate(indices):
        row = {column: values[line] for column, values in batch.items()}
        for example in encoder.examples(row, f"{name}, row {index + 1}"):
            for column, values in example.items():
                columns[column].append(values)
    return columns


def _count(encoded: Any) -> tuple[Counts, list[int]]:
    import pyarrow.compute as pc

    counts, kept, seen = Counts(), [], 0
    for table in encoded.with_format("arrow").iter(batch_size=10_000):
        lengths = pc.list_value_length(table["input_ids"]).to_numpy()
        kept += (lengths.nonzero()[0] + seen).tolist()
        seen += len(lengths)
        counts.tokens += int(lengths.sum())
        counts.learned += pc.sum(pc.list_flatten(table["loss_mask"])).as_py() or 0
    counts.examples, counts.left_out = len(kept), seen - len(kept)
    return counts, kept


class _StreamCounter:
    """Lets examples through that are not empty; logs the counts whenever their number has grown tenfold."""

    def __init__(self, name: str):
        self.name = name
        self.counts = Counts()
        self.next_report = 10

    def __call__(self, example: Mapping[str, Any]) -> bool:
        counts = self.counts
        if not example["input_ids"]:
            counts.left_out += 1
            return False
        counts.examples += 1
        counts.tokens += len(example["input_ids"])
        counts.learned += sum(example["loss_mask"])
        if counts.examples == self.next_report:
            logger.info("%s, so far: %s", self.name, str(counts))  # they change
            self.next_report *= 10
        return True
