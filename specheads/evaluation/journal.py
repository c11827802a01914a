"""Files that an interruption cannot spoil: a result appears whole or not at all, and what was measured so far is kept aside."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .prompts import InputError


def check_output(option: str, path: Path | None) -> None:
    """Refuses a file that could not be written, before anything is measured for it.

    Args:
        option: The option that names it.
        path: The file; `None` if none is wanted.

    Raises:
        InputError: saying why.
    """
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder; name a file in it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(
            f"{option} {path} cannot be written ({error.strerror}); name a file in a folder where you may write."
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Writes JSON under a temporary name, then renames it.

    Args:
        path: The file.
        value: What `json` can write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


class Journal:
    """The trials of a measurement, one line each, beside the file that will hold the result.

    Args:
        output: The file of the result.
        settings: What the measurement depends on. A journal of other settings is not taken up again.
        resume: Whether to take up the journal of an interrupted run.

    Raises:
        InputError: if a journal is there without `resume`, or one of other settings with it.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any], resume: bool):
        self.path = output.with_name(f"{output.name}.partial")
        self.trials: list[dict[str, Any]] = []
        records = _whole_records(self.path) if self.path.exists() else []
        if len(records) > 1:
            if not resume:
                raise InputError(f"{self.path} is left from an interrupted run: add --resume to go on with it, or delete it.")
            self._check(settings, records[0])
            self.trials = records[1:]
        # Written anew, since the last line may have been cut.
        write_lines(self.path, [dict(settings), *self.trials])

    def append(self, trial: Mapping[str, Any]) -> None:
        """Adds a trial."""
        self.trials.append(dict(trial))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(trial, ensure_ascii=False) + "\n")

    def left(self, total: int) -> Iterable[int]:
        """The numbers of the trials that are not measured yet, of `total`; shows how far they are."""
        from tqdm import tqdm

        done = len(self.trials)
        return tqdm(range(done, total), initial=done, total=total, desc="trials", file=sys.stderr)

    def close(self) -> None:
        """Deletes the journal, once the result is written."""
        self.path.unlink()

    def _check(self, settings: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        # Through JSON, as the journal's own settings went.
        current = json.loads(json.dumps(dict(settings)))
        changed = [name for name in {**current, **before} if current.get(name) != before.get(name)]
        if changed:
            name = changed[0]
            raise InputError(
                f"{self.path} was measured with {name}={before.get(name)!r}, not {current.get(name)!r}: "
                "resume with the same settings, or delete it."
            )


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Writes JSON lines under a temporary name, then renames it."""
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def write_text(path: Path, text: str) -> None:
    """Writes text under a temporary name, then renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def _whole_records(path: Path) -> list[dict[str, Any]]:
    records = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break  # the line that the interruption cut
        records.append(record)
    return records
