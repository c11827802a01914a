"""What was measured of a head, and how it was trained: kept beside its weights, and shown by its model card."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..evaluation.intervals import Interval
from .download import DOWNLOAD_ARGUMENTS, find, find_config

RESULTS_FILE = "specheads/results.json"


@dataclass(frozen=True)
class TaskResult:
    """What was measured on the prompts of one task, with one setting.

    Args:
        task: Its name.
        prompts: How many prompts there were.
        mean_acceptance_length: Emitted tokens per round, the target's own included.
        acceptance_at_position: For each position, the share of the rounds that drafted so far in which it was accepted.
        speed_ratio: Tokens per second, divided by those of plain `generate` on the same prompts; `None` if not measured.
        settings: What it was measured with: `draft_tokens`, `tree_nodes`, `temperature`, the batch size, ...

    Raises:
        ValueError: if a figure is none that can have been measured.
    """

    task: str
    prompts: int
    mean_acceptance_length: Interval
    acceptance_at_position: Sequence[float]
    speed_ratio: Interval | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prompts < 1:
            raise ValueError(f"A result of the task {self.task!r} needs at least one prompt, got {self.prompts}.")
        _check_interval(self.task, "mean_acceptance_length", self.mean_acceptance_length, least=1.0)
        if self.speed_ratio is not None:
            _check_interval(self.task, "speed_ratio", self.speed_ratio, least=0.0)
        if not all(0.0 <= share <= 1.0 for share in self.acceptance_at_position):
            raise ValueError(
                f"`acceptance_at_position` of the task {self.task!r} holds shares between 0 and 1, got "
                f"{list(self.acceptance_at_position)}."
            )


@dataclass(frozen=True)
class MeasuredResults:
    """What was measured of a head.

    Args:
        tasks: A result per task and setting; at least one.
        provenance: The `command` that measured it, and `versions`, `device`, `dtype`, ..., as
            `specheads.evaluation.provenance` gives them.
        data_fingerprint: A fingerprint of the prompts.
        head_fingerprint: `weights_fingerprint` of the head that was measured; a card shows the results for no other.

    Raises:
        ValueError: if there is no task, or no command.
    """

    tasks: Sequence[TaskResult]
    provenance: Mapping[str, Any]
    data_fingerprint: str | None = None
    head_fingerprint: str | None = None

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("Measured results need at least one task; leave them out where nothing was measured.")
        if not self.provenance.get("command"):
            raise ValueError("Measured results need `provenance['command']`, the command that measured them.")


@dataclass(frozen=True)
class TrainingRecord:
    """How a head was trained.

    Args:
        command: The command.
        datasets: Names of the data: Hub ids, or files.
        data_fingerprint: A fingerprint of the examples.
        arguments: The arguments that matter.
        versions: Versions of the packages.
        curve: Its course, each point with its `step` and what was known there: `loss`, `eval_mean_acceptance_length`, ...
    """

    command: str
    datasets: Sequence[str] = ()
    data_fingerprint: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    curve: Sequence[Mapping[str, float]] = field(default_factory=list)


def records_as_json(
    results: MeasuredResults | None, training: TrainingRecord | None, head_fingerprint: str | None
) -> dict[str, Any]:
    """Both as they go into a head's folder, with the fingerprint of the weights that they are about."""
    return {
        "head_fingerprint": head_fingerprint,
        "results": None if results is None else asdict(results),
        "training": None if training is None else asdict(training),
    }


def load_records(name_or_path: str | os.PathLike[str], **download: Any) -> tuple[MeasuredResults | None, TrainingRecord | None]:
    """What lies beside a head's weights of what was measured of it and how it was trained; `None` for what does not.

    Args:
        name_or_path: The head's folder, or the id of its Hub repository.
        download: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`, `force_download`.

    Raises:
        FileNotFoundError: if there is no head.
        OSError: if the repository or the revision is not there, may not be read, or cannot be reached.
        TypeError: if an argument is not known.
        ValueError: if the file is damaged.
    """
    if unknown := sorted(set(download) - set(DOWNLOAD_ARGUMENTS)):
        raise TypeError(f"Unknown argument(s) {', '.join(unknown)}; known are {', '.join(DOWNLOAD_ARGUMENTS)}.")
    _, download = find_config(name_or_path, download)
    file = find(name_or_path, RESULTS_FILE, download)
    return (None, None) if file is None else read_records(Path(file))[1:]


def read_records(file: Path) -> tuple[str | None, MeasuredResults | None, TrainingRecord | None]:
    """What `records_as_json` wrote: the fingerprint of the head's weights, results and record.

    Raises:
        ValueError: if the file is damaged.
    """
    try:
        records = json.loads(file.read_text(encoding="utf-8"))
        results, training = records["results"], records["training"]
        return (
            records["head_fingerprint"],
            None if results is None else _read_results(results),
            None if training is None else TrainingRecord(**training),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}); delete it, or measure again.") from error


def _read_results(fields: dict[str, Any]) -> MeasuredResults:
    return MeasuredResults(**{**fields, "tasks": [_read_task(task) for task in fields["tasks"]]})


def _read_task(fields: dict[str, Any]) -> TaskResult:
    ratio = fields["speed_ratio"]
    return TaskResult(
        **{
            **fields,
            "mean_acceptance_length": Interval(**fields["mean_acceptance_length"]),
            "speed_ratio": None if ratio is None else Interval(**ratio),
        }
    )


def _check_interval(task: str, name: str, interval: Interval, least: float) -> None:
    ends = [end for end in (interval.low, interval.value, interval.high) if end is not None]
    if not all(math.isfinite(end) and end >= least for end in ends) or ends != sorted(ends):
        raise ValueError(
            f"`{name}` of the task {task!r} must be finite and at least {least}, its ends around it, got {interval}."
        )
