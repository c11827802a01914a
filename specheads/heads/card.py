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
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from jinja2 import Environment, StrictUndefined

from .base import DraftHead
from .card_text import FILTERS, literal, one_line
from .eagle import EagleHead
from .medusa import MedusaHeads
from .provenance import weights_fingerprint
from .results import MeasuredResults, TrainingRecord

README = "README.md"
# A file without it is the user's own.
MARK = "<!-- Written by specheads, and anew with every save. Remove this line to keep changes of your own. -->"
TEMPLATE = "card.md.jinja"
THIS_REPOSITORY = "<this repository>"

LITERATURE = {
    "eagle1": "Li et al. 2024, EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty, arXiv 2401.15077",
    "eagle2": "Li et al. 2024, EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees, arXiv 2406.16858",
    "eagle3": "Li et al. 2025, EAGLE-3: Scaling up Inference Acceleration via Training-Time Test, arXiv 2503.01840",
    "medusa": "Cai et al. 2024, Medusa: Simple LLM Inference Acceleration with Multiple Decoding Heads, arXiv 2401.10774",
    "hydra": "Ankner et al. 2024, Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding, arXiv 2402.05109",
}


def card(
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
        TypeError: if no card can be written for a head of its kind.
    """
    fingerprint = weights_fingerprint(head)
    if results is not None and results.head_fingerprint not in (None, fingerprint):
        raise ValueError(
            f"The results were measured with other weights (fingerprint {results.head_fingerprint}, the head has {fingerprint}): "
            "measure this head, or leave them out."
        )
    kind, sources = _kind(head)
    made_for = _described(head)
    base = made_for["name_or_path"] or "a target that the head does not name"
    content = _template().render(
        metadata=_metadata(head, results, training, repo_id, [*tags, *(["custom_generate"] if custom_generate else [])]),
        mark=MARK,
        title=repo_id or f"{kind} for {base}",
        kind=kind,
        base=base,
        made_for=made_for,
        target_arguments=_target_arguments(made_for),
        head=repo_id or THIS_REPOSITORY,
        custom_generate=custom_generate,
        vllm=_vllm_command(head, made_for, repo_id or THIS_REPOSITORY),
        other_engines=_other_engines(head),
        results=results,
        training=training,
        fingerprint=fingerprint,
        parameters=f"{head.num_parameters():,}",
        version=head.config.specheads_version,
        literature=[LITERATURE[source] for source in sources],
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
        arguments: Those of `card`.

    Returns:
        Whether it was written.

    Raises:
        ValueError: if the results were measured with other weights.
    """
    file, content = Path(folder) / README, str(card(head, results, **arguments))
    if is_own_text(file):
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{README}.writing")
    temporary.write_text(content, encoding="utf-8")
    temporary.replace(file)
    return True


def is_own_text(file: Path) -> bool:
    """Whether there is a card that was not written here."""
    return file.exists() and MARK not in file.read_text(encoding="utf-8", errors="replace")


def _template() -> Any:
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= FILTERS
    return environment.from_string(files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8"))


def _kind(head: DraftHead) -> tuple[str, list[str]]:
    """What a head is, and where that is described."""
    if isinstance(head, EagleHead):
        version = head.config.eagle_version
        return f"EAGLE-{version} draft head", [f"eagle{version}"]
    if isinstance(head, MedusaHeads):
        dependence = head.config.dependence
        beside = "" if dependence == "none" else f" with {dependence.capitalize()} dependence"
        return f"{head.config.num_heads} Medusa draft heads{beside}", ["medusa", *(["hydra"] if dependence == "hydra" else [])]
    raise TypeError(f"There is no model card for heads of the kind {type(head).__name__}.")


def _described(head: DraftHead) -> dict[str, Any]:
    """What the config says of the target, without folders of the machine that wrote it."""
    made_for = head.config.base_model or {}
    fields = ("name_or_path", "revision", "weights_fingerprint", "tokenizer_fingerprint")
    described = {name: made_for.get(name) for name in fields}
    name = described["name_or_path"]
    if name and not is_repository(name):
        described["name_or_path"] = re.split(r"[/\\]", str(name).rstrip("/\\"))[-1]
    return described


def is_repository(name: Any) -> bool:
    """Whether a name may be the id of a Hub repository, and is no folder here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not os.path.isdir(name)


def _metadata(
    head: DraftHead, results: MeasuredResults | None, training: TrainingRecord | None, repo_id: str | None, tags: list[str]
) -> str:
    _, sources = _kind(head)
    base = (head.config.base_model or {}).get("name_or_path")
    relation = {"base_model": base, "base_model_relation": "adapter"} if base and is_repository(base) else {}
    datasets = [name for name in (training.datasets if training else ()) if is_repository(name)]
    name = (repo_id or "").rsplit("/", 1)[-1] or "draft head"
    data = ModelCardData(
        library_name="specheads",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", *sources, *tags],
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
    name = literal(made_for["name_or_path"] or "<its target>")
    return f"{name}, revision={literal(made_for['revision'])}" if made_for["revision"] else name


def _vllm_command(head: DraftHead, made_for: dict[str, Any], name: str) -> str | None:
    """What serves the target with the head as it is saved; `None` where vLLM does not read it."""
    config = head.config
    if isinstance(head, EagleHead) and config.eagle_version == 3:
        settings = {"method": "eagle3", "model": name, "num_speculative_tokens": 5}
    elif isinstance(head, MedusaHeads) and _is_plain_medusa(head):
        settings = {"method": "medusa", "model": name, "num_speculative_tokens": config.num_heads}
    else:
        return None
    words = ["vllm", "serve", made_for["name_or_path"] or "<its target>"]
    words += ["--revision", made_for["revision"]] if made_for["revision"] else []
    return shlex.join([one_line(word) for word in [*words, "--speculative-config", json.dumps(settings)]])


def _is_plain_medusa(head: MedusaHeads) -> bool:
    """Whether heads have nothing that vLLM would leave aside."""
    config = head.config
    return config.dependence == "none" and not config.output_bias and config.final_logit_softcapping is None


def _other_engines(head: DraftHead) -> str:
    if isinstance(head, EagleHead):
        return (
            "Engines read EAGLE-1 and 2 in the layout of EAGLE's own code, which "
            '`specheads.export_head(head, folder, format="eagle")` writes.'
        )
    return "No engine is known to serve heads of this kind; here they are used with `specheads`."
