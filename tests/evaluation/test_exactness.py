"""The exactness test itself: what is exact passes, what is broken fails, and a test that could not have seen it says so."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import specheads
from specheads.drafters import drafter_by_name
from specheads.evaluation import exactness
from specheads.evaluation.bench import load_target
from specheads.evaluation.control import LyingDrafter
from specheads.evaluation.exactness import check_exactness, main
from specheads.evaluation.exactness_arguments import ExactnessArguments
from specheads.evaluation.exactness_words import verdict_of
from specheads.evaluation.exam import Exam
from specheads.evaluation.first_tokens import REST, FirstTokens, first_tokens
from specheads.evaluation.law_test import g_test, pooled_cells, seen_distance
from specheads.evaluation.prompts import read_prompts
from specheads.evaluation.rounding import measure_rounding, plain_greedy

from ..exactness.test_monte_carlo import PROMPT, VOCAB, WARPED, expected_law
from ..exactness.test_monte_carlo import models as target_and_near_one
from ..exactness.test_mutants import (
    argmax_draft_with_sampled_law,
    draft_left_in_the_cache,
    look_then_drop,
    no_processors_on_the_bonus,
)

# The broken drafters: a draft of the most probable token that declares the softmax as its law; a repetition penalty that is
# missing on the bonus token; sampled tokens of low confidence that are dropped.
BROKEN = [argmax_draft_with_sampled_law, no_processors_on_the_bonus, look_then_drop]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of 16 tokens and a model close to it, in double precision."""
    vocabulary = {f"w{number}": number for number in range(VOCAB)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", unk_token="w0")
    root = tmp_path_factory.mktemp("models")
    for model, name in zip(target_and_near_one(), ("target", "draft"), strict=True):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    (root / "prompts.txt").write_text("w1 w5 w9 w5 w9 w4\n", encoding="utf-8")
    return root / "target", root / "draft"


def command(folders: tuple[Path, Path], output: Path, *more: str) -> list[str]:
    target, _ = folders
    prompts = target.parent / "prompts.txt"
    fixed = ["--model", str(target), "--prompts", str(prompts), "--output", str(output), "--batch-size", "1000"]
    return [*fixed, "--tokens", "3", "--draft-tokens", "1", "--max-new-tokens", "16", "--repetition-penalty", "1.5", *more]


def verdicts(output: Path) -> dict[str, str]:
    result = json.loads(output.read_text(encoding="utf-8"))
    return {one["variant"]: one["verdict"] for one in result["results"]}


def test_five_drafters_are_exact(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, draft = tmp_path / "e.json", f"assisted:{folders[1]}"
    line = command(folders, output, "--variant", f"auto,suffix,recycling,none,{draft}", "--samples", "6000")
    assert main(line) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["kind"] == "exactness"
    assert result["passed"]
    assert set(verdicts(output).values()) == {"exact"}
    for one in result["results"]:
        assert one["greedy"] == {"rows": 1, "identical": 1, "divergences": []}
        assert one["sampling"][0]["p_value"] >= result["power"]["level"] / result["power"]["tests"]
        assert [test["is_rejected"] for test in one["control"]][-1:] == ([] if one["variant"] == "none" else [True])
    assert result["power"]["total_variation"] < 0.1
    printed = capsys.readouterr().out
    assert "EXACT, as far as this test sees: auto, suffix, recycling, none" in printed
    assert "would have been seen with probability 0.95" in printed


@pytest.mark.parametrize("mutate", BROKEN)
def test_a_broken_drafter_fails(
    mutate: Callable[[pytest.MonkeyPatch], None], folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    output, draft = tmp_path / "e.json", f"assisted:{folders[1]}"
    assert main(command(folders, output, "--variant", draft, "--samples", "4000")) == 1
    assert verdicts(output) == {draft: "not exact"}
    (one,) = json.loads(output.read_text(encoding="utf-8"))["results"]
    assert "its samples do not have the target's law" in one["words"]


def test_drafters_of_ones_own_are_tested(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, tokenizer = load_target(str(folders[0]))
    prompts = read_prompts(folders[0].parent / "prompts.txt")
    options = ExactnessArguments(tokens=3, draft_tokens=1, samples=1500, batch_size=500, max_new_tokens=8)
    drafters = {"own": drafter_by_name("recycling"), "lying": LyingDrafter(drafter_by_name("recycling"))}
    result = check_exactness(specheads.enable(model), tokenizer, drafters, prompts, options)
    assert [one["verdict"] for one in result["results"]] == ["exact", "not exact"]
    assert (result["passed"], result["words"][:2]) == (False, ["NOT EXACT: lying.", "Exact: own."])


def test_an_interrupted_test_goes_on_with_the_next_drafter(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined: list[str] = []
    whole = Exam.examine

    def noted(self: Exam, name: str, drafter: Any) -> dict[str, Any]:
        examined.append(name)
        if examined == ["none", "lookup"]:
            raise KeyboardInterrupt
        return whole(self, name, drafter)

    monkeypatch.setattr(Exam, "examine", noted)
    line = command(folders, tmp_path / "e.json", "--variant", "none,lookup", "--samples", "50")
    assert [main(line), main(line), main([*line, "--resume"])] == [130, 2, 1]
    assert examined == ["none", "lookup", "lookup"]
    assert list(verdicts(tmp_path / "e.json")) == ["none", "lookup"]


def test_a_greedy_fault_is_not_taken_for_rounding(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_left_in_the_cache(monkeypatch)
    output = tmp_path / "e.json"
    assert main(command(folders, output, "--variant", "recycling", "--samples", "50", "--draft-tokens", "3")) == 1
    (one,) = json.loads(output.read_text(encoding="utf-8"))["results"]
    assert not any(place["is_explained"] for place in one["greedy"]["divergences"])
    assert "1 of 1 greedy texts leave that of plain generation" in one["words"]
    assert "`" not in one["words"]  # a terminal shows the mark


def test_a_blind_test_is_no_pass(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "e.json"
    assert main(command(folders, output, "--variant", "recycling,none", "--samples", "50")) == 1
    assert verdicts(output) == {"recycling": "blind", "none": "exact"}
    assert "this test could not have seen a fault: the biased control passed too" in capsys.readouterr().out


def test_half_precision_is_no_fault(folders: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "e.json"
    line = command(folders, output, "--variant", f"assisted:{folders[1]}", "--samples", "4000", "--max-new-tokens", "64")
    assert main([*line, "--dtype", "bfloat16"]) == 0
    rounding = json.loads(output.read_text(encoding="utf-8"))["rounding"]
    assert rounding["dtype"] == "torch.bfloat16"
    assert 1e-3 < rounding["explained_gap"] < 1


# What it is made of


@pytest.mark.parametrize("arguments", [{"top_k": 0}, WARPED])
def test_the_law_of_the_first_tokens_is_that_of_plain_decoding(arguments: dict[str, Any]) -> None:
    target, _ = target_and_near_one()
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    expected = expected_law(target, 2, **arguments)
    given = {"max_new_tokens": 5, "pad_token_id": 0, **arguments}
    whole = first_tokens(target, inputs, 2, 0.0, 100, **given).cells
    assert {text: share for text, share in whole.items() if share} == pytest.approx(expected)
    law = first_tokens(target, inputs, 2, 0.02, 3, **given)
    assert sum(law.cells.values()) == pytest.approx(1)
    assert 2 < len(law.cells) < len(whole)
    pooled: Counter[Any] = Counter()
    for text, share in expected.items():
        pooled[law.cell_of(text)] += share
    assert dict(pooled) == pytest.approx({cell: share for cell, share in law.cells.items() if share})


def test_a_text_that_ends_is_counted_where_it_ends() -> None:
    law = FirstTokens(3, {(7,): 0.5, (1, REST): 0.2, (1, 2, 3): 0.2, (1, 2, REST): 0.05, (REST,): 0.05})
    rows = [[7], [1, 2, 3, 9], [1, 2, 4], [1, 7], [5], [5, 6, 7]]
    assert law.count(rows) == {(7,): 1, (1, 2, 3): 1, (1, 2, REST): 1, (1, REST): 1, (REST,): 2}


def shares_rejected(truth: list[float], level: float, samples: int, rounding: float = 0.0) -> float:
    law = dict(enumerate(LAW))
    drawn = np.random.default_rng(0).multinomial(samples, truth, size=600)
    return float(np.mean([g_test(dict(enumerate(counts)), law, rounding).p_value < level for counts in drawn]))


LAW = [0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.05, 0.0199, 0.0001]


def test_false_alarms_and_power_are_what_is_said() -> None:
    level, samples = 0.05, 1000
    assert 0.03 < shares_rejected(LAW, level, samples) < 0.075
    assert shares_rejected(LAW, level, samples, rounding=5.0) < 0.01
    distance = seen_distance(len(pooled_cells(dict(enumerate(LAW)), samples)), samples, level, 0.95)
    # What is hardest to see of that total variation: half of the law takes it from the other half, in proportion.
    is_up = np.array([True, True, False, False, False, False, False, False, False])
    law = np.array(LAW)
    shifted = np.where(is_up, law * (1 + distance / law[is_up].sum()), law * (1 - distance / law[~is_up].sum()))
    assert 0.93 < shares_rejected(shifted.tolist(), level, samples) < 0.985
    assert shares_rejected((law + (shifted - law) / 2).tolist(), level, samples) < 0.6


def test_sparse_cells_are_pooled() -> None:
    assert pooled_cells({"a": 0.85, "b": 0.06, "c": 0.04, "d": 0.05}, 100) == [["a"], ["b"], ["d", "c"]]
    assert pooled_cells({"a": 0.9, "b": 0.04, "c": 0.04, "d": 0.02}, 100) == [["a"], ["b", "c", "d"]]
    assert seen_distance(1, 1000, 0.01, 0.95) == 1


def test_rounding_is_what_two_kinds_of_passes_differ_by(folders: tuple[Path, Path]) -> None:
    target, _ = target_and_near_one()
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    run, logits = plain_greedy(target, inputs, max_new_tokens=12)
    exact = measure_rounding(target, [(inputs, run.rows[0], logits)], 2, 1.0)
    assert exact.positions == 2 * 12  # in one pass, and in passes over two tokens
    assert exact.explained_gap < 2e-6  # `generate` returns logits in single precision
    changed = logits.clone()
    changed[5, logits[5].argmax()] += 0.25
    assert measure_rounding(target, [(inputs, run.rows[0], changed)], 2, 1.0).explained_gap == pytest.approx(0.5)


def test_a_text_that_ends_too_soon_is_a_fault() -> None:
    place = {"prompt": "1", "row": 0, "position": 3, "plain": 4, "other": None, "gap": None, "is_explained": False}
    greedy = {"rows": 1, "identical": 0, "divergences": [place]}
    said = verdict_of({"greedy": greedy, "sampling": [], "control": []}, drafts=True)
    assert said["verdict"] == "not exact"
    assert "token 3 after prompt 1, where one text ended" in said["words"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--dtype", "int8"], "--dtype must be one of float64, float32"),
        (["--temperature", "0"], "--temperature must be a finite number above 0"),
        (["--top-p", "0"], "--top-p above 0"),
        (["--samples", "0"], "--samples must be at least 1"),
        (["--variant", "plain,hf-lookup"], "only drafters of this library"),
        (["--variant", "assisted:/no/such/folder"], "/no/such/folder cannot be loaded"),
        (["--variant", "head:/no/such/folder"], "The head /no/such/folder cannot be used"),
    ],
)
def test_bad_input_is_one_sentence(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], sentence: str
) -> None:
    assert main([*command(folders, tmp_path / "e.json"), *more]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
    assert list(tmp_path.glob("e.json*")) == []


def test_what_it_needs_is_named(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(exactness, "find_spec", lambda name: None)
    assert main(command(folders, tmp_path / "e.json")) == 2
    assert 'run `pip install "specheads[eval]"`' in capsys.readouterr().err
