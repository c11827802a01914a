from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specheads.evaluation.acceptance import Combination, main
from specheads.evaluation.acceptance_figures import counts_of, figures_of, pooled
from specheads.evaluation.bench import Bench
from specheads.evaluation.prompts import Prompt
from specheads.evaluation.runs import Run
from specheads.evaluation.variants import parse_speculative
from specheads.stats import RowStats

from ..exactness.head_loop import random_head


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Path:
    folder = tmp_path_factory.mktemp("head")
    random_head(model, "medusa").save_pretrained(folder)
    return folder


def command(model: Path, prompts: Path, output: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--prompts", str(prompts), "--output", str(output), "--max-new-tokens", "12", *more]


def measured(*line: Any) -> dict[str, Any]:
    assert main(command(*line)) == 0
    result: dict[str, Any] = json.loads(line[2].read_text(encoding="utf-8"))
    return result


def test_every_combination_is_measured_at_its_own_length(
    model_folder: Path, head_folder: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = f"none,assisted:{model_folder},head-alone:{head_folder}"
    lists = ["--variant", variants, "--temperatures", "0,0.9", "--draft-tokens", "1,2", "--tree-nodes", "chain,4"]
    result = measured(model_folder, prompt_file, tmp_path / "a.json", *lists, "--batch-size", "2", "--turns", "1")
    assert result["kind"] == "acceptance"
    assert len(result["results"]) == 3 * 2 * 2 * 2
    for one in result["results"]:
        figures = one["figures"]
        positions = len(figures["acceptance_at_position"])
        assert positions == (0 if one["variant"] == "none" else one["draft_tokens"])
        assert figures["prompts"] == sum(own["prompts"] for own in one["categories"].values()) == 3
        length = figures["mean_acceptance_length"]
        assert length["value"] == pytest.approx(figures["num_emitted_tokens"] / figures["num_spec_steps"])
        assert length["low"] <= length["value"] <= length["high"]
        assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]
        if one["variant"].startswith("assisted") and one["temperature"] == 0:  # the target drafts for itself
            assert figures["acceptance_at_position"][0] == 1
    assert result["results"][0]["variant"] == "none"
    assert result["results"][0]["figures"]["draft_acceptance_rate"] is None
    printed = capsys.readouterr().out
    assert "τ by category" in printed
    assert "writing" in printed
    assert "fewer than 5 prompts is a range of these prompts only" in printed  # there are two of one category
    ways = {text["way"] for text in result["texts"]}
    assert ways and not any("None" in way for way in ways)


def test_a_chain_is_named_without_nodes() -> None:
    chain = Combination(parse_speculative("suffix")[0], 0.0, 4, None)
    assert chain.key == "suffix with temperature 0.0, draft_tokens 4"
    assert replace(chain, tree_nodes=6).key == "suffix with temperature 0.0, draft_tokens 4, tree_nodes 6"


def test_an_answer_of_the_model_goes_into_its_next_turn(
    model_folder: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[Prompt]] = []
    whole = Bench.run

    def noted(self: Bench, name: str, prompts: Sequence[Prompt], seed: int, **changed: Any) -> Run:
        run = whole(self, name, prompts, seed, **changed)
        if not changed:
            asked.append(list(prompts))
            answers.append([self.tokenizer.decode(row, skip_special_tokens=True) for row in run.rows])
        return run

    answers: list[list[str]] = []
    monkeypatch.setattr(Bench, "run", noted)
    result = measured(model_folder, prompt_file, tmp_path / "a.json", "--batch-size", "3", "--variant", "none")
    assert [len(prompts) for prompts in asked] == [2, 1, 1]  # two of one category, of which one goes on; another category
    assert [message["content"] for message in asked[1][0].messages] == ["abcabcabcabc", answers[0][0], "Again."]
    rows = result["trials"][0]["rows"]
    assert rows[0]["num_emitted_tokens"] > 12 >= rows[1]["num_emitted_tokens"]

    asked.clear()
    measured(model_folder, prompt_file, tmp_path / "b.json", "--batch-size", "3", "--turns", "1")
    assert [len(prompts) for prompts in asked] == [2, 1]


def test_an_interrupted_run_is_resumed_with_the_same_figures(
    model_folder: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = ["--variant", "suffix", "--temperatures", "0,0.9"]
    expected = measured(model_folder, prompt_file, tmp_path / "whole.json", *lists)
    whole, calls = Bench.run, iter(range(5))

    def interrupted(self: Bench, name: str, prompts: Sequence[Prompt], seed: int, **changed: Any) -> Run:
        if not changed and next(calls, None) is None:
            raise KeyboardInterrupt
        return whole(self, name, prompts, seed, **changed)

    line = command(model_folder, prompt_file, tmp_path / "cut.json", *lists)
    with monkeypatch.context() as patch:
        patch.setattr(Bench, "run", interrupted)
        assert main(line) == 130
    assert main(line) == 2
    assert main([*line, "--resume"]) == 0
    resumed = json.loads((tmp_path / "cut.json").read_text(encoding="utf-8"))
    assert (resumed["results"], resumed["trials"]) == (expected["results"], expected["trials"])


def row(*rounds: tuple[int, int]) -> dict[str, Any]:
    """The counts of rounds that drafted and accepted so many tokens, and added one."""
    stats = RowStats()
    for drafted, accepted in rounds:
        stats.record(drafted, drafted, accepted, accepted + 1)
    return counts_of(stats)


def test_figures_are_pooled_over_rounds_not_averaged_over_prompts() -> None:
    short, long = row((2, 2)), row((2, 0), (2, 1), (1, 0), (0, 0))
    figures = figures_of([short, long], seed=0)
    assert figures["mean_acceptance_length"]["value"] == pytest.approx((3 + 5) / 5)
    assert (figures["mean_acceptance_length"]["low"], figures["mean_acceptance_length"]["high"]) == (1.25, 3.0)
    assert figures["draft_acceptance_rate"] == pytest.approx(3 / 7)
    assert figures["drafted_to_position"] == [4, 3]
    assert figures["acceptance_at_position"] == pytest.approx([2 / 4, 1 / 3])
    assert figures["conditional_acceptance_at_position"] == pytest.approx([2 / 4, 1 / 2])
    assert figures["acceptance_histogram"] == [3, 1, 1]
    assert pooled([short, long]).num_spec_steps == 5


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--variant", "hf-lookup"], "only drafters of this library"),
        (["--variant", "plain"], "only drafters of this library"),
        (["--variant", "head"], "needs a head: write head:<folder or id>"),
        (["--temperatures", "0,warm"], "--temperatures takes finite numbers of at least 0, got warm"),
        (["--draft-tokens", "0"], "--draft-tokens takes whole numbers of at least 1, got 0"),
        (["--tree-nodes", "tree"], "--tree-nodes takes whole numbers of at least 1, got tree"),
        (["--draft-tokens", ","], "each need at least one value"),
        (["--verification", "hope"], "--verification must be one of"),
        (["--turns", "0"], "--turns must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence(
    model_folder: Path,
    prompt_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    sentence: str,
) -> None:
    assert main(command(model_folder, prompt_file, tmp_path / "a.json", *more)) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
    assert list(tmp_path.glob("a.json*")) == []
