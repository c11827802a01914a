"""A checkpoint of another library: its config, its weights, and an account of what was read of both."""

from __future__ import annotations

import os
import pickle
import zipfile
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..heads.download import find, find_config, read_json

# Weight files in the order in which they are looked for; an index names further files.
WEIGHT_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.safetensors",
    "hydra_lm_head.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
INDEX = ".index.json"
# Fields of transformers' configs that change nothing in what a head computes.
HARMLESS_FIELDS = frozenset({
    "_name_or_path", "_attn_implementation", "architectures", "attn_implementation", "auto_map", "bos_token_id", "dtype",
    "eos_token_id", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "max_window_layers",
    "name_or_path", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
    "return_dict", "chunk_size_feed_forward", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip


@dataclass
class Checkpoint:
    """What lies in a folder or a Hub repository.

    Args:
        where: The folder or the repository, for messages.
        config: What `config.json` says.
        weights: Names and weights as they are on disk.
        read: The fields of the config that were read.
    """

    where: str
    config: dict[str, Any]
    weights: dict[str, Tensor]
    read: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, name_or_path: str | os.PathLike[str], **download: Any) -> Checkpoint:
        """Reads a checkpoint.

        Args:
            name_or_path: A folder, or the id of a Hub repository.
            download: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`, ...

        Raises:
            FileNotFoundError: if there is no config, or no weights.
            OSError: if the repository is not there, may not be read, or cannot be reached.
            ValueError: if a file is damaged, or one of weights is a pickle that holds more than weights.
        """
        file, download = find_config(name_or_path, download)
        fields = read_json(file)
        weights = _read_weights(name_or_path, download)
        # Old checkpoints hold the frequencies of their rotary positions, which the config gives.
        kept = {name: weight for name, weight in weights.items() if not name.endswith("rotary_emb.inv_freq")}
        return cls(str(name_or_path), fields, kept)

    def take(self, name: str, default: Any = None) -> Any:
        """A field of the config, which then counts as read."""
        self.read.add(name)
        return self.config.get(name, default)

    def take_all(self, names: Any) -> dict[str, Any]:
        """Those of some fields that the config has."""
        return {name: self.take(name) for name in names if name in self.config}

    def check_config_read(self, harmless: frozenset[str] = HARMLESS_FIELDS) -> None:
        """Refuses fields that were not read and might change what the head computes.

        Raises:
            ValueError: naming them.
        """
        unread = {name: self.config[name] for name in sorted(set(self.config) - self.read - harmless) if self.config[name]}
        if unread:
            raise ValueError(
                f"The config of {self.where} has fields whose meaning is not known, and which may change what the head "
                f"computes: {', '.join(f'{name}={value!r}' for name, value in unread.items())}. Remove them from config.json "
                "if they change nothing."
            )

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest precision that holds all weights."""
        kinds = {weight.dtype for weight in self.weights.values() if weight.is_floating_point()}
        widest = kinds.pop() if kinds else torch.float32
        for kind in kinds:
            widest = torch.promote_types(widest, kind)
        return widest


def load_exactly(head: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Fills a head with weights, each of which must be there, known, and of the right shape.

    Args:
        head: The head, in the precision that the weights are to have.
        weights: The weights under the head's own names.
        where: Where they come from, for the message.

    Raises:
        ValueError: listing every weight that is missing, unexpected or misshapen.
    """
    own = head.state_dict()
    faults = [f"missing {name} {list(own[name].shape)}" for name in sorted(own.keys() - weights.keys())]
    faults += [f"unexpected {name} {list(weights[name].shape)}" for name in sorted(weights.keys() - own.keys())]
    for name in sorted(own.keys() & weights.keys()):
        if own[name].shape != weights[name].shape:
            turned = " (transposed)" if own[name].shape == weights[name].t().shape else ""
            faults.append(f"{name} of shape {list(weights[name].shape)}, not {list(own[name].shape)}{turned}")
    if faults:
        raise ValueError(f"The weights in {where} do not fit: {'; '.join(faults)}.")
    head.load_state_dict(weights)


def _read_weights(name_or_path: str | os.PathLike[str], download: dict[str, Any]) -> dict[str, Tensor]:
    for name in WEIGHT_FILES:
        file = find(name_or_path, name, download)
        if file is not None and name.endswith(INDEX):
            return _read_shards(name_or_path, file, download)
        if file is not None:
            return _read_file(file)
    raise FileNotFoundError(f"There are no weights in {name_or_path}; looked for {', '.join(WEIGHT_FILES)}.")


def _read_shards(name_or_path: str | os.PathLike[str], index: str, download: dict[str, Any]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{index} has no `weight_map`, which says where each weight is; save or download the head again.")
    for name in sorted(set(places.values())):
        file = find(name_or_path, name, download)
        if file is None:
            raise FileNotFoundError(f"The index of {name_or_path} names {name}, which is not there.")
        weights |= _read_file(file)
    return weights


def _is_pickle(file: str) -> bool:
    """Whether a file is of a kind that `torch.save` writes: an archive, or in old times a bare pickle."""
    with open(file, "rb") as content:
        return zipfile.is_zipfile(file) or content.read(1) == pickle.PROTO


def _read_file(file: str) -> dict[str, Tensor]:
    if file.endswith(".safetensors"):
        try:
            return load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged, it holds no weights ({error}); save or download the head again.") from error
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not _is_pickle(file):
            raise ValueError(f"{file} is damaged, it holds no weights; save or download the head again.") from error
        raise ValueError(
            f"{file} is a pickle that holds more than weights, which could run code, so it is not opened; if you trust it, "
            "convert it to safetensors first."
        ) from error
    except (RuntimeError, EOFError) as error:  # cut short, or no archive at all
        raise ValueError(f"{file} is damaged, it holds no weights ({error}); save or download the head again.") from error
    weights = weights.get("state_dict", weights) if isinstance(weights, dict) else weights
    if not isinstance(weights, dict) or not all(isinstance(weight, Tensor) for weight in weights.values()):
        raise ValueError(f"{file} holds something else than weights by name; save the head's `state_dict()`.")
    return weights
