"""What the `custom_generate/generate.py` in a head's repository does: speculative decoding without an import of ours."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from . import compat
from .formats import import_head
from .heads import DraftHead
from .heads.download import DOWNLOAD_ARGUMENTS
from .mixin import SpeculativeGenerationMixin, enable

# What was loaded for a model, by where it comes from: read once, not for every call.
_HEADS: WeakKeyDictionary[PreTrainedModel, dict[str, DraftHead]] = WeakKeyDictionary()


def generate_with_head(model: Any, arguments: dict[str, Any]) -> Any:
    """Generates with a model and the head of the repository that `generate(custom_generate=...)` named.

    The model is enabled by it, as by `specheads.enable`; a drafter that was attached to it stays attached.

    Args:
        model: The model.
        arguments: Those of `generate`, and those of the download. `speculative` has settings; `False` generates plainly.

    Returns:
        What `generate` returns.

    Raises:
        ValueError: if another draft model is passed, or the repository is not known since the call did not name it.
        OSError: if the head cannot be loaded.
    """
    source = compat.repository_of_recipe()
    if source is None:
        raise ValueError(
            "The repository of the draft head is not known: name it in the call, "
            '`model.generate(..., custom_generate="user/head", trust_remote_code=True)`.'
        )
    given = {name: value for name, value in arguments.items() if value is not None}
    download = {name: given.pop(name) for name in DOWNLOAD_ARGUMENTS if name in given}
    others = [name for name in ("assistant_model", "assistant_tokenizer") if name in given]
    if others:
        raise ValueError(f"`custom_generate` drafts with the head of {source}; leave out {', '.join(others)}.")
    speculative = given.pop("speculative", True)
    if not isinstance(model, SpeculativeGenerationMixin):
        enable(model)
    if speculative is False:
        return model.generate(**given, speculative=False)
    return model.generate(**given, speculative=speculative, assistant_model=_head(model, source, download))


def _head(model: Any, source: str, download: dict[str, Any]) -> DraftHead:
    heads = _HEADS.setdefault(model, {})
    key = repr((source, sorted(download.items())))
    if key not in heads or download.get("force_download"):
        heads[key] = import_head(source, model, **download).to(device=model.device, dtype=model.dtype)
    return heads[key]
