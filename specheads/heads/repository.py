"""What lies beside a head's weights, in its folder and in its repository on the Hub: card, results, recipe."""

from __future__ import annotations

import shutil
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import EntryNotFoundError

from .provenance import weights_fingerprint
from .results import RESULTS_FILE, MeasuredResults, TrainingRecord, read_records, records_as_json
from .saving import write_json

if TYPE_CHECKING:
    from .base import DraftHead

README = "README.md"
RECIPE_FILE = "custom_generate/generate.py"
# Written by an earlier push and not by this one, they would be taken for its own.
STALE = ["model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json", "specheads/*"]


def write_beside(
    head: DraftHead,
    folder: Path,
    place: Path,
    *,
    results: MeasuredResults | None,
    training: TrainingRecord | None,
    with_custom_generate: bool,
    repo_id: str | None,
    tags: Any,
) -> None:
    """Writes what lies beside the weights.

    Args:
        head: The head.
        folder: Where to.
        place: Where the files will be: what is there already may stay.
        results: What was measured.
        training: How the head was trained.
        with_custom_generate: Whether to write the recipe for `custom_generate`.
        repo_id: The repository, if it is known.
        tags: Further tags for the card.

    Raises:
        ValueError: if the results were measured with other weights.
    """
    from .card import is_own_text, make_card

    fingerprint = weights_fingerprint(head)
    kept = _kept_records(place, fingerprint)
    results, training = results or kept[0], training or kept[1]
    has_recipe = with_custom_generate or (place / RECIPE_FILE).exists()
    text = make_card(head, results, training, repo_id=repo_id, tags=tags, custom_generate=has_recipe)
    if not is_own_text(place / README):
        (folder / README).write_text(str(text), encoding="utf-8")
    if results or training:
        (folder / RESULTS_FILE).parent.mkdir(exist_ok=True)
        write_json(folder / RESULTS_FILE, records_as_json(results, training, fingerprint))
    else:
        (place / RESULTS_FILE).unlink(missing_ok=True)  # of other weights
    if with_custom_generate:
        (folder / RECIPE_FILE).parent.mkdir(exist_ok=True)
        recipe = files(__package__).joinpath("custom_generate.py").read_text(encoding="utf-8")
        (folder / RECIPE_FILE).write_text(recipe, encoding="utf-8")


def push(
    head: DraftHead,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    tags: list[str] | None = None,
    results: MeasuredResults | None = None,
    training: TrainingRecord | None = None,
    with_custom_generate: bool = False,
) -> CommitInfo:
    """Pushes a head; see `DraftHead.push_to_hub`."""
    api = HfApi(library_name="specheads", token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in (README, RESULTS_FILE, RECIPE_FILE):
            _fetch(api, repo_id, file, revision, folder)
        head.save_pretrained(
            folder,
            max_shard_size=max_shard_size,
            repo_id=repo_id,
            tags=tags,
            results=results,
            training=training,
            with_custom_generate=with_custom_generate,
        )
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message or f"Upload {type(head).__name__}",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
            delete_patterns=STALE,
        )


def _fetch(api: HfApi, repo_id: str, file: str, revision: str | None, folder: Path) -> None:
    """Copies a file of a repository into a folder, if the repository has it."""
    with tempfile.TemporaryDirectory() as cache:
        try:
            found = api.hf_hub_download(repo_id, file, revision=revision, cache_dir=cache)
        except EntryNotFoundError:
            return
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(found, folder / file)


def _kept_records(place: Path, fingerprint: str | None) -> tuple[MeasuredResults | None, TrainingRecord | None]:
    """What was saved of a head with the same weights."""
    file = place / RESULTS_FILE
    if not file.exists() or fingerprint is None:
        return None, None
    try:
        measured, results, training = read_records(file)
    except ValueError:  # damaged: of no use, and written anew
        return None, None
    return (results, training) if measured == fingerprint else (None, None)
