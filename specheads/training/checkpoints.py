"""Checkpoints that are whole or not there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..evaluation.prompts import InputError

WRITING = ".writing-"
RUN = "run.json"  # in a checkpoint: what a run must have in common with the one that it goes on with
# What torch says where a file cannot be written, in place of an OSError.
TORCH_WRITE_FAULTS = ("PytorchStreamWriter", "inline_container", "Parent directory", "cannot be opened")
LITTLE = 2**20  # bytes


class CheckpointError(OSError):
    """A checkpoint cannot be written; the message is one sentence that says what is left."""


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turns whatever a failed write raises into one sentence.

    Args:
        folder: The folder of the run.

    Raises:
        CheckpointError: if something cannot be written.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        if isinstance(error, RuntimeError) and not any(fault in str(error) for fault in TORCH_WRITE_FAULTS):
            raise
        last = last_checkpoint(folder)
        remains = f"{last} is whole and can be resumed from" if last else "there is no checkpoint yet"
        raise CheckpointError(f"{folder} cannot be written ({_reason(error, folder)}); {remains}.") from error


def _reason(error: Exception, folder: Path) -> str:
    """Why a write failed. Of files that it writes itself, torch does not say."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if shutil.disk_usage(folder).free < LITTLE:
        return "no space left on device"
    return "a write failed" if isinstance(error, RuntimeError) else " ".join(str(error).split())


def last_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint of a run; `None` if there is none."""
    from transformers.trainer_utils import get_last_checkpoint

    found = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    return None if found is None else Path(found)


def clear_unfinished(folder: Path) -> None:
    """Removes what a run that was killed had begun to write."""
    for path in folder.glob(f"{WRITING}*"):
        shutil.rmtree(path, ignore_errors=True)


def checkpoint_to_resume(folder: Path, wanted: str | None) -> Path | None:
    """Where a run goes on from.

    Args:
        folder: The folder of the run.
        wanted: `resume_from_checkpoint`: a checkpoint, `"true"` for the last one, or `None` to begin.

    Returns:
        The checkpoint; `None` to begin.

    Raises:
        InputError: if it is not there, or the folder has some and none is wanted.
        CheckpointError: if the folder cannot be written.
    """
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{WRITING}probe"
        probe.mkdir(exist_ok=True)
    last = last_checkpoint(folder)
    if wanted is None or wanted.lower() == "false":
        if last is not None:
            raise InputError(
                f"{folder} already has {last.name}: go on from it with --resume_from_checkpoint true, or choose another folder."
            )
        return None
    if wanted.lower() != "true":
        if not (Path(wanted) / "trainer_state.json").is_file():
            raise InputError(f"`resume_from_checkpoint` must be true or the folder of a checkpoint, got {wanted!r}.")
        return Path(wanted)
    if last is None:
        raise InputError(f"There is no checkpoint in {folder} to resume from; leave out --resume_from_checkpoint.")
    return last


def check_same_run(checkpoint: Path, run: Mapping[str, Any]) -> None:
    """Refuses to go on with another run's checkpoint: the steps that are left would not be those that were left.

    Args:
        checkpoint: The checkpoint.
        run: What must be as it was.

    Raises:
        InputError: if something is not.
    """
    file = checkpoint / RUN
    before = json.loads(file.read_text()) if file.is_file() else {}
    changed = [f"{name} was {before[name]} and is {value}" for name, value in run.items() if before.get(name, value) != value]
    if changed:
        raise InputError(f"{checkpoint} is of a run with other settings: {', '.join(changed)}. Resume with those it had.")
