"""What is kept of a run beside its head, and shown by its card: how it was trained, and what was measured at its end."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..evaluation.provenance import provenance, run_provenance
from ..heads.download import is_repository_id
from ..heads.results import MeasuredResults, TaskResult, TrainingRecord
from .arguments import DataArguments, HeadArguments, HeadTrainingArguments
from .data_provenance import describe_data
from .evaluating import Measured

PACKAGES = ("accelerate", "datasets", "peft")
# What a run computes depends on these, besides what was set to other than its default.
SHOWN = ("head", "depth", "loss", "depth_weights", "learning_rate", "temperature", "seed")
# These say nothing of the head, or are not for others to see.
PRIVATE = (
    "output_dir", "hub_token", "hub_model_id", "model_name_or_path", "dataset_name", "eval_dataset_name", "feature_store",
    "resume_from_checkpoint", "greater_is_better", "do_eval", "disable_tqdm", "report_to", "run_name", "use_cpu",
)  # fmt: skip
SECRETS = ("hub_token", "token")
HIDDEN = "..."
MOST_POINTS = 12  # of the curve that the card shows
CURVE = ("loss", "expected_length", "eval_mean_acceptance_length", "eval_generate_mean_acceptance_length")


def training_record(
    head: HeadArguments,
    data: DataArguments,
    args: HeadTrainingArguments,
    fingerprint: str | None,
    history: Sequence[Mapping[str, Any]],
) -> TrainingRecord:
    """How a head was trained.

    Args:
        head: The target and the head.
        data: The data.
        args: How.
        fingerprint: That of the data.
        history: What the trainer logged.
    """
    run = without_secrets(run_provenance())
    return TrainingRecord(
        command=run["command"],
        datasets=[public_name(name) for name in data.dataset_name],
        data_fingerprint=fingerprint,
        arguments={name: value for part in (head, data, args) for name, value in _chosen(part).items()},
        versions={**run["versions"], **{package: _version(package) for package in PACKAGES}},
        curve=curve(history),
    )


def public_name(dataset: str) -> str:
    """A dataset's name for others: of a file or folder here, its last part."""
    return dataset if is_repository_id(dataset) and not Path(dataset).exists() else Path(dataset).name


def data_description(data: DataArguments, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a head's config keeps of its data.

    Args:
        data: The data.
        arguments: Those of the chat template.
    """
    description = describe_data(data.dataset_name, arguments)
    datasets = [{**entry, "source": public_name(entry["source"])} for entry in description["datasets"]]
    return {**description, "datasets": datasets}


def measured_results(
    tasks: Mapping[str, Measured], args: HeadTrainingArguments, target: Any, fingerprint: str | None
) -> MeasuredResults | None:
    """What `generate` did on each task; `None` if it was asked for none.

    Args:
        tasks: By name, what was measured.
        args: How drafts were made and verified.
        target: The target.
        fingerprint: That of the data to evaluate on.
    """
    found = []
    settings = {
        "draft_tokens": args.depth,
        "temperature": args.temperature,
        "verification": args.verification,
        "max_new_tokens": args.generate_tokens,
    }
    for name, measured in tasks.items():
        if measured.generated:
            length = measured.generated_length()
            shares = measured.generated_acceptance()
            found.append(TaskResult(name, len(measured.generated), length, shares, None, settings))
    if not found:
        return None
    return MeasuredResults(found, without_secrets(provenance(target)), fingerprint)


def without_secrets(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run's provenance whose command does not say the values of flags that are secrets: it goes to the Hub."""
    words = shlex.split(run["command"])
    for place, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag.replace("-", "_").strip("_") in SECRETS:
            words[place : place + 1] = [f"{flag}={HIDDEN}"] if value else [word]
            if not value and place + 1 < len(words):
                words[place + 1] = HIDDEN
    return {**run, "command": shlex.join(words)}


def curve(history: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """A run's course at a few of its steps: loss, and acceptance in training, worked out, and measured.

    Args:
        history: What the trainer logged.
    """
    points: dict[int, dict[str, float]] = {}
    for entry in history:
        found = {name: float(entry[name]) for name in CURVE if name in entry}
        if found:
            points.setdefault(int(entry["step"]), {"step": float(entry["step"])}).update(found)
    # Steps that were evaluated say the most; of the others so many that there are not too many points.
    evaluated = [step for step, point in points.items() if CURVE[2] in point]
    steps = evaluated if len(evaluated) > 1 else list(points)
    stride = -(-len(steps) // MOST_POINTS) or 1
    return [points[step] for step in sorted({*steps[::stride], *steps[-1:]})]


def _chosen(part: Any) -> dict[str, Any]:
    """The arguments that were not left as they are, and those that are always of interest."""
    fields = type(part).__dataclass_fields__
    chosen: dict[str, Any] = {}
    for name, field in fields.items():
        if not field.init or name in PRIVATE or name.startswith("_"):
            continue
        value, usual = getattr(part, name), _default(field)
        value = getattr(value, "value", value)
        # What was left as it is may have been filled in since.
        is_left = str(value) == str(usual) or value in ([], {}) or (usual is None and value in (None, False))
        if (name in SHOWN or not is_left) and isinstance(value, str | int | float | list | dict):
            chosen[name] = value
    return chosen


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
