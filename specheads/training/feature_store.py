"""The target's hidden states on disk, for training without the target.

A store is a folder with `store.json` and shards of some texts each, `shard-00000.safetensors` and so on. They hold for text i
`i.input_ids`, `i.loss_mask`, `i.features` and, unless the features are the last hidden states, `i.last_hidden`. A shard is
whole or not there, so a run that broke off goes on with those that are missing, and several processes can share the work.

Shapes: T tokens of a text, L feature layers, t the target's hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ..heads.saving import write_json, write_weights, written_together
from .batch import TrainingBatch
from .teacher import Teacher

DESCRIPTION = "store.json"
PRECISIONS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}
BYTES_PER_VALUE = 2
TOKENS_PER_BATCH = 4096  # that the target reads at once
BYTES_PER_TOKEN = 8 + 1  # its id, and whether it is trained
GIB = 2**30


@dataclass(frozen=True)
class StoreDescription:
    """What a store holds; a run goes on with a store only if it would write the same.

    Args:
        target: The target's name.
        feature_layers: L, as indices into `hidden_states`.
        last_layer: The index of the last one.
        hidden_size: t.
        precision: `"float16"`, finer, or `"bfloat16"` for targets whose states do not fit it.
        texts_per_shard: How many texts a shard has.
        data: What tells the data and their order from others, a fingerprint for instance.
        mixed_precision: What the target's products were computed in, if not as its weights are: `"bf16"` or `"fp16"`.

    Raises:
        ValueError: if the precision is not one of these.
    """

    target: str
    feature_layers: list[int]
    last_layer: int
    hidden_size: int
    precision: str = "float16"
    texts_per_shard: int = 64
    data: str = ""
    mixed_precision: str = "no"

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS or self.texts_per_shard < 1:
            raise ValueError(
                f"A store is in {' or '.join(PRECISIONS)} with at least one text per shard, got {self.precision!r} and "
                f"{self.texts_per_shard}."
            )

    @classmethod
    def of(cls, teacher: Teacher, **settings: Any) -> StoreDescription:
        """The description of what a teacher gives.

        Args:
            teacher: The teacher.
            settings: `precision`, `texts_per_shard`, `data` and `mixed_precision`.
        """
        parts = teacher.parts
        return cls(teacher.target.name_or_path, list(teacher.feature_layers), parts.layers, parts.hidden_size, **settings)

    @property
    def has_last_hidden(self) -> bool:
        """Whether the last hidden states are stored by themselves."""
        return self.feature_layers != [self.last_layer]

    def bytes_for(self, tokens: int) -> int:
        """How large a store of so many tokens gets."""
        states = len(self.feature_layers) + self.has_last_hidden
        return tokens * (states * self.hidden_size * BYTES_PER_VALUE + BYTES_PER_TOKEN)


class FeatureStore:
    """A store, to be read, and written on where it ends.

    Args:
        folder: Its folder.
        description: What it holds or will hold; `None` to open one that is there.
        quota: How many bytes it may have; `None` for any number.

    Raises:
        ValueError: if the folder holds another store, or none where none is described.
    """

    def __init__(self, folder: str | Path, description: StoreDescription | None = None, quota: int | None = None):
        self.folder, self.quota = Path(folder), quota
        found = self._found()
        if found is None and description is None:
            raise ValueError(f"There is no feature store in {folder}.")
        if found is not None and description is not None and found != description:
            changed = [name for name, value in asdict(found).items() if value != asdict(description)[name]]
            raise ValueError(
                f"The feature store in {folder} was written with another {', '.join(changed)}; write to another folder, or "
                "delete this one."
            )
        described = found or description
        assert described is not None
        self.description = described
        if found is None:
            with written_together(self.folder) as folder:
                write_json(folder / DESCRIPTION, asdict(described))
        self._index = self._indexed()

    @property
    def bytes_used(self) -> int:
        """How large the store is."""
        return sum(shard.stat().st_size for shard in self._shards())

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        """A text: `input_ids` `[T]`, `loss_mask` `[T]`, `features` `[T, L t]`, `last_hidden` `[T, t]`."""
        shard, name = self._index[place]
        with safe_open(shard, framework="pt") as file:
            names = {key.split(".")[1]: key for key in _keys(file) if key.split(".")[0] == name}
            text = {part: file.get_tensor(key) for part, key in names.items()}
        text["loss_mask"] = text["loss_mask"].bool()
        text.setdefault("last_hidden", text["features"])
        return text

    def check_estimate(self, tokens: int) -> str:
        """What the store will take, in words.

        Args:
            tokens: How many tokens the data have.

        Raises:
            ValueError: if that is more than the quota.
        """
        size = self.description.bytes_for(tokens)
        words = f"{tokens} tokens take {size / GIB:.2f} GiB in {self.folder}"
        if self.quota is not None and size > self.quota:
            raise ValueError(
                f"{words}, more than the quota of {self.quota / GIB:.2f} GiB; store fewer texts, allow more, or train online, "
                "with the target in the step."
            )
        return f"{words}."

    def write(
        self,
        teacher: Teacher,
        lengths: Sequence[int],
        batch_of: Callable[[Sequence[int]], TrainingBatch],
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Stores what the teacher gives of the texts whose shards are missing.

        Args:
            teacher: The teacher.
            lengths: T of each text, in the order of the data.
            batch_of: A batch of the texts at some places, a row each.
            part: This process and how many there are: each writes its own share of the shards.

        Raises:
            ValueError: if the quota is used up.
            FloatingPointError: if too many texts have states that are not finite; a few are left out.
        """
        number, count = part
        own = [shard for shard in self._missing(len(lengths)) if shard % count == number]
        for shard in tqdm(own, desc="hidden states", disable=number > 0):
            places = self._places(shard, len(lengths))
            texts: dict[int, dict[str, Tensor]] = {}
            for batch in _of_like_length(places, lengths):
                texts |= zip(batch, self._texts(teacher, batch_of(batch)), strict=True)
            self._close({f"{place}.{name}": value for place in places for name, value in texts[place].items()}, shard)
        self._index = self._indexed()

    def _missing(self, texts: int) -> list[int]:
        """The shards that are to be written."""
        there = {shard.name for shard in self._shards()}
        wanted = range(-(-texts // self.description.texts_per_shard))
        return [number for number in wanted if _name(number) not in there]

    def _places(self, shard: int, texts: int) -> range:
        size = self.description.texts_per_shard
        return range(shard * size, min((shard + 1) * size, texts))

    def _texts(self, teacher: Teacher, batch: TrainingBatch) -> Iterator[dict[str, Tensor]]:
        """What is stored of each row; nothing of those that are not finite in the store's precision."""
        precision = PRECISIONS[self.description.precision]
        mixed = MIXED.get(self.description.mixed_precision)
        with torch.autocast(batch.input_ids.device.type, mixed, enabled=mixed is not None):
            states = teacher(batch, precision)
        for row, exists in enumerate(batch.attention_mask.bool()):
            if not bool(states.is_finite[row]):
                yield {}
                continue
            text = {
                "input_ids": batch.input_ids[row, exists],
                "loss_mask": batch.loss_mask[row, exists].to(torch.uint8),
                "features": states.features[row, exists],
            }
            if self.description.has_last_hidden:
                text["last_hidden"] = states.last_hidden[row, exists]
            yield {name: value.contiguous().cpu() for name, value in text.items()}

    def _close(self, texts: dict[str, Tensor], number: int) -> None:
        size = sum(value.nbytes for value in texts.values())
        if self.quota is not None and self.bytes_used + size > self.quota:
            raise ValueError(
                f"The feature store in {self.folder} has reached its quota of {self.quota / GIB:.2f} GiB after "
                f"{len(self._shards())} shards; what is there can be trained on."
            )
        with written_together(self.folder) as folder:
            write_weights(folder / _name(number), texts)

    def _shards(self) -> list[Path]:
        return sorted(self.folder.glob("shard-*.safetensors"))

    def _indexed(self) -> list[tuple[Path, str]]:
        index = []
        for shard in self._shards():
            with safe_open(shard, framework="pt") as file:
                names = {key.split(".")[0] for key in _keys(file)}
            index += [(shard, name) for name in sorted(names, key=int)]
        return index

    def _found(self) -> StoreDescription | None:
        file = self.folder / DESCRIPTION
        return StoreDescription(**json.loads(file.read_text())) if file.exists() else None


def batch_of_texts(texts: Sequence[dict[str, Tensor]]) -> TrainingBatch:
    """Texts of a store as a batch, padded on the right.

    Args:
        texts: What `FeatureStore.__getitem__` gives.
    """

    def rows(name: str) -> Tensor:
        return pad_sequence([text[name] for text in texts], batch_first=True)

    lengths = torch.tensor([len(text["input_ids"]) for text in texts])
    places = torch.arange(int(lengths.max())).expand(len(texts), -1)
    exists = (places < lengths[:, None]).long()
    return TrainingBatch(
        rows("input_ids"), exists, places, rows("loss_mask"), features=rows("features"), last_hidden=rows("last_hidden")
    )


def _of_like_length(places: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Batches of texts, the longest first, with little padding and no more than so many tokens, or one text."""
    batch: list[int] = []
    for place in sorted(places, key=lambda place: -lengths[place]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > TOKENS_PER_BATCH:
            yield batch
            batch = []
        batch.append(place)
    yield batch


def _name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"


def _keys(file: Any) -> list[str]:
    return list(file.keys())  # an open file can be asked for its keys, and not gone through
