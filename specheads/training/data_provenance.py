"""What is known of generated data: who wrote it, and under which template arguments.

`train/generate.py` leaves that beside the data as `provenance.json`, and it goes to the Hub with the folder.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..evaluation.prompts import InputError

PROVENANCE = "provenance.json"


def provenance_of(source: str, revision: str | None = None) -> dict[str, Any] | None:
    """The provenance of a dataset.

    Args:
        source: As `load_rows` takes it.
        revision: Of a dataset on the Hub.

    Returns:
        The content of its `provenance.json`; `None` if it has none.
    """
    path = Path(source).expanduser()
    if path.exists():
        folders = [path] if path.is_dir() else list(path.parents)[:2]  # a file lies in `data/`
        file = next((folder / PROVENANCE for folder in folders if (folder / PROVENANCE).is_file()), None)
    else:
        file = _from_hub(source, revision)
    return None if file is None else dict(json.loads(file.read_text(encoding="utf-8")))


def template_arguments(sources: Sequence[str], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The template arguments to train with: those that the data was written under.

    Args:
        sources: Datasets, as `load_rows` takes them.
        given: What was asked for; `None` takes what the data says, which is no arguments if it says nothing.

    Raises:
        InputError: if the datasets differ, or were written under others than those asked for.
    """
    known = {source: found["template_arguments"] for source in sources if (found := provenance_of(source)) is not None}
    wanted = dict(given) if given is not None else next(iter(known.values()), {})
    for source, arguments in known.items():
        if arguments != wanted:
            raise InputError(
                f"{source} was written under the template arguments {arguments}, not {wanted}: a head learns what will be "
                "served, so use the same, or have the data written anew with `train/generate.py`."
            )
    return wanted


def describe_data(sources: Sequence[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a head's config keeps about its data.

    Args:
        sources: Its datasets.
        arguments: The template arguments that it was trained with.
    """
    return {
        "template_arguments": dict(arguments),
        "datasets": [{"source": source, **_summary(provenance_of(source) or {})} for source in sources],
    }


def warn_of_other_writers(sources: Sequence[str], target: Mapping[str, Any]) -> None:
    """Warns of data that another model wrote: a head for this one learns less from it.

    Args:
        sources: Datasets.
        target: `describe_target` of the target.
    """
    for source in sources:
        writer = (provenance_of(source) or {}).get("target", {})
        theirs, ours = writer.get("weights_fingerprint"), target.get("weights_fingerprint")
        if theirs and ours and theirs != ours:
            warnings.warn(
                f"The answers in {source} were written by {writer.get('name_or_path')} (weights {theirs}), and the head is for "
                f"{target.get('name_or_path')} (weights {ours}): have its own target write them with `train/generate.py`.",
                stacklevel=2,
            )


def _summary(provenance: Mapping[str, Any]) -> dict[str, Any]:
    return {name: provenance[name] for name in ("target", "sampling", "seed") if name in provenance}


def _from_hub(source: str, revision: str | None) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        return Path(hf_hub_download(source, PROVENANCE, repo_type="dataset", revision=revision))
    # Not there, neither on the Hub nor in its cache; a name that is none is refused where the dataset is loaded.
    except (EntryNotFoundError, RepositoryNotFoundError, OfflineModeIsEnabled, HFValidationError):
        return None
