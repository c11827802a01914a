"""What several tests of training need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.heads.layers import RMSNorm


@pytest.fixture
def _double_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock norms compute in single precision whatever the model is in, too roughly to compare gradients by."""

    def forward(norm: Any, hidden: Tensor) -> Tensor:
        return norm.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)

    monkeypatch.setattr(RMSNorm, "forward", forward)
