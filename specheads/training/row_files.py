"""The files of generated data: whole lines only, and a resumed run adds to them.

A folder holds `data/train-00000-of-00001.jsonl`, one file per process, in the layout that `datasets` and the Hub know;
`failed/00000-of-00001.jsonl`, what could not be answered; and `provenance.json`, what the rows depend on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..evaluation.prompts import InputError
from .conversations import LENGTH
from .data_provenance import PROVENANCE


class OutputError(OSError):
    """Something cannot be written; the message is one sentence that says what is left."""

    def __init__(self, path: Path, error: OSError, remains: str):
        super().__init__(f"{path} cannot be written ({error.strerror or error}); {remains}")


class LineFile:
    """A file of JSON lines that only ever has whole ones.

    Args:
        path: The file; made, with its folder, if it is not there. A last line that was cut short is dropped.

    Raises:
        InputError: if another process writes it.
        OutputError: if it cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise OutputError(path, error, "choose a folder that can be written to.") from error
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"{path} is being written by another process; wait for it, or give each one its own --shard."
            ) from error
        self.size = self.lines = 0
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.size += len(line)
                self.lines += 1
        os.ftruncate(self.descriptor, self.size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """What is in it.

        Raises:
            InputError: if a line is not JSON.
        """
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield dict(json.loads(line))
                except (ValueError, TypeError) as error:
                    raise InputError(
                        f"{self.path}, line {number}, is damaged ({error}); delete the line to have it made again."
                    ) from error

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds lines; all of them are on the disk when it returns, or none is left there.

        Raises:
            OutputError: if the disk is full, or fails.
        """
        content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode("utf-8", "replace")
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(self.descriptor, left) :]
            os.fsync(self.descriptor)
        except OSError as error:
            os.ftruncate(self.descriptor, self.size)
            remains = f"its {self.lines} lines so far are whole. Make room and run the same command again to go on."
            raise OutputError(self.path, error, remains) from error
        self.size += len(content)
        self.lines += len(records)

    def close(self) -> None:
        """Lets other processes write it."""
        os.close(self.descriptor)


class OutputFolder:
    """The folder of a run.

    Args:
        folder: Where it is.
        shard: Which process this is, and how many there are.

    Attributes:
        done: The ids of what was answered or failed.
        counts: How many rows there are, their tokens, how many end with a reply that was cut or have turns without a reply, and
            how many failed, by reason.
    """

    def __init__(self, folder: Path, shard: tuple[int, int]):
        self.folder = folder
        name = f"{shard[0]:05d}-of-{shard[1]:05d}"
        self.rows = LineFile(folder / "data" / f"train-{name}.jsonl")
        self.failed = LineFile(folder / "failed" / f"{name}.jsonl")
        self.done: set[str] = set()
        self.counts = Counter({"rows": 0, "tokens": 0, "cut": 0, "partly_answered": 0})
        self._count(self.rows, self.failed)

    def check(self, settings: Mapping[str, Any], origin: Mapping[str, Any]) -> None:
        """Writes what the rows depend on, or compares it with what is written.

        Args:
            settings: What the rows depend on; must be the same for all runs and processes of a folder.
            origin: What else is worth knowing of the first run.

        Raises:
            InputError: if the folder has rows of other settings.
            OutputError: if it cannot be written.
        """
        current = json.loads(json.dumps({**settings, "origin": origin}))
        path = self.folder / PROVENANCE
        try:
            before = _written_once(path, current)
        except OSError as error:
            raise OutputError(path, error, "choose a folder that can be written to, or make room.") from error
        changed = [name for name in {**before, **current} if name != "origin" and before.get(name) != current.get(name)]
        if changed:
            differences = "; ".join(_difference(name, before.get(name), current.get(name)) for name in changed)
            raise InputError(
                f"The rows in {self.folder} were written with other settings: {differences}. Use the same, or another folder."
            )

    def append(self, rows: Sequence[Mapping[str, Any]], failed: Sequence[Mapping[str, Any]]) -> None:
        """Adds rows, and what failed, but for those that are there already.

        Raises:
            OutputError: if the disk is full, or fails.
        """
        new = [row for row in rows if row["id"] not in self.done]
        new_failed = [entry for entry in failed if entry["id"] not in self.done]
        self.rows.append(new)
        self.failed.append(new_failed)
        self._count(new, new_failed)

    def _count(self, rows: Iterable[Mapping[str, Any]], failed: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            self.done.add(row["id"])
            self.counts["rows"] += 1
            self.counts["tokens"] += row["num_tokens"]
            self.counts["cut"] += row["finish_reason"] == LENGTH
            self.counts["partly_answered"] += row["unanswered"] > 0
        for entry in failed:
            self.done.add(entry["id"])
            self.counts[f"failed: {entry['reason']}"] += 1

    def close(self) -> None:
        """Lets other processes write here."""
        self.rows.close()
        self.failed.close()


def _written_once(path: Path, value: Any) -> dict[str, Any]:
    """What a file says, written now if it is not there; of several processes the first one counts."""
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".writing-", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _difference(name: str, before: Any, current: Any) -> str:
    if isinstance(before, dict) and isinstance(current, dict):
        inner = [key for key in {**before, **current} if before.get(key) != current.get(key)]
        return ", ".join(_difference(f"{name}.{key}", before.get(key), current.get(key)) for key in inner)
    return f"{name} was {before!r} and is {current!r}"
