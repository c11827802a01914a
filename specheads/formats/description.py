"""What a folder or a repository holds of a head, whoever wrote it, and whether it fits a target."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..heads import DraftHead, load_records
from ..heads.download import DOWNLOAD_ARGUMENTS, find_config, read_json
from . import LAYOUTS, import_head, read_own
from .checkpoint import Checkpoint

OWN_LAYOUT = "specheads"
# Where layouts of others name the target.
TARGET_FIELDS = ("base_model_name_or_path", "target_model_name_or_path", "base_model")


@dataclass(frozen=True)
class Check:
    """Whether a head fits a target.

    Args:
        fits: Whether it can be used with it.
        remarks: Why it cannot, or what should be known.
    """

    fits: bool
    remarks: tuple[str, ...] = ()


def describe_head(path_or_id: str | os.PathLike[str], **download: Any) -> dict[str, Any]:
    """What can be said of a head without its target.

    Args:
        path_or_id: A folder, or the id of a Hub repository.
        download: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`, `force_download`.

    Returns:
        `layout`, `kind`, `parameters`, `dtype`, `vocabulary`, `target`, `feature_layers`, `training`, `results` and `engines`;
        what is not known is `None`.

    Raises:
        FileNotFoundError: if there is no config, or no weights.
        OSError: if the repository or the revision is not there, may not be read, or cannot be reached.
        ValueError: if the layout is not known, or the files are damaged.
    """
    config, where = find_config(path_or_id, download)
    fields = read_json(config)
    if "specheads_version" not in fields:
        return _of_others(Checkpoint.open(path_or_id, **where))
    head = read_own(path_or_id, fields.get("model_type"), where, {})
    results, training = load_records(path_or_id, **{name: where[name] for name in where if name in DOWNLOAD_ARGUMENTS})
    return {
        **describe_loaded(head),
        "layout": OWN_LAYOUT,
        "version": fields["specheads_version"],
        "training": None if training is None else {"command": training.command, "datasets": list(training.datasets)},
        "results": None if results is None else [_result(task) for task in results.tasks],
    }


def describe_loaded(head: DraftHead) -> dict[str, Any]:
    """What a head that has been read says of itself."""
    config, made_for = head.config, head.config.base_model or {}
    facts, shapes = config.facts(), config.target_shapes()
    own = getattr(config, "own_vocab_size", None) or getattr(config, "truncated_vocab_size", None) or shapes["vocab_size"]
    return {
        "kind": facts.kind,
        "parameters": head.num_parameters(),
        "dtype": str(head.dtype).removeprefix("torch."),
        "vocabulary": {"head": own, "target": shapes["vocab_size"]},
        "target": {name: made_for.get(name) for name in ("name_or_path", "revision", "weights_fingerprint")} | shapes,
        "feature_layers": list(config.feature_layers),
        "says_confidence": config.confidence,
        "target_adapter": config.target_adapter,
        "training_data": config.training_data,
        "engines": facts.engines if facts.vllm is None else f"vLLM reads it as it is (method {facts.vllm['method']}).",
    }


def check_head(path_or_id: str | os.PathLike[str], target: PreTrainedModel, tokenizer: Any, **options: Any) -> Check:
    """Reads a head for a target and says whether it fits.

    Args:
        path_or_id: A folder, or the id of a Hub repository.
        target: The target.
        tokenizer: Its tokenizer.
        options: Those of `import_head`.
    """
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        try:
            import_head(path_or_id, target, **options).check_against(target, tokenizer)
        except ValueError as error:
            return Check(False, (str(error),))
    return Check(True, tuple(dict.fromkeys(str(warning.message) for warning in raised if warning.category is UserWarning)))


def _of_others(checkpoint: Checkpoint) -> dict[str, Any]:
    layout = next((layout for layout in LAYOUTS if layout.recognises(checkpoint)), None)
    if layout is None:
        raise ValueError(
            f"{checkpoint.where} holds no head in a layout that is known (this library's, Medusa's, vLLM's Medusa, Hydra's, "
            f"EAGLE-1 to 3, speculators): its config says model_type={checkpoint.config.get('model_type')!r}."
        )
    name = next((checkpoint.config[field] for field in TARGET_FIELDS if isinstance(checkpoint.config.get(field), str)), None)
    vocabulary: Mapping[str, Any] = {
        "head": checkpoint.config.get("draft_vocab_size"), "target": checkpoint.config.get("vocab_size")
    }  # fmt: skip
    return {
        "kind": f"head in the layout {layout.__name__.rsplit('.', 1)[-1].replace('_', '-')}",
        "parameters": sum(weight.numel() for weight in checkpoint.weights.values()),
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "vocabulary": vocabulary,
        "target": {"name_or_path": name},
        "feature_layers": None,
        "layout": layout.__name__.rsplit(".", 1)[-1].replace("_", "-"),
        "training": None,
        "results": None,
        "engines": None,
    }


def _result(task: Any) -> dict[str, Any]:
    return {
        "task": task.task,
        "prompts": task.prompts,
        "mean_acceptance_length": task.mean_acceptance_length.value,
        "speed_ratio": None if task.speed_ratio is None else task.speed_ratio.value,
        "settings": dict(task.settings),
    }
