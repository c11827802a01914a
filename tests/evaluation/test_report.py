"""The page of a result: made by the real commands, one file, nothing fetched, nothing of a text taken for markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specheads.evaluation import acceptance, speed
from specheads.evaluation.colouring import rejected_path, shown_rounds
from specheads.evaluation.prompts import InputError
from specheads.evaluation.report import write_report
from specheads.evaluation.report.tokens import text_view
from specheads.rounds import DraftRound

VOID = {"meta", "link", "br", "use", "path", "rect"}


class Outline(HTMLParser):
    """What a page consists of; every tag must be closed."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        self.addresses += [value for name, value in found.items() if name in ("src", "href", "xlink:href") and value]
        self.ids += [value for name, value in found.items() if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_pages_of_speed_and_acceptance(model_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    hostile = "<script>alert(1)</script> abcabcabcabc & abc"
    rows = [{"category": name, "prompt": f"{hostile} {name}"} for name in ("a", "b")]
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    shared = ["--model", str(model_folder), "--prompts", str(prompts), "--max-new-tokens", "10"]
    files = {"speed2": speed, "speed4": speed, "acceptance": acceptance}
    for name, program in files.items():
        drafts = ["--draft-tokens", name[-1]] if program is speed else ["--draft-tokens", "2,4", "--tree-nodes", "6"]
        given = [*shared, "--variant", "auto,suffix", *drafts, "--output", str(tmp_path / f"{name}.json")]
        assert program.main([*given, "--report", str(tmp_path / f"{name}.html")]) == 0
    write_report([tmp_path / "speed2.json", tmp_path / "speed4.json"], tmp_path / "both.html")
    given = [*shared, "--variant", "auto,suffix", "--draft-tokens", "2,4", "--output", str(tmp_path / "sweep.json")]
    assert speed.main([*given, "--report", str(tmp_path / "sweep.html")]) == 0
    words = dict.fromkeys(("both", "sweep"), "Speed-up by draft length: auto")
    for name, word in {**dict.fromkeys(files, "tokens"), **words}.items():
        html = (tmp_path / f"{name}.html").read_text(encoding="utf-8")
        page = Outline(html)
        assert word in html
        assert "script" not in page.tags
        assert all(address.startswith(("#", "data:")) for address in page.addresses)
        assert not re.search(r"url\(\s*['\"]?http|@import", html)
        assert page.tags.count("article") == (4 if name == "both" else 2)
        assert page.tags.count("svg") >= 2
        assert not re.search(r"#0a0b0|#010203|#040506", html)  # no colour is left that stands for one of the page
        assert len(html) < 3_000_000
        assert not (tmp_path / f"{name}.html.unfinished").exists()


def test_a_tree_is_shown_with_what_was_kept_of_it(tokenizer: Any) -> None:
    a, b, c, d = (tokenizer(letter).input_ids[0] for letter in "abcd")
    rounds = shown_rounds(tokenizer, [DraftRound([a, b, c, d], [0, 1, 1, 0], [1], [a, d])])
    assert [rejected_path(a_round) for a_round in rounds] == [[2]]
    [view] = text_view({"prompt": "1", "category": "qa", "asked": "?", "way": "auto", "rounds": rounds}).rounds
    assert (view.accepted, view.rejected, view.own) == ("a", "b", "d")
    assert view.draft.splitlines() == ["✓ a", "  ✗ b", "  ✗ c", "✗ d"]


def test_a_page_of_an_exactness_test(tmp_path: Path) -> None:
    sampled = {"prompt": "1", "statistic": 8.0, "cells": 9, "p_value": 0.4, "is_rejected": False}
    sampled |= {"num_draft_tokens": 40, "num_accepted_draft_tokens": 9}
    greedy = {"rows": 4, "identical": 4, "divergences": []}
    entry = {"variant": "auto", "verdict": "exact", "words": "", "greedy": greedy, "sampling": [sampled]}
    power = {"samples": 2000, "tests": 1, "level": 0.001, "probability": 0.95, "total_variation": 0.08}
    result = {
        "kind": "exactness", "settings": {"model": "m"}, "provenance": {}, "passed": True, "words": ["All held."],
        "rounding": {}, "power": power, "prompts": [{"name": "1", "tokens": 2, "cells": 9, "total_variation": 0.08}],
        "results": [{**entry, "control": [{**sampled, "is_rejected": True, "p_value": 1e-30}]}],
    }  # fmt: skip
    source, output = tmp_path / "exactness.json", tmp_path / "exactness.html"
    source.write_text(json.dumps(result), encoding="utf-8")
    write_report([source], output)
    assert 'class="verdict good"' in output.read_text(encoding="utf-8")
    result["passed"], result["results"][0]["verdict"] = False, "not exact"
    source.write_text(json.dumps(result), encoding="utf-8")
    write_report([source], output)
    assert 'class="verdict bad"' in output.read_text(encoding="utf-8")


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "other.json"
    source.write_text("[]", encoding="utf-8")
    with pytest.raises(InputError, match="holds no result"):
        write_report([source], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_plain_generation_measured_again_is_no_rival(model_folder: Path, prompt_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    given = ["--model", str(model_folder), "--prompts", str(prompt_file), "--limit", "2", "--max-new-tokens", "6"]
    given += ["--variant", "plain,plain,none", "--output", str(tmp_path / "speed.json"), "--report", str(page)]
    assert speed.main(given) == 0
    html = page.read_text(encoding="utf-8")
    assert "plain#2, the quickest" not in html and "plain#2 generates" not in html and "variants, chosen" not in html
    assert "Plain generation measured again ran at" in html
