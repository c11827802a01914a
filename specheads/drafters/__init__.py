"""Drafters: `base` holds the protocol and the registry, every other file one drafter."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .base import Accepted, Budget, DraftContext, Drafter, drafter_by_name

__all__ = ["Accepted", "Budget", "DraftContext", "Drafter", "drafter_by_name", "load_drafter"]


METHODS = ("begin", "propose", "commit", "keep_rows")
ATTRIBUTES = ("step_cost", "weighs_nodes")


def load_drafter(spec: Any, target: PreTrainedModel, tokenizer: Any = None, assistant_tokenizer: Any = None) -> Drafter:
    """Makes a drafter for a target.

    Args:
        spec: The name of a training-free drafter (`"auto"`, `"suffix"`, `"recycling"`, `"lookup"`, `"none"`), a draft model, or
            an object that is a drafter already.
        target: The model to draft for.
        tokenizer: The target's tokenizer; needed for a draft model whose vocabulary is padded to another size.
        assistant_tokenizer: That draft model's tokenizer.

    Raises:
        ValueError: if the name is unknown, or the draft model does not fit the target.
        TypeError: if `spec` is of another type.
    """
    if isinstance(spec, str):
        return drafter_by_name(spec)
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
