"""Settings for all tests."""

from __future__ import annotations

import pytest
import torch

# On tiny models threads only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
