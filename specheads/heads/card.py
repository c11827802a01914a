"""The model card of a head, from what was measured and nothing else."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, StrictUndefined

from .base import DraftHead
from .card_text import FILTERS, literal, one_line
from .download import is_repository_id
from .facts import HeadFacts
from .provenance import weights_fingerprint
from .repository import README
from .results import MeasuredResults, TrainingRecord
from .saving import written_together

# A file without it is the user's own.
MARK = "<!-- Written by specheads, and anew with every save. Remove this line to keep changes of your own. -->"
TEMPLATE = "card.md.jinja"
THIS_REPOSITORY = "<this repository>"


def make_card(
    head: DraftHead,
    results: MeasuredResults | None = None,
    training: TrainingRecord | None = None,
    *,
    repo_id: str | None = None,
    tags: Sequence[str] = (),
    custom_generate: bool = False,
) -> ModelCard:
    """The model card of a head.

    Args:
        head: The head.
        results: What was measured of it; without, the card says that nothing was.
        training: How it was trained; without, the card says that it is not known.
        repo_id: The repository that the card is for, if known.
        tags: Tags besides those of the kind of head.
        custom_generate: Whether the repository has a `custom_generate/generate.py`.

    Returns:
        The card: metadata and text.

    Raises:
        ValueError: if the results were measured with other weights than the head's.
    """
    fingerprint = weights_fingerprint(head)
    if results is not None and results.head_fingerprint not in (None, fingerprint):
        raise ValueError(
            f"The results were measured with other weights (fingerprint {results.head_fingerprint}, and the head has "
            f"{fingerprint}): measure this head, or leave them out."
        )
    facts, made_for = head.config.facts(), _described(head)
    base = made_for["name_or_path"] or "a target that the head does not name"
    content = _template().render(
        metadata=_metadata(head, results, training, repo_id, [*tags, *(["custom_generate"] if custom_generate else [])]),
        mark=MARK,
        title=repo_id or f"{facts.kind} for {base}",
        facts=facts,
        base=base,
        made_for=made_for,
        target_arguments=_target_arguments(made_for),
        head=repo_id or THIS_REPOSITORY,
        custom_generate=custom_generate,
        vllm=_vllm_command(facts, made_for, repo_id or THIS_REPOSITORY),
        results=results,
        training=training,
        fingerprint=fingerprint,
        parameters=f"{head.num_parameters():,}",
        version=head.config.specheads_version,
    )
    return ModelCard(content)


def write_card(
    head: DraftHead, folder: str | os.PathLike[str], results: MeasuredResults | None = None, **arguments: Any
) -> bool:
    """Writes the card into a folder, unless a `README.md` of the user's own is there.

    Args:
        head: The head.
        folder: The folder.
        results: What was measured.
        arguments: Those of `make_card`.

    Returns:
        Whether it was written.

    Raises:
        ValueError: if the results were measured with other weights.
    """
    content = str(make_card(head, results, **arguments))
    if is_own_text(Path(folder) / README):
        return False
    with written_together(folder) as temporary:
        (temporary / README).write_text(content, encoding="utf-8")
    return True


def is_own_text(file: Path) -> bool:
    """Whether there is a card that was not written here."""
    return file.exists() and MARK not in file.read_text(encoding="utf-8", errors="replace")


def _template() -> Any:
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= FILTERS
    return environment.from_string(files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8"))


def _described(head: DraftHead) -> dict[str, Any]:
    """What the config says of the target, without folders of the machine that wrote it."""
    made_for = head.config.base_model or {}
    fields = ("name_or_path", "revision", "weights_fingerprint", "tokenizer_fingerprint")
    described = {name: made_for.get(name) for name in fields}
    name = described["name_or_path"]
    described["loaded_from"] = name or "<its target>"
    if name and not is_repository_id(name):
        described["name_or_path"] = re.split(r"[/\\]", str(name).rstrip("/\\"))[-1]
        described["loaded_from"] = f"path/to/{described['name_or_path']}"
    return described


def _metadata(
    head: DraftHead, results: MeasuredResults | None, training: TrainingRecord | None, repo_id: str | None, tags: list[str]
) -> str:
    base = (head.config.base_model or {}).get("name_or_path")
    relation = {"base_model": base, "base_model_relation": "adapter"} if base and is_repository_id(base) else {}
    datasets = [name for name in (training.datasets if training else ()) if is_repository_id(name)]
    name = (repo_id or "").rsplit("/", 1)[-1] or "draft head"
    data = ModelCardData(
        library_name="specheads",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", *head.config.facts().tags, *tags],
        datasets=datasets or None,
        model_name=name if results else None,
        eval_results=_eval_results(results) if results else None,
        **relation,
    )
    return data.to_yaml()


def _eval_results(results: MeasuredResults) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=one_line(task.task),
            dataset_name=one_line(task.task),
            dataset_args={name: str(value) for name, value in task.settings.items()} or None,
            metric_type=metric,
            metric_value=round(interval.value, 4),
        )
        for task in results.tasks
        for metric, interval in (("mean_acceptance_length", task.mean_acceptance_length), ("speed_ratio", task.speed_ratio))
        if interval is not None
    ]


def _target_arguments(made_for: dict[str, Any]) -> str:
    name = literal(made_for["loaded_from"])
    return f"{name}, revision={literal(made_for['revision'])}" if made_for["revision"] else name


def _vllm_command(facts: HeadFacts, made_for: dict[str, Any], name: str) -> str | None:
    """What serves the target with the head as it is saved; `None` where vLLM does not read it."""
    if facts.vllm is None:
        return None
    words = ["vllm", "serve", made_for["loaded_from"]]
    words += ["--revision", made_for["revision"]] if made_for["revision"] else []
    settings = json.dumps({**facts.vllm, "model": name})
    return shlex.join([one_line(word) for word in [*words, "--speculative-config", settings]])
