"""Settings for all tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specheads

from .tiny import perturbed, tiny

# On tiny models threads only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def target() -> Any:
    """A small model, enabled."""
    return specheads.enable(tiny())


@pytest.fixture
def draft(target: Any) -> Any:
    """A model close to it, whose drafts are now accepted and now rejected."""
    return perturbed(target, 0.05)
