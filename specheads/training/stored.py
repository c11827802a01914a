"""Training from a feature store: the target runs over the data once, however often one goes through it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset

from ..evaluation.prompts import InputError
from .arguments import HeadTrainingArguments
from .batch import TrainingBatch
from .corpus import lengths_of
from .data import Collator
from .feature_store import GIB, FeatureStore, StoreDescription, batch_of_texts
from .teacher import Teacher


class StoredTexts(Dataset[dict[str, Tensor]]):
    """The texts of a store.

    Args:
        store: The store.

    Attributes:
        lengths: T of each.
    """

    def __init__(self, store: FeatureStore):
        self.store = store
        self.lengths = list(_lengths(store))

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return self.store[place]


def stored_texts(
    folder: str, teacher: Teacher, dataset: Any, data: str, tokens: int, quota_gib: float | None, args: HeadTrainingArguments
) -> StoredTexts:
    """The texts of a dataset with the target's hidden states; what is not stored yet is written, by all processes together.

    Args:
        folder: The store's.
        teacher: Gives the hidden states.
        dataset: Of `training_dataset`, not packed.
        data: Its fingerprint.
        tokens: How many tokens it has.
        quota_gib: How large the store may get, in GiB.
        args: The run's: its precision, and its processes.

    Raises:
        InputError: if the folder holds another store, or the quota is too small.
    """
    mixed = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    collator, device = Collator(0), teacher.target.device

    def batch_of(places: Sequence[int]) -> TrainingBatch:
        batch = collator([dataset[place] for place in places])
        return TrainingBatch(**{name: value.to(device) for name, value in batch.items()})

    try:
        with args.main_process_first(local=False, desc="feature store"):
            description = StoreDescription.of(teacher, data=data, mixed_precision=mixed)
            store = FeatureStore(Path(folder), description, None if quota_gib is None else int(quota_gib * GIB))
            estimate = store.check_estimate(tokens)
        if args.should_log:
            print(estimate, flush=True)
        store.write(teacher, lengths_of(dataset), batch_of, (args.process_index, args.world_size))
        args.distributed_state.wait_for_everyone()
    except ValueError as error:
        raise InputError(str(error)) from error
    return StoredTexts(FeatureStore(Path(folder)))


def collate_stored(texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Puts texts of a store into a batch."""
    batch = batch_of_texts([dict(text) for text in texts])
    return {name: value for name, value in vars(batch).items() if value is not None}


def _lengths(store: FeatureStore) -> Iterator[int]:
    opened: tuple[Any, Any] = (None, None)
    for shard, name in store._index:
        if opened[0] != shard:
            opened = (shard, safe_open(shard, framework="pt"))
        yield opened[1].get_slice(f"{name}.input_ids").get_shape()[0]
