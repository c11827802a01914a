"""The data of a training run: encoded, split, counted."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..evaluation.prompts import InputError
from .arguments import DataArguments
from .data import training_dataset
from .data_provenance import template_arguments
from .packing import check_packable
from .sources import load_rows


@dataclass
class Corpus:
    """Encoded data.

    Args:
        train: To train on.
        evaluation: To evaluate on; `None` for none.
        template_arguments: What the chat template was given.
        fingerprint: Tells the training data from other; `None` for a stream.
        tokens: How many tokens the training data has; `None` for a stream.
        written: How many of them the assistant wrote; `None` for a stream.
    """

    train: Any
    evaluation: Any
    template_arguments: dict[str, Any]
    fingerprint: str | None
    tokens: int | None
    written: int | None


def load_corpus(arguments: DataArguments, tokenizer: Any, target: Any, seed: int) -> Corpus:
    """Loads and encodes the data.

    Args:
        arguments: Which.
        tokenizer: The target's.
        target: The target.
        seed: Of the choice of examples that are kept aside.

    Raises:
        InputError: if it cannot be used.
    """
    if arguments.packing:
        check_packable(target)
    sources = [*arguments.dataset_name, *arguments.eval_dataset_name]
    given = template_arguments(sources, arguments.template_arguments)  # type: ignore[arg-type]
    places = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = arguments.max_length if places is None else min(arguments.max_length, places)

    def encoded(names: Sequence[str], split: str, packing: bool) -> Any:
        parts = []
        for name in names:
            rows = load_rows(name, split, arguments.dataset_subset, arguments.dataset_revision, arguments.streaming)
            parts.append(training_dataset(rows, tokenizer, given, length, packing, name, arguments.dataset_num_proc))
        return _joined(parts)

    held = arguments.eval_examples
    train = encoded(arguments.dataset_name, arguments.dataset_split, arguments.packing and not held)
    evaluation = None
    if arguments.eval_dataset_name:
        evaluation = encoded(arguments.eval_dataset_name, arguments.eval_dataset_split, False)
    elif held:
        train, evaluation = _kept_aside(train, held, seed)
        if arguments.packing:
            from .packing import pack

            train = pack(train, length)
    if arguments.streaming:
        return Corpus(train, evaluation, given, None, None, None)
    return Corpus(train, evaluation, given, *_counted(train))


def lengths_of(dataset: Any) -> list[int]:
    """The lengths of a dataset's examples."""
    import pyarrow.compute as pc

    known: list[int] | None = getattr(dataset, "lengths", None)
    if known is not None:
        return known
    columns = dataset.select_columns(["input_ids"]).with_format("arrow")
    lengths: list[int] = []
    for table in columns.iter(batch_size=10_000):
        lengths += pc.list_value_length(table["input_ids"]).to_pylist()
    return lengths


def prompts_of(dataset: Any, count: int) -> list[list[int]]:
    """The prompts of a dataset's first examples: what comes before the assistant's first reply.

    Args:
        dataset: Of `input_ids` and `loss_mask`.
        count: How many.
    """
    prompts = []
    for example in dataset.select(range(min(count, len(dataset)))):
        begin = example["loss_mask"].index(True)
        if begin:
            prompts.append(example["input_ids"][:begin])
    return prompts


def _joined(parts: Sequence[Any]) -> Any:
    from datasets import concatenate_datasets

    return parts[0] if len(parts) == 1 else concatenate_datasets(list(parts))


def _kept_aside(dataset: Any, count: int, seed: int) -> tuple[Any, Any]:
    if count >= len(dataset):
        raise InputError(f"`eval_examples` must leave some of the {len(dataset)} examples to train on, got {count}.")
    parts: Mapping[str, Any] = dataset.train_test_split(test_size=count, seed=seed, load_from_cache_file=False)
    return parts["train"], parts["test"]


def _counted(dataset: Any) -> tuple[str, int, int]:
    """Fingerprint, tokens, and tokens that the assistant wrote."""
    digest, tokens, written = hashlib.sha256(), 0, 0
    columns = dataset.select_columns(["input_ids", "loss_mask"]).with_format("numpy")
    for batch in columns.iter(batch_size=1_000):
        for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True):
            digest.update(ids.astype("<i8").tobytes() + mask.astype("u1").tobytes() + b"\n")
            tokens, written = tokens + len(ids), written + int(mask.sum())
    return digest.hexdigest()[:32], tokens, written
