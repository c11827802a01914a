"""The exactness test on SmolLM2: five drafters pass, three broken ones fail. It takes ten minutes of a core: `make test-real`.

Prompts are read without a chat template, so that they are short: a draft head reads them anew for every sample.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specheads.demo import HEADS_FOLDER
from specheads.evaluation.exactness import main
from specheads.evaluation.smollm2 import smollm2_folder

from .test_exactness import BROKEN

HEAD = f"head-alone:{HEADS_FOLDER / 'eagle3'}"


@dataclass(frozen=True)
class Setting:
    """What is asked, and how samples are drawn."""

    prompt: str
    temperature: float
    repetition_penalty: float
    samples: int


# Text that copies what came before, which is favoured, so that drafts of all kinds are made and now accepted, now refused.
COPYING = Setting("red blue red green blue red blue green red", 1.0, 0.85, 500)
# Text of which the head is sure enough: a fault shows where a draft is probable.
SURE = Setting("The cat sat on the mat. The cat sat on the", 0.6, 1.2, 500)
# A head is too seldom accepted in the former for its control to be seen.
EXACT = {"auto,suffix,recycling,lookup": COPYING, HEAD: SURE}

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
    return folder


def examine(target: Path, output: Path, drafters: str, setting: Setting) -> tuple[int, dict[str, Any]]:
    """The exit status of the program, and what it wrote."""
    prompts = output.with_suffix(".txt")
    prompts.write_text(f"{setting.prompt}\n", encoding="utf-8")
    given = ["--model", str(target), "--prompts", str(prompts), "--variant", drafters, "--output", str(output)]
    given += ["--temperature", str(setting.temperature), "--repetition-penalty", str(setting.repetition_penalty)]
    # Drafts of one token, and the law of two more than that: what is wrong on the bonus token shows in the third.
    given += ["--tokens", "3", "--draft-tokens", "1", "--samples", str(setting.samples)]
    start = time.process_time()
    code = main([*given, "--batch-size", "250", "--max-new-tokens", "32"])
    print(f"{time.process_time() - start:.0f} s of a core")
    return code, json.loads(output.read_text(encoding="utf-8"))


@pytest.mark.parametrize("drafters", EXACT)
def test_drafters_are_exact(drafters: str, target: Path, tmp_path: Path) -> None:
    code, result = examine(target, tmp_path / "exact.json", drafters, EXACT[drafters])
    assert {one["variant"]: one["verdict"] for one in result["results"]} == dict.fromkeys(drafters.split(","), "exact")
    assert code == 0 and result["passed"]
    for one in result["results"]:
        assert one["greedy"]["identical"] == one["greedy"]["rows"]
        assert one["control"][-1]["is_rejected"]


# The head drafts what it is sure of, of which little is dropped: the target as its own draft model has more to lose.
BREAKS = {HEAD: (BROKEN[:2], SURE), "itself": (BROKEN[2:], COPYING)}


@pytest.mark.parametrize(
    ("drafter", "mutate"), [(drafter, mutate) for drafter, (faults, _) in BREAKS.items() for mutate in faults]
)
def test_a_broken_drafter_fails(
    drafter: str, mutate: Callable[[pytest.MonkeyPatch], None], target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    named = f"assisted:{target}" if drafter == "itself" else drafter
    code, result = examine(target, tmp_path / "broken.json", named, BREAKS[drafter][1])
    (one,) = result["results"]
    assert (code, one["verdict"]) == (1, "not exact")
    assert "its samples do not have the target's law" in one["words"]
