"""Which inputs a model's forward has."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from transformers import PreTrainedModel


def forward_takes(model: PreTrainedModel, name: str) -> bool:
    """Whether a model's forward has an input of some name.

    Asked several times in every call of `generate`, so it is looked up once for each class. A forward that was put on the
    instance is looked at anew: to remember it would keep the model alive.
    """
    if "forward" in model.__dict__:
        return name in inspect.signature(model.forward).parameters
    return name in _inputs(type(model).forward)


@cache
def _inputs(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)
