"""Key-value heads that are shared stay shared: the numbers of the stock attention, without a copy of the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import specheads
from specheads import attention

from .tiny import tiny


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral", "qwen3_moe", "llava"])
def test_under_a_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family).float()
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, :5] = 0
    inputs = {"input_ids": torch.randint(3, 30, (3, 12)), "attention_mask": mask}
    expected = model(**inputs).logits
    specheads.enable(model)
    assert model.config.get_text_config()._attn_implementation == attention.NAME
    with monkeypatch.context() as patch:
        patch.setattr("transformers.integrations.sdpa_attention.repeat_kv", None)
        torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-4, rtol=1e-4)
    specheads.disable(model)
    assert model.config.get_text_config()._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_models_without_shared_heads_stay_as_they_are(family: str) -> None:
    model = specheads.enable(tiny(family))
    assert model.config._attn_implementation == "sdpa"


def test_eager_attention_stays() -> None:
    model = specheads.enable(tiny(attention="eager"))
    assert model.config._attn_implementation == "eager"


def test_the_configuration_is_saved_without_it(tmp_path: Path) -> None:
    specheads.enable(tiny()).save_pretrained(tmp_path)
    assert attention.NAME not in (tmp_path / "config.json").read_text()
