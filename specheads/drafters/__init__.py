"""Drafters: `base` holds the protocol and the registry, every other file one drafter."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .base import Accepted, Budget, DraftContext, Drafter, drafter_by_name

__all__ = ["Accepted", "Budget", "DraftContext", "Drafter", "drafter_by_name", "load_drafter"]


def load_drafter(spec: Any, target: PreTrainedModel) -> Drafter:
    """Makes a drafter for a target.

    Args:
        spec: The name of a training-free drafter (`"auto"`, `"suffix"`, `"recycling"`, `"lookup"`, `"none"`), a draft model, or
            an object that is a drafter already.
        target: The model to draft for.

    Raises:
        ValueError: if the name is unknown, or the draft model does not fit the target.
        TypeError: if `spec` is of another type.
    """
    if isinstance(spec, str):
        return drafter_by_name(spec)
    if isinstance(spec, PreTrainedModel):
        from .draft_model import DraftModelDrafter

        return DraftModelDrafter(spec, target)
    if all(callable(getattr(spec, name, None)) for name in ("begin", "propose", "commit", "keep_rows")):
        return spec
    raise TypeError(f"A drafter must be a name, a model or an object with the drafter's methods, got {type(spec).__name__}.")
