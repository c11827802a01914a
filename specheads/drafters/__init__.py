"""Drafters: `base` holds the protocol and the registry, every other file one drafter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from ..kinds import unwrapped
from ..packing import pack_like
from .base import (
    OF_TARGET,
    REGISTRY,
    Accepted,
    Budget,
    DraftContext,
    Drafter,
    check_settings,
    check_target,
    drafter_by_name,
    drafter_of_target,
)

__all__ = ["Accepted", "Budget", "DraftContext", "Drafter", "check_settings", "drafter_by_name", "head_of", "load_drafter"]


METHODS = ("begin", "propose", "commit", "keep_rows")
ATTRIBUTES = ("step_cost", "weighs_nodes")
STORED = "retrieval:"  # and the folder of a datastore


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
        spec: The name of a training-free drafter (`"auto"`, `"suffix"`, `"recycling"`, `"lookup"`, `"lookahead"`, `"none"`, or
            `"retrieval:FOLDER"` with the folder of a datastore; `"early-exit"` or `"early-exit:N"` for the target's own first
            layers, `"mtp"` for the multi-token-prediction layers of its checkpoint), a draft head, the folder or Hub id of one,
            a draft model, a list of draft models, a dict of a `draft` model and an `inner` drafter that drafts for it, or an
            object that is a drafter already. A head from a folder or the Hub is brought to the target's device and precision.
        target: The model to draft for.
        tokenizer: The target's tokenizer; needed for a draft model with another one, or whose vocabulary is padded to another
            size. A head's and a datastore's are compared with it.
        assistant_tokenizer: That draft model's tokenizer.
        with_suffix: Whether a head drafts together with copies of earlier text, or gives way to them where they promise more.
        options: How a head is found and read: `revision`, `token`, `cache_dir` and the others of `specheads.import_head`. For a
            list of draft models, `branches` and `replacement` (see `TokenTreeDrafter`); for `"early-exit"`, the `prompt` to
            measure on (see `EarlyExitDrafter`); for a draft model, the `inner` drafter, `"suffix"` (see `StagedDrafter`).

    Raises:
        ValueError: if the name is unknown, or the head, draft model or drafter does not fit the target.
        TypeError: if `spec` is of another type.
    """
    drafter = _loaded(spec, target, tokenizer, assistant_tokenizer, with_suffix, **options)
    check_target(drafter, target)
    return drafter


def _loaded(
    spec: Any, target: PreTrainedModel, tokenizer: Any, assistant_tokenizer: Any, with_suffix: bool, **options: Any
) -> Drafter:
    if isinstance(spec, Mapping):
        if set(spec) != {"draft", "inner"}:
            raise ValueError(
                f"A drafter given as a dict must have a `draft` and an `inner` one, got {', '.join(map(str, spec))}."
            )
        draft = unwrapped(spec["draft"])
        if not isinstance(draft, PreTrainedModel) or _is_head(draft):
            given = repr(draft) if isinstance(draft, str) else type(draft).__name__
            raise TypeError(
                f"The `draft` of a drafter given as a dict must be a draft model, got {given}; load it first "
                "(`AutoModelForCausalLM.from_pretrained`), or give a head or a drafter's name as it is, without `inner`."
            )
        return _loaded(draft, target, tokenizer, assistant_tokenizer, with_suffix, inner=spec["inner"], **options)
    if isinstance(spec, list | tuple):
        from .token_tree import TokenTreeDrafter

        if unknown := sorted(set(options) - {"branches", "replacement"}):
            raise TypeError(f"{', '.join(unknown)}: a list of draft models takes `branches` and `replacement`, nothing else.")
        return TokenTreeDrafter(spec, target, tokenizer, assistant_tokenizer, **options)
    if isinstance(spec, str) and spec.partition(":")[0] in OF_TARGET:
        return drafter_of_target(spec, target, **options)
    if isinstance(spec, str | os.PathLike) and _is_place(spec):
        from ..formats import import_head

        head = import_head(spec, target, **options).to(device=target.device, dtype=target.dtype)
        pack_like(head, target)
        return _of_head(head, target, tokenizer, with_suffix)
    if isinstance(spec, PreTrainedModel) and not _is_head(spec):
        return _of_model(spec, target, tokenizer, assistant_tokenizer, **options)
    if options:
        raise TypeError(f"{', '.join(options)}: only a head that is loaded from a folder or the Hub takes such arguments.")
    if isinstance(spec, str):
        return _of_name(spec, target, tokenizer)
    return _of_head(spec, target, tokenizer, with_suffix) if _is_head(spec) else _checked(spec)


def head_of(drafter: Any) -> PreTrainedModel | None:
    """The head that a drafter drafts with, if it does so with one."""
    return getattr(getattr(drafter, "source", drafter), "head", None)


def _of_name(name: str, target: PreTrainedModel, tokenizer: Any) -> Drafter:
    if not name.startswith(STORED):
        return drafter_by_name(name)
    from .retrieval import RetrievalDrafter

    return RetrievalDrafter(name.removeprefix(STORED), target, tokenizer)


def _of_head(head: Any, target: PreTrainedModel, tokenizer: Any, with_suffix: bool) -> Drafter:
    from .head import drafter_for
    from .with_suffix import WithSuffix

    drafter = drafter_for(head, target, tokenizer)
    return WithSuffix(drafter) if with_suffix else drafter


def _of_model(
    draft: PreTrainedModel, target: PreTrainedModel, tokenizer: Any, assistant_tokenizer: Any, **options: Any
) -> Drafter:
    if set(options) == {"inner"}:
        from .staged import StagedDrafter

        return StagedDrafter(draft, target, options["inner"], tokenizer, assistant_tokenizer)
    if options:
        raise TypeError(
            f"{', '.join(options)}: a draft model takes no other argument than `inner`, the drafter that speeds it up."
        )
    if None not in (tokenizer, assistant_tokenizer) and tokenizer.get_vocab() != assistant_tokenizer.get_vocab():
        from .other_vocabulary import OtherVocabularyDrafter

        return OtherVocabularyDrafter(draft, target, tokenizer, assistant_tokenizer)
    from .draft_model import DraftModelDrafter

    return DraftModelDrafter(draft, target, tokenizer, assistant_tokenizer)


def _checked(drafter: Any) -> Drafter:
    """One of the user's own, with the methods and attributes that a drafter has."""
    if not isinstance(drafter, type) and all(callable(getattr(drafter, name, None)) for name in METHODS):
        missing = [name for name in ATTRIBUTES if not hasattr(drafter, name)]
        if missing:
            raise TypeError(f"The drafter {type(drafter).__name__} lacks the attribute(s) {', '.join(missing)}.")
        return drafter
    what = f"the class {drafter.__name__}" if isinstance(drafter, type) else type(drafter).__name__
    raise TypeError(f"A drafter must be a name, a model or an object with the drafter's methods, got {what}.")


def _is_place(spec: str | os.PathLike[str]) -> bool:
    """Whether something that is no drafter's name is a folder or may be the id of a repository."""
    name = os.fspath(spec)
    return (
        name not in REGISTRY
        and not name.startswith(STORED)
        and (not isinstance(spec, str) or "/" in name or os.path.isdir(name))
    )


def _is_head(spec: Any) -> bool:
    if not isinstance(spec, PreTrainedModel):
        return False
    from ..heads import DraftHead

    return isinstance(spec, DraftHead)
