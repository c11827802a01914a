"""The exactness test on SmolLM2: five drafters pass, three broken ones fail. It takes half an hour of a core: `make test-real`.

The prompt is read without a chat template, so that it is short: a draft head reads it anew for every sample. What it repeats is
such that tokens are probable and yet open, so that drafts are accepted and refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specheads.demo import HEADS_FOLDER
from specheads.evaluation.exactness import main
from specheads.evaluation.smollm2 import smollm2_folder

from .test_exactness import BROKEN

HEAD = f"head-alone:{HEADS_FOLDER / 'eagle3'}"
FIVE = f"auto,suffix,recycling,lookup,{HEAD}"
PROMPT = "one two one two one two"
# Drafts of a token, and the law of two tokens more than that: what is wrong on the bonus token shows in the third.
LAW = ["--tokens", "3", "--draft-tokens", "1", "--repetition-penalty", "1.2", "--temperature", "0.7"]
SAMPLES = 1500

pytestmark = [pytest.mark.real, pytest.mark.timeout(0)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 without its chat template."""
    source, folder = smollm2_folder(), tmp_path_factory.mktemp("target")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).symlink_to(source / name)
    (folder / "prompts.txt").write_text(f"{PROMPT}\n", encoding="utf-8")
    return folder


def examine(target: Path, output: Path, drafters: str, samples: int = SAMPLES) -> tuple[int, dict[str, Any]]:
    """The exit status of the program, and what it wrote; the figures are printed."""
    given = ["--model", str(target), "--prompts", str(target / "prompts.txt"), "--variant", drafters, "--output", str(output)]
    code = main([*given, *LAW, "--samples", str(samples), "--batch-size", "250", "--max-new-tokens", "32"])
    return code, json.loads(output.read_text(encoding="utf-8"))


def test_five_drafters_are_exact(target: Path, tmp_path: Path) -> None:
    code, result = examine(target, tmp_path / "five.json", FIVE)
    assert {one["variant"]: one["verdict"] for one in result["results"]} == dict.fromkeys(FIVE.split(","), "exact")
    assert code == 0 and result["passed"]
    for one in result["results"]:
        assert one["greedy"]["identical"] == one["greedy"]["rows"]
        assert one["control"][-1]["is_rejected"]


@pytest.mark.parametrize("mutate", BROKEN)
def test_a_broken_drafter_fails(
    mutate: Callable[[pytest.MonkeyPatch], None], target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    code, result = examine(target, tmp_path / "broken.json", HEAD)
    (one,) = result["results"]
    assert (code, one["verdict"]) == (1, "not exact")
    assert "its samples do not have the target's law" in one["words"]
