"""Drafters: `base` holds the protocol and the registry, every other file one drafter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from .base import OF_TARGET, REGISTRY, Accepted, Budget, DraftContext, Drafter, drafter_by_name, drafter_of_target

__all__ = ["Accepted", "Budget", "DraftContext", "Drafter", "drafter_by_name", "load_drafter"]


METHODS = ("begin", "propose", "commit", "keep_rows")
ATTRIBUTES = ("step_cost", "weighs_nodes")


def load_drafter(
    spec: Any,
    target: PreTrainedModel,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    with_suffix: bool = True,
    **options: Any,
) -> Drafter:
    """Makes a drafter for a target.

    Args:
        spec: The name of a training-free drafter (`"auto"`, `"suffix"`, `"recycling"`, `"lookup"`, `"none"`; `"early-exit"` or
            `"early-exit:N"` for the target's own first layers, `"mtp"` for the multi-token-prediction layers of its
            checkpoint), a draft head, the folder or Hub id of one, a draft model, a list of draft models, a dict of a `draft`
            model and an `inner` drafter that drafts for it, or an object that is a drafter already.
        target: The model to draft for.
        tokenizer: The target's tokenizer; needed for a draft model whose vocabulary is padded to another size. A head's is
            compared with it.
        assistant_tokenizer: That draft model's tokenizer.
        with_suffix: Whether a head's drafts give way to copies of earlier text where those promise more.
        options: How a head is found and read: `revision`, `token`, `cache_dir` and the others of `specheads.import_head`. For a
            list of draft models, `branches` and `replacement` (see `TokenTreeDrafter`); for `"early-exit"`, the `prompt` to
            measure on (see `EarlyExitDrafter`); for a draft model, the `inner` drafter, `"suffix"` (see `StagedDrafter`).

    Raises:
        ValueError: if the name is unknown, or the head or draft model does not fit the target.
        TypeError: if `spec` is of another type.
    """
    if isinstance(spec, Mapping):
        if set(spec) != {"draft", "inner"}:
            raise ValueError(
                f"A drafter given as a dict must have a `draft` and an `inner` one, got {', '.join(map(str, spec))}."
            )
        return load_drafter(spec["draft"], target, tokenizer, assistant_tokenizer, inner=spec["inner"], **options)
    if isinstance(spec, list | tuple):
        from .token_tree import TokenTreeDrafter

        return TokenTreeDrafter(spec, target, tokenizer, assistant_tokenizer, **options)
    if isinstance(spec, str) and spec.partition(":")[0] in OF_TARGET:
        return drafter_of_target(spec, target, **options)
    if isinstance(spec, str | os.PathLike) and _is_place(spec):
        from ..formats import import_head

        spec = import_head(spec, target, **options).to(target.device)
    elif isinstance(spec, PreTrainedModel) and not _is_head(spec) and set(options) == {"inner"}:
        from .staged import StagedDrafter

        return StagedDrafter(spec, target, options["inner"], tokenizer, assistant_tokenizer)
    elif options:
        raise TypeError(f"{', '.join(options)}: only a head that is loaded from a folder or the Hub takes such arguments.")
    if isinstance(spec, str):
        return drafter_by_name(spec)
    if _is_head(spec):
        from .head import drafter_for
        from .with_suffix import WithSuffix

        drafter = drafter_for(spec, target, tokenizer)
        return WithSuffix(drafter) if with_suffix else drafter
    if isinstance(spec, PreTrainedModel):
        from .draft_model import DraftModelDrafter

        return DraftModelDrafter(spec, target, tokenizer, assistant_tokenizer)
    if not isinstance(spec, type) and all(callable(getattr(spec, name, None)) for name in METHODS):
        missing = [name for name in ATTRIBUTES if not hasattr(spec, name)]
        if missing:
            raise TypeError(f"The drafter {type(spec).__name__} lacks the attribute(s) {', '.join(missing)}.")
        return spec
    what = f"the class {spec.__name__}" if isinstance(spec, type) else type(spec).__name__
    raise TypeError(f"A drafter must be a name, a model or an object with the drafter's methods, got {what}.")


def _is_place(spec: str | os.PathLike[str]) -> bool:
    """Whether something that is no drafter's name is a folder or may be the id of a repository."""
    name = os.fspath(spec)
    return name not in REGISTRY and (not isinstance(spec, str) or "/" in name or os.path.isdir(name))


def _is_head(spec: Any) -> bool:
    if not isinstance(spec, PreTrainedModel):
        return False
    from ..heads import DraftHead

    return isinstance(spec, DraftHead)
