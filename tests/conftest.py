"""Settings for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import specheads

from .hub import Hub, connect, running
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


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A stand-in for the Hub, which everything in this process then takes for it; caches are empty at first."""
    with running() as server:
        connect(server, monkeypatch, tmp_path / "caches")
        yield server
