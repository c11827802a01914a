"""Files of a head, from a folder or from a repository of the Hub: found by one way, all of them at one commit."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers.utils import cached_file, extract_commit_hash

logger = logging.getLogger(__name__)

CONFIG = "config.json"
DOWNLOAD_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def read_json(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a file of a head that holds a JSON object, its config or its index of weights.

    Raises:
        ValueError: naming the file, if it holds anything else.
    """
    try:
        fields = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:  # broken JSON, or no text
        raise ValueError(f"{file} is damaged, it holds no JSON ({error}); save or download the head again.") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(fields).__name__}; save or download the head again.")
    return fields


def is_repository_id(name: str) -> bool:
    """Whether a name may be the id of a Hub repository, and is no folder here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return bool(name) and not os.path.isdir(name)


def find_config(name_or_path: str | os.PathLike[str], download: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The config of a head, and how to get its other files.

    Args:
        name_or_path: A folder, or the id of a Hub repository.
        download: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`, ...

    Returns:
        The config's path, and `download` with the revision made a commit: files that are fetched with it are of one state of
        the repository, whatever is pushed meanwhile.

    Raises:
        FileNotFoundError: if there is no config, or no such folder.
        OSError: if the repository or the revision is not there, may not be read, or cannot be reached.
    """
    _check_place(name_or_path)
    try:
        found = cached_file(name_or_path, CONFIG, **download)
    except OSError as error:
        raise _said_plainly(error, name_or_path, download) from error
    if found is None or not os.path.isfile(found):
        raise FileNotFoundError(
            f"There is no {CONFIG} in {_place(name_or_path, download)}, so there is no head that can be read."
        )
    commit = None if os.path.isdir(name_or_path) else extract_commit_hash(found, None)
    return found, download if commit is None else {**download, "revision": commit}


def find(name_or_path: str | os.PathLike[str], name: str, download: dict[str, Any]) -> str | None:
    """The path of a file of a head, `None` if the head has no such file.

    Args:
        name_or_path: A folder, or the id of a Hub repository.
        name: The file.
        download: As `find_config` gives it.

    Raises:
        OSError: if it is not known whether there is such a file, since the repository cannot be reached.
    """
    try:
        return cached_file(name_or_path, name, **download)
    except OSError as error:
        cause = error.__cause__
        # Without a cause the answer was that there is none; in the cache alone, what is not there is none.
        if cause is None or (isinstance(cause, LocalEntryNotFoundError) and _is_offline(download)):
            return None
        raise _said_plainly(error, name_or_path, download) from error


def _check_place(name_or_path: str | os.PathLike[str]) -> None:
    """Says that a folder is not there whose name cannot be the id of a repository."""
    if os.path.isdir(name_or_path):
        return
    if is_repository_id(os.fspath(name_or_path)):
        if os.path.isdir(os.path.dirname(name_or_path) or os.devnull):
            logger.warning("There is no folder %s here; looking for a repository of that name on the Hub.", name_or_path)
        return
    if os.path.isfile(name_or_path):
        raise NotADirectoryError(f"{name_or_path} is a file, and a head is a folder with a {CONFIG}: name that folder.")
    raise FileNotFoundError(f"There is no folder {name_or_path}: check the path of the head.")


def _is_offline(download: dict[str, Any]) -> bool:
    return bool(download.get("local_files_only")) or constants.is_offline_mode()


def _place(name_or_path: str | os.PathLike[str], download: dict[str, Any]) -> str:
    folder = f" under {download['subfolder']}" if download.get("subfolder") else ""
    revision = f" at revision {download['revision']}" if download.get("revision") else ""
    return f"{name_or_path}{folder}{revision}"


def _said_plainly(error: OSError, name_or_path: str | os.PathLike[str], download: dict[str, Any]) -> OSError:
    """The same error in one sentence that says what to do."""
    cause = error.__cause__
    if isinstance(cause, GatedRepoError):
        return OSError(
            f"The repository {name_or_path} is gated: ask for access on its page, then pass `token=` of an account that has it."
        )
    if isinstance(cause, RepositoryNotFoundError):
        return OSError(
            f"There is no folder {name_or_path}, and no repository {name_or_path} that can be read "
            f"{'with this token' if download.get('token') else 'without a token'}: check the name, and for a private one pass "
            "`token=` of an account that may read it."
        )
    if isinstance(cause, RevisionNotFoundError):
        return OSError(
            f"The repository {name_or_path} has no revision {download.get('revision')!r}: check its branches and tags."
        )
    if _is_offline(download):
        return OSError(
            f"{_place(name_or_path, download)} is not in the cache, and nothing is downloaded with `local_files_only=True` or "
            "in offline mode: load it once without."
        )
    return OSError(
        f"{_place(name_or_path, download)} cannot be loaded from {constants.ENDPOINT} and is not in the cache: check the "
        f"network, or pass `local_files_only=True` if it was downloaded whole ({_innermost(error)})."
    )


def _innermost(error: BaseException) -> str:
    """What the error that caused all others says, in its first line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
