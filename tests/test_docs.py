"""What the documentation says can be done, can be done."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specheads
from specheads.evaluation.report.words import short_name
from specheads.evaluation.variants import parse_variants
from tests.tiny import tiny
from tests.training.templates import tokenizer_for

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Pages that are run from their first block to their last, with a small model in place of the one that they name.
RUN = ("quick_start.md", "extending.md")


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    tokenizer = tokenizer_for("chatml")
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda name: tiny("llama", len(tokenizer), eos_token_id=None).float()
    )
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    return {"model": AutoModelForCausalLM.from_pretrained("any")}


@pytest.mark.parametrize("name", RUN)
def test_pages_run(name: str, small: dict[str, Any]) -> None:
    page = ROOT / "docs" / name
    codes = blocks(page, "python")
    assert codes
    for number, code in enumerate(codes, start=1):
        exec(compile(code, f"{name}, block {number}", "exec"), small)


def test_the_drafter_of_the_docs_drafts(small: dict[str, Any]) -> None:
    exec(blocks(ROOT / "docs" / "extending.md", "python")[0], small)
    model, prompt = small["model"], torch.tensor([[5, 7, 7]])
    asked = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    ours = model.generate(prompt, speculative={"adaptive": False, "draft_tokens": 2}, **asked)
    assert torch.equal(ours.sequences, model.generate(prompt, **asked).sequences)
    assert ours.speculation.num_draft_tokens > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_can_be_read_and_links_lead_somewhere(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, str(page), "exec")
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"- {page.name}\n" not in navigation] == []


def test_every_public_name_is_documented() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for name in specheads.__all__:
        if name != "__version__":
            assert f"::: specheads.{name}\n" in reference, f"{name} is not in the reference"
            documentation = getattr(specheads, name).__doc__ or ""
            assert "\n" in documentation.strip(), f"{name} needs more than a line"


def test_the_table_of_the_readme_is_what_make_bench_prints() -> None:
    """Each variant of the command has its row, with as many cells as there are columns."""
    variants = re.search(
        r"^bench:.*?--variant (\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    table = re.search(r"<!-- bench.*?-->\n(.*?)\n<!-- /bench -->", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert variants is not None and table is not None
    setting, blank, columns, rule, *rows = table[1].splitlines()
    prompts = [json.loads(line) for line in (ROOT / "eval" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    categories = list(dict.fromkeys(prompt["category"] for prompt in prompts))
    heads = "| " + " | ".join(["variant", "tokens/s", "all", *categories, "τ", "greedy texts"]) + " |"
    assert ("SmolLM2-135M-Instruct" in setting, blank, columns, set(rule)) == (True, "", heads, set("| -"))
    names = [short_name(variant.name) for variant in parse_variants(variants[1])]
    assert [row.split("|")[1].strip(" `") for row in rows] == names
    assert all(row.count("|") == columns.count("|") for row in rows)
