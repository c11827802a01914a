"""Which revision of its repository a model was loaded at, of which transformers keeps no note.

The cache of downloads has a folder per commit. The one whose weights are those of the model is the one it was loaded from: some
values of every weight are compared, so that another revision, or a model trained further, is not taken for it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from .download import is_repository_id


def cached_revision(model: PreTrainedModel) -> str | None:
    """The commit of the cached download that has a model's weights.

    Args:
        model: A model that was loaded with `from_pretrained` from the Hub, into the default cache.

    Returns:
        The commit; where several have these weights, that of `main` if it is among them. `None` if there is none, several, or
        if the weights are not in memory, quantised, or not in safetensors files.
    """
    name = model.config._name_or_path
    if not is_repository_id(name):  # a folder, or a model of no name
        return None
    repository = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    if not repository.is_dir():
        return None
    weights = model.state_dict()
    matching = [folder.name for folder in sorted((repository / "snapshots").glob("*")) if _has_weights(folder, weights)]
    main = _main(repository)
    if main in matching:
        return main
    return matching[0] if len(matching) == 1 else None


def _main(repository: Path) -> str | None:
    file = repository / "refs" / "main"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _has_weights(folder: Path, weights: dict[str, Tensor]) -> bool:
    """Whether the files of a commit hold a model's weights, as far as both have them under the same names."""
    compared = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118, it is no mapping
                own = weights.get(name)
                if own is None or own.device.type == "meta" or list(own.shape) != stored.get_slice(name).get_shape():
                    continue
                if not _agree(stored.get_slice(name), own):
                    return False
                compared += 1
    return compared > 0


def _agree(stored: object, own: Tensor) -> bool:
    """Whether the first and the last row of a stored weight are a model's, as both are when rounded to bfloat16."""
    if own.dim() == 0:
        return True
    for rows in (slice(0, 1), slice(own.shape[0] - 1, own.shape[0])):
        if not torch.equal(stored[rows].to(torch.bfloat16), own[rows].detach().cpu().to(torch.bfloat16)):  # type: ignore[index]
            return False
    return True
