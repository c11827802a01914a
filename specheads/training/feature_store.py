"""The target's hidden states on disk, for training without the target.

A store is a folder with `store.json` and shards of some texts each, `shard-00000.safetensors` and so on. They hold for text i
`i.input_ids`, `i.loss_mask`, `i.features` and, unless the features are the last hidden states, `i.last_hidden`. A shard is
whole or not there, so a run that broke off goes on after the last one.

Shapes: T tokens of a text, L feature layers, t the target's hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..heads.saving import write_json, write_weights, written_together
from .batch import TrainingBatch
from .teacher import Teacher

DESCRIPTION = "store.json"
PRECISIONS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BYTES_PER_VALUE = 2
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
            settings: `precision`, `texts_per_shard` and `data`.
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
    def texts_done(self) -> int:
        """How many texts of the data have been gone through, those that were skipped among them."""
        return self.description.texts_per_shard * len(self._shards())

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

    def write(self, teacher: Teacher, batches: Iterable[TrainingBatch]) -> None:
        """Stores what the teacher gives, from where the store ends.

        Args:
            teacher: The teacher.
            batches: All data in order, one text per row; those that are done are passed over without a run of the target.

        Raises:
            ValueError: if the quota is used up.
            FloatingPointError: if too many texts have states that are not finite; a few are left out.
        """
        done, passed, shard = self.texts_done, 0, dict[str, Tensor]()
        for batch in batches:
            size = len(batch.input_ids)
            if passed + size > done:
                for row, text in enumerate(self._texts(teacher, batch)):
                    if passed + row >= done:
                        shard |= {f"{passed + row}.{name}": value for name, value in text.items()}
                        self._close_full(shard, passed + row + 1)
            passed += size
        if passed % self.description.texts_per_shard:
            self._close(shard, passed // self.description.texts_per_shard)

    def _texts(self, teacher: Teacher, batch: TrainingBatch) -> Iterator[dict[str, Tensor]]:
        """What is stored of each row; nothing of those that are not finite in the store's precision."""
        precision = PRECISIONS[self.description.precision]
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

    def _close_full(self, shard: dict[str, Tensor], done: int) -> None:
        number, rest = divmod(done, self.description.texts_per_shard)
        if not rest:
            self._close(shard, number - 1)

    def _close(self, shard: dict[str, Tensor], number: int) -> None:
        size = sum(value.nbytes for value in shard.values())
        if self.quota is not None and self.bytes_used + size > self.quota:
            raise ValueError(
                f"The feature store in {self.folder} has reached its quota of {self.quota / GIB:.2f} GiB after "
                f"{self.texts_done} texts; what is there can be trained on."
            )
        with written_together(self.folder) as folder:
            write_weights(folder / f"shard-{number:05d}.safetensors", shard)
        shard.clear()
        self._index = self._indexed()

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


def _keys(file: Any) -> list[str]:
    return list(file.keys())  # an open file can be asked for its keys, and not gone through
