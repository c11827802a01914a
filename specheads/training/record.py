"""What is kept of a run beside its head, and shown by its card: how it was trained, and what was measured at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..evaluation.intervals import Interval
from ..evaluation.provenance import provenance, run_provenance
from ..heads.results import MeasuredResults, TaskResult, TrainingRecord
from .arguments import DataArguments, HeadArguments, HeadTrainingArguments
from .evaluating import Measured

PACKAGES = ("accelerate", "datasets", "peft")
# What a run computes depends on these, besides what was set to other than its default.
SHOWN = ("head", "depth", "loss", "depth_weights", "learning_rate", "temperature", "seed")
# These say nothing of the head, or are not for others to see.
PRIVATE = ("output_dir", "hub_token", "hub_model_id", "model_name_or_path", "dataset_name", "eval_dataset_name")
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
    run = run_provenance()
    return TrainingRecord(
        command=run["command"],
        datasets=list(data.dataset_name),
        data_fingerprint=fingerprint,
        arguments={name: value for part in (head, data, args) for name, value in _chosen(part).items()},
        versions={**run["versions"], **{package: _version(package) for package in PACKAGES}},
        curve=curve(history),
    )


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
            length = Interval(*measured.generated_length())
            shares = measured.generated_acceptance()
            found.append(TaskResult(name, len(measured.generated), length, shares, None, settings))
    if not found:
        return None
    return MeasuredResults(found, provenance(target), fingerprint)


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
    names = (name for name, field in fields.items() if field.init and name not in PRIVATE and not name.startswith("_"))
    return {
        name: value
        for name in names
        if (value := getattr(getattr(part, name), "value", getattr(part, name))) is not None
        and (name in SHOWN or str(value) != str(_default(fields[name])))
        if isinstance(value, str | int | float | bool | list | dict)
    }


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
