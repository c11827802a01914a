"""Heads of other libraries in, and out for other engines: one file per layout, each with `recognises`, `read` and `write`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel

from ..heads import DraftHead, EagleHead, MedusaHeads
from ..heads.download import DOWNLOAD_ARGUMENTS, find_config, read_json
from ..heads.saving import written_together
from . import eagle, eagle3, hydra, medusa, speculators, vllm_medusa
from .checkpoint import Checkpoint

__all__ = ["Checkpoint", "export_head", "import_head"]

# In the order in which they are asked: the more specific layouts first.
LAYOUTS: tuple[ModuleType, ...] = (speculators, vllm_medusa, hydra, medusa, eagle3, eagle)
OWN: tuple[type[DraftHead], ...] = (EagleHead, MedusaHeads)
# A name, the class of head that it holds, and what writes it.
EXPORTS: dict[str, tuple[type[DraftHead], Callable[..., None]]] = {
    "speculators": (EagleHead, speculators.write),
    "eagle3": (EagleHead, eagle3.write),
    "eagle": (EagleHead, eagle.write),
    "vllm-medusa": (MedusaHeads, vllm_medusa.write),
    "medusa": (MedusaHeads, medusa.write),
    "medusa-v2": (MedusaHeads, partial(medusa.write, version="2")),
    "tgi-medusa": (MedusaHeads, medusa.write),
    "hydra": (MedusaHeads, hydra.write),
}


def import_head(path_or_id: str | os.PathLike[str], target: PreTrainedModel, **options: Any) -> DraftHead:
    """Reads a head in any of the published layouts, for a target, and binds it to that.

    The layout is recognised by its config and the names of its weights. Nothing is guessed: what is missing, not known or of
    another shape is an error that lists it.

    Args:
        path_or_id: A folder, or the id of a Hub repository.
        target: The model that the head is for.
        options: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`, `force_download` reach every download.
            `layer_id_convention` (`"hidden_states"` or `"layer_outputs"`) and `d2t_encoding` (`"offsets"` or `"ids"`) settle
            what an EAGLE-3 checkpoint may leave open; `version` tells EAGLE-1 from 2.

    Returns:
        The head, in the precision of its weights.

    Raises:
        FileNotFoundError: if there is no config or there are no weights.
        OSError: if the repository or the revision is not there, may not be read, or cannot be reached.
        ValueError: if the layout is not known, or the head is incomplete, does not fit the target, or asks for what is not
            known.
    """
    download = {name: options.pop(name) for name in DOWNLOAD_ARGUMENTS if name in options}
    config, download = find_config(path_or_id, download)
    fields = read_json(config)
    if "specheads_version" in fields:
        head = read_own(path_or_id, fields.get("model_type"), download, options)
        head.bind(target)
        return head
    checkpoint = Checkpoint.open(path_or_id, **download)
    layout = next((layout for layout in LAYOUTS if layout.recognises(checkpoint)), None)
    if layout is None:
        names = sorted(checkpoint.weights)
        raise ValueError(
            f"The layout of {path_or_id} is not known: {len(names)} weights, the first {', '.join(names[:5])}. "
            "Known are Medusa's, vLLM's Medusa, Hydra's, EAGLE-1 to 3 and speculators."
        )
    head = _with_options(layout, options)(checkpoint, target)
    head.eval()
    head.bind(target)
    return head


def export_head(head: DraftHead, folder: str | os.PathLike[str], format: str) -> None:
    """Writes a head in the layout of another library or engine. The files appear in the folder when all are written.

    Args:
        head: The head.
        folder: Where to.
        format: `"speculators"` (vLLM), `"eagle3"` (SGLang, EAGLE's code), `"eagle"` (EAGLE-1 and 2), `"vllm-medusa"`,
            `"medusa"` (version 1), `"medusa-v2"`, `"tgi-medusa"` or `"hydra"`.

    Raises:
        ValueError: if the format is not known, or has no place for something that the head has.
    """
    if format not in EXPORTS:
        raise ValueError(f"Unknown format {format!r}; known are {', '.join(EXPORTS)}.")
    kind, write = EXPORTS[format]
    if not isinstance(head, kind):
        raise ValueError(f"The format {format!r} holds {kind.__name__}, got {type(head).__name__}.")
    with written_together(folder) as temporary:
        write(head, temporary)


def read_own(
    path_or_id: str | os.PathLike[str], model_type: Any, download: dict[str, Any], options: dict[str, Any]
) -> DraftHead:
    """Reads a head of this library, whose config has been read; see `import_head`."""
    if options:
        raise ValueError(
            f"Unknown option(s) {', '.join(sorted(options))}: {path_or_id} is a head of this library, which needs none."
        )
    # Not by AutoModel: it looks for an adapter too, and for that into the default cache and the network, whatever it is told.
    kind = next((kind for kind in OWN if kind.config_class.model_type == model_type), None)
    if kind is None:
        raise ValueError(
            f"The config of {path_or_id} says model_type={model_type!r}, and heads of this library are of none such."
        )
    try:
        head: DraftHead = kind.from_pretrained(path_or_id, **download)
    except SafetensorError as error:
        raise ValueError(f"The weights of {path_or_id} are damaged ({error}); save or download the head again.") from error
    return head


def _with_options(layout: ModuleType, options: dict[str, Any]) -> Callable[..., DraftHead]:
    known = set(layout.read.__annotations__) - {"checkpoint", "target", "return"}
    unknown = sorted(set(options) - known)
    if unknown:
        name = layout.__name__.rsplit(".", 1)[-1]
        raise ValueError(
            f"Unknown option(s) {', '.join(unknown)} for the layout {name}; it has {', '.join(sorted(known)) or 'none'}."
        )
    return partial(layout.read, **options)
