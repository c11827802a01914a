"""What several tests of training need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.heads.layers import RMSNorm
from tests.tiny import tiny

from .templates import tokenizer_for


@pytest.fixture
def _double_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock norms compute in single precision whatever the model is in, too roughly to compare gradients by."""

    def forward(norm: Any, hidden: Tensor) -> Tensor:
        return norm.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)

    monkeypatch.setattr(RMSNorm, "forward", forward)


def save_target(folder: Path, template: str) -> Path:
    """A random target with a chat template, on the disk."""
    tokenizer = tokenizer_for(template)
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), "chatml")
