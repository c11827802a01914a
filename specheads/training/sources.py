"""Where rows come from: the Hub, files, folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..evaluation.prompts import InputError

BUILDERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".arrow": "arrow"}
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")


def load_rows(
    source: str, split: str = "train", subset: str | None = None, revision: str | None = None, streaming: bool = False
) -> Any:
    """Opens a dataset.

    Args:
        source: A Hub id, a file (JSON, JSON lines, Parquet or Arrow; JSON may be compressed), a folder of such files, or a
            folder written by `Dataset.save_to_disk`.
        split: Which part of it.
        subset: The name of one of its configurations.
        revision: Of a dataset on the Hub.
        streaming: Read it as it is used, rather than converting it first.

    Returns:
        A `datasets.Dataset`, or an `IterableDataset` if streaming.

    Raises:
        InputError: if it cannot be opened.
    """
    import datasets

    path = Path(source).expanduser()
    if path.is_file() and not path.stat().st_size:
        raise InputError(f"The dataset {source} is an empty file; name one that holds rows.")
    try:
        if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
            return _saved(datasets.load_from_disk(str(path)), source, split, streaming)
        if path.is_file():
            return datasets.load_dataset(_builder(path), data_files=str(path), split=split_of_file(split), streaming=streaming)
        if not path.exists() and (path.suffix in BUILDERS or source.startswith((".", "/", "~"))):
            raise InputError(f"There is no file or folder {source}.")
        return datasets.load_dataset(source, subset, split=split, revision=revision, streaming=streaming)
    except InputError:
        raise
    # What is wrong with a file shows as an error of the library that reads it, of many classes.
    except Exception as error:
        raise InputError(f"The dataset {source} cannot be read: {_first_line(error)}") from error


def split_of_file(split: str) -> str:
    """A file is one split, whatever it is called; a slice of it is kept (`train[:100]`)."""
    return "train" + split[split.index("[") :] if "[" in split else "train"


def _saved(loaded: Any, source: str, split: str, streaming: bool) -> Any:
    if isinstance(loaded, dict):
        if split not in loaded:
            raise InputError(f"The dataset {source} has no split {split!r}; it has {', '.join(loaded)}.")
        loaded = loaded[split]
    return loaded.to_iterable_dataset() if streaming else loaded


def _builder(path: Path) -> str:
    suffix = path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix
    if suffix not in BUILDERS:
        raise InputError(f"The file {path} has none of the suffixes {', '.join(BUILDERS)}, so its format is not known.")
    return BUILDERS[suffix]


def _first_line(error: BaseException) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(cause).strip() or str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
