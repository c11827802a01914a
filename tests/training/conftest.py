"""A random target with a chat template, on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import tiny

from .templates import tokenizer_for


def save_target(folder: Path, template: str) -> Path:
    tokenizer = tokenizer_for(template)
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] *= 1.5  # so that many replies end by themselves
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), "chatml")
