"""The data of a training run: encoded, split, counted."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
        tasks: The same by task.
        template_arguments: What the chat template was given.
        fingerprint: Tells the training data from other; `None` for a stream.
        tokens: How many tokens the training data has; `None` for a stream.
        written: How many of them the assistant wrote; `None` for a stream.
        evaluation_fingerprint: Tells the data to evaluate on from other; `None` if there is none.
    """

    train: Any
    evaluation: Any
    tasks: dict[str, Any]
    template_arguments: dict[str, Any]
    fingerprint: str | None = None
    tokens: int | None = None
    written: int | None = None
    evaluation_fingerprint: str | None = None


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

    loaded = {name: _rows(arguments, name, arguments.dataset_split) for name in arguments.dataset_name}
    aside = {name: _rows(arguments, name, arguments.eval_dataset_split) for name in arguments.eval_dataset_name}
    if arguments.eval_examples:
        loaded, aside = _kept_aside(loaded, arguments.eval_examples, seed)

    def encoded(rows: Any, name: str, packing: bool = False) -> Any:
        return training_dataset(rows, tokenizer, given, length, packing, name, arguments.dataset_num_proc)

    train = _joined([encoded(rows, name, arguments.packing) for name, rows in loaded.items()])
    tasks = {}
    for name, rows in aside.items():
        for task, own in _by_task(rows, name, arguments.eval_task_column).items():
            tasks[task] = encoded(own, f"{name}, {task}" if task != name else name)
    evaluation = _joined(list(tasks.values())) if tasks else None
    if arguments.streaming:
        return Corpus(train, evaluation, tasks, given)
    fingerprint, tokens, written = _counted(train)
    judged = None if evaluation is None else _counted(evaluation)[0]
    return Corpus(train, evaluation, tasks, given, fingerprint, tokens, written, judged)


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


def _rows(arguments: DataArguments, name: str, split: str) -> Any:
    return load_rows(name, split, arguments.dataset_subset, arguments.dataset_revision, arguments.streaming)


def _kept_aside(loaded: Mapping[str, Any], count: int, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Datasets without so many of their rows, all together, and those rows."""
    ends = np.cumsum([len(rows) for rows in loaded.values()])
    if count >= ends[-1]:
        raise InputError(
            f"`eval_examples` is {count}, which leaves none of the {ends[-1]} rows to train on; lower it, or switch evaluation "
            "off with `--eval_examples 0 --eval_strategy no` (recipes have it on)."
        )
    chosen = np.zeros(ends[-1], dtype=bool)
    chosen[np.random.default_rng(seed).choice(ends[-1], count, replace=False)] = True
    kept, aside = {}, {}
    for (name, rows), mask in zip(loaded.items(), np.split(chosen, ends[:-1]), strict=True):
        kept[name], aside[name] = rows.select(np.flatnonzero(~mask)), rows.select(np.flatnonzero(mask))
    return kept, {name: rows for name, rows in aside.items() if len(rows)}


def _by_task(rows: Any, name: str, column: str | None) -> dict[str, Any]:
    if column is None:
        return {name: rows}
    if column not in (rows.column_names or []):
        raise InputError(f"{name} has no column {column!r} (`eval_task_column`); it has {', '.join(rows.column_names or [])}.")
    values = np.array([str(value) for value in rows[column]])
    return {str(task): rows.select(np.flatnonzero(values == task)) for task in sorted(set(values))}


def _counted(dataset: Any) -> tuple[str, int, int]:
    """Fingerprint, tokens, and tokens that the assistant wrote."""
    digest, tokens, written = hashlib.sha256(), 0, 0
    columns = dataset.select_columns(["input_ids", "loss_mask"]).with_format("numpy")
    for batch in columns.iter(batch_size=1_000):
        for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True):
            digest.update(ids.astype("<i8").tobytes() + mask.astype("u1").tobytes() + b"\n")
            tokens, written = tokens + len(ids), written + int(mask.sum())
    return digest.hexdigest()[:32], tokens, written
