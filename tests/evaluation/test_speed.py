from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specheads.evaluation import bench as bench_module
from specheads.evaluation.acceptance_figures import BY_LENGTH
from specheads.evaluation.bench import Bench
from specheads.evaluation.divergence import divergences, first_difference
from specheads.evaluation.intervals import few_prompts_note, median_ratio, total_ratio
from specheads.evaluation.journal import Journal, write_json
from specheads.evaluation.prompts import InputError, Prompt, encode
from specheads.evaluation.runs import Run, continuations
from specheads.evaluation.speed import main
from specheads.evaluation.speed_tables import greedy_cell, prompts_by_category
from specheads.evaluation.summary import summarise
from specheads.evaluation.table import plain_table
from specheads.evaluation.variants import parse_speculative, parse_variants
from specheads.evaluation.ways import lengths_of


def command(model: Path, prompts: Path, output: Path, *more: str) -> list[str]:
    fixed = ["--model", str(model), "--prompts", str(prompts), "--output", str(output)]
    return [*fixed, "--variant", "hf-lookup", "--max-new-tokens", "12", *more]


# Pairing and order


def test_who_goes_first_rotates_and_all_get_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def fake_run(model: Any, inputs: Any, seed: int, way: str, **arguments: Any) -> Run:
        calls.append((way, seed))
        return Run([[1, 2]], 1.0)

    monkeypatch.setattr(bench_module, "timed_run", fake_run)
    monkeypatch.setattr(Bench, "inputs", lambda self, prompts: {})
    bench = Bench(None, None, {name: {"way": name} for name in ("plain", "a", "b")}, {"do_sample": True}, seed=5)
    for number in range(4):
        trial = bench.trial(number, [Prompt("1", "all", ())])
        assert list(trial["runs"]) == ["plain", "a", "b"]
    ways = [way for way, _ in calls]
    assert ways == ["plain", "a", "b", "a", "b", "plain", "b", "plain", "a", "b", "a", "plain"]
    assert [seed for _, seed in calls] == [5, 5, 5, 6, 6, 6, 7, 7, 7, 8, 8, 8]


def test_tokens_are_counted_in_ids_up_to_the_end(model: Any) -> None:
    end = model.generation_config.eos_token_id
    inputs = {"input_ids": torch.tensor([[1, 2], [3, 4]])}
    sequences = torch.tensor([[1, 2, 7, end, end], [3, 4, 5, 6, 8]])
    rows = continuations(model, inputs, sequences)
    assert rows == [[7, end], [5, 6, 8]]
    assert Run(rows, seconds=2.0).tokens_per_second == 2.5


# Ratios and intervals


def test_ratios_are_taken_in_pairs() -> None:
    plain = [10.0, 1.0, 5.0]  # prompts of very different speed
    ratio = median_ratio([20.0, 2.0, 10.0], plain)
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    total = total_ratio([10, 10], [1.0, 3.0], [10, 10], [2.0, 6.0])
    assert (total.value, total.low, total.high) == (2.0, 2.0, 2.0)


def test_intervals_cover_the_true_ratio_at_their_rate() -> None:
    covered = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        plain = generator.uniform(5, 50, size=40)
        interval = median_ratio((plain * 1.5 * generator.lognormal(sigma=0.2, size=40)).tolist(), plain.tolist(), seed)
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= 1.5 <= interval.high
    assert 88 <= covered <= 99


def test_a_seed_gives_the_same_interval_and_one_pair_gives_none() -> None:
    generator = np.random.default_rng(0)
    speeds, plain = generator.uniform(1, 2, size=(2, 20)).tolist()
    tokens = [10] * 20
    intervals = [total_ratio(tokens, speeds, tokens, plain, seed) for seed in (3, 3, 4)]
    assert intervals[0] == intervals[1] != intervals[2]
    assert median_ratio([3.0], [2.0]).low is None
    with pytest.raises(ValueError, match="at least one pair"):
        median_ratio([], [])


def run_of(seconds: float, tokens: int, rounds: int | None = None, differing: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    counts = None
    if rounds is not None:
        counts = {"num_spec_steps": rounds, "num_draft_tokens": 10, "num_accepted_draft_tokens": tokens - rounds}
        counts |= {name: [rounds] for name in BY_LENGTH}
        counts |= {"num_emitted_tokens": tokens, "seconds": {"draft": 0.1, "verify": 0.8, "other": 0.1}}
    return {"seconds": seconds, "tokens": tokens, "speculation": counts, "divergences": list(differing)}


def test_the_summary_pools_counts_and_keeps_categories_apart() -> None:
    part = {"row": 0, "position": 3, "plain": 1, "other": 2, "gap": 1e-5}
    trials = [
        {"category": "a", "prompts": ["x"], "runs": {"plain": run_of(2.0, 10), "auto": run_of(1.0, 10, rounds=5)}},
        {"category": "b", "prompts": ["y"], "runs": {"plain": run_of(2.0, 10), "auto": run_of(2.0, 10, 8, [part])}},
    ]
    auto = summarise(trials, seed=0)["auto"]
    assert auto["median_ratio"]["value"] == 1.5
    assert auto["total_ratio"]["value"] == pytest.approx(4 / 3)
    assert auto["categories"]["a"]["median_ratio"]["value"] == 2.0
    assert auto["speculation"]["mean_acceptance_length"] == pytest.approx(20 / 13)
    assert auto["speculation"]["draft_acceptance_rate"] == pytest.approx(7 / 20)
    assert auto["speculation"]["cost_ratio"] == pytest.approx(20 / 13 / (4 / 3) - 1)
    assert auto["speculation"]["seconds"]["verify"] == pytest.approx(1.6)
    assert auto["greedy"] == {"rows": 2, "divergences": [{"prompt": "y", **part}]}


def test_few_prompts_are_those_of_an_interval_not_their_repeats() -> None:
    summary = {"plain": {"categories": {"a": {"trials": 6}, "b": {"trials": 3}}}}
    assert prompts_by_category({"settings": {"repeats": 3}, "summary": summary}) == {"a": 2, "b": 1}
    assert few_prompts_note([5, 2])
    assert few_prompts_note([5, 1]) == ""  # one prompt has no interval


# Greedy equality


def test_the_first_difference_is_found_also_at_an_end() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2


def test_a_divergence_is_explained_by_the_gap_of_the_scores(model: Any, tokenizer: Any) -> None:
    prompts = [Prompt(text, "all", ({"role": "user", "content": text},)) for text in ("Hi", "Hello you")]
    inputs = encode(tokenizer, prompts)
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    plain = Run(continuations(model, inputs, output), 1.0)
    assert divergences(model, inputs, plain, plain) == []

    row = plain.rows[0]
    held = inputs["input_ids"][0][inputs["attention_mask"][0].bool()]
    logits = model(torch.cat([held, torch.tensor(row[:4])])[None]).logits[0, -1]
    second = int(logits.topk(2).indices[1])
    other = Run([[*row[:4], second, *row[5:]], plain.rows[1][:3]], 1.0)
    first, cut = divergences(model, inputs, plain, other)
    assert (first.row, first.position, first.plain, first.other) == (0, 4, row[4], second)
    assert first.gap == pytest.approx((logits[row[4]] - logits[second]).item(), abs=1e-4)
    assert (cut.row, cut.position, cut.other, cut.gap) == (1, 3, None, None)


@pytest.mark.parametrize(
    ("greedy", "cell"),
    [
        (None, ""),
        ({"rows": 4, "divergences": []}, "4/4"),
        ({"rows": 4, "divergences": [{"gap": 1e-5}, {"gap": 2e-4}]}, "2/4, gap 2e-04"),
        ({"rows": 4, "divergences": [{"gap": 1e-5}, {"gap": None}]}, "2/4, other end"),
    ],
)
def test_the_table_says_how_many_rows_are_identical(greedy: dict[str, Any] | None, cell: str) -> None:
    assert greedy_cell(greedy) == cell


def test_a_plain_table_is_aligned() -> None:
    assert plain_table("Title", ["a", "b"], [["long", "1"], ["x", "22"]], "note").splitlines() == [
        "Title",
        "a      b",
        "--------",
        "long   1",
        "x     22",
        "note",
    ]


# Files


def test_json_appears_whole(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "result.json"
    write_json(output, {"a": 1})
    with pytest.raises(TypeError):
        write_json(output, {"a": object()})
    assert json.loads(output.read_text(encoding="utf-8")) == {"a": 1}


def test_a_journal_survives_a_cut_last_line(tmp_path: Path) -> None:
    output, settings = tmp_path / "result.json", {"seed": 1}
    journal = Journal(output, settings, resume=False)
    journal.append({"trial": 0})
    journal.append({"trial": 1})
    with journal.path.open("a", encoding="utf-8") as file:
        file.write('{"trial": 2, "ru')
    resumed = Journal(output, settings, resume=True)
    assert resumed.trials == [{"trial": 0}, {"trial": 1}]
    resumed.append({"trial": 2})
    assert Journal(output, settings, resume=True).trials == [{"trial": 0}, {"trial": 1}, {"trial": 2}]


def test_a_journal_is_neither_overwritten_nor_mixed(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    Journal(output, {"seed": 1}, resume=False).append({"trial": 0})
    with pytest.raises(InputError, match="add --resume"):
        Journal(output, {"seed": 1}, resume=False)
    with pytest.raises(InputError, match="seed=1, not 2"):
        Journal(output, {"seed": 2}, resume=True)


# The command


def test_plain_against_lookup_from_file_to_json(
    model_folder: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "speed.json"
    assert main(command(model_folder, prompt_file, output, "--threads", "1")) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    assert [trial["prompts"] for trial in result["trials"]] == [["1"], ["2"], ["3"]]
    assert result["summary"]["hf-lookup"]["greedy"] == {"rows": 3, "divergences": []}
    assert result["summary"]["hf-lookup"]["tokens"] == result["summary"]["plain"]["tokens"] > 0
    assert set(result["summary"]["plain"]["categories"]) == {"writing", "qa"}
    assert result["settings"]["max_new_tokens"] == 12
    assert result["provenance"]["versions"]["torch"] == torch.__version__
    assert not output.with_name("speed.json.partial").exists()
    printed = capsys.readouterr().out
    assert "hf-lookup" in printed
    assert "3/3" in printed
    assert "fewer than 5 prompts is a range of these prompts only" in printed  # there are two of one category


@pytest.mark.parametrize("way", [["--batch-size", "2"], ["--temperature", "0.9"]])
def test_our_variants_run_and_are_counted(model_folder: Path, prompt_file: Path, tmp_path: Path, way: list[str]) -> None:
    output = tmp_path / "speed.json"
    variants = f"none,auto,assisted:{model_folder}"
    assert main([*command(model_folder, prompt_file, output), "--variant", variants, "--draft-tokens", "3", *way]) == 0
    summary = json.loads(output.read_text(encoding="utf-8"))["summary"]
    for name in variants.split(","):
        counts = summary[name]["speculation"]
        assert counts["num_emitted_tokens"] == summary[name]["tokens"]
        assert summary[name]["greedy"] == ({"rows": 3, "divergences": []} if way[0] == "--batch-size" else None)
    assert summary["none"]["speculation"]["mean_acceptance_length"] == 1
    assert summary["none"]["speculation"]["draft_acceptance_rate"] is None


def test_an_interrupted_run_is_resumed(
    model_folder: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "speed.json"
    line = command(model_folder, prompt_file, output)
    whole = Bench.trial

    def interrupted(self: Bench, number: int, prompts: Sequence[Prompt]) -> dict[str, Any]:
        if number == 2:
            raise KeyboardInterrupt
        return whole(self, number, prompts)

    with monkeypatch.context() as patch:
        patch.setattr(Bench, "trial", interrupted)
        assert main(line) == 130
    assert not output.exists()
    assert main(line) == 2
    assert "add --resume" in capsys.readouterr().err
    before = [json.loads(text) for text in output.with_name("speed.json.partial").read_text(encoding="utf-8").splitlines()]
    assert main([*line, "--resume"]) == 0
    trials = json.loads(output.read_text(encoding="utf-8"))["trials"]
    assert trials[:2] == before[1:]
    assert [trial["trial"] for trial in trials] == [0, 1, 2]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--temperature", "-1"], "--temperature must be a finite number"),
        (["--batch-size", "2"], "one prompt at a time"),
        (["--variant", "turbo"], "no variant turbo"),
        (["--variant", "hf-assisted:/no/such/folder"], "/no/such/folder cannot be loaded"),
        (["--model", "/no/such/folder"], "cannot be loaded"),
        (["--prompts", "/no/such/file"], "cannot be read"),
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
    assert main([*command(model_folder, prompt_file, tmp_path / "speed.json"), *more]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
    assert list(tmp_path.glob("speed.json*")) == []


# Twice the same, and several draft lengths


def test_what_is_named_twice_is_measured_twice(model_folder: Path, prompt_file: Path, tmp_path: Path) -> None:
    names = [variant.name for variant in parse_variants("auto,plain,auto,plain")]
    assert names == ["plain", "plain#2", "auto", "auto#2"]
    output = tmp_path / "speed.json"
    line = [*command(model_folder, prompt_file, output), "--variant", "plain,plain,auto,auto", "--repeats", "2"]
    assert main(line) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    assert len(result["trials"]) == 6
    tokens = [figures["tokens"] for figures in result["summary"].values()]
    assert len(tokens) == 4 and len(set(tokens)) == 1
    for name in ("plain#2", "auto", "auto#2"):
        assert result["summary"][name]["greedy"] == {"rows": 6, "divergences": []}
    with pytest.raises(InputError, match="auto is named twice"):
        parse_speculative("auto,auto")


def test_repeats_of_a_prompt_are_one_pair() -> None:
    def trial(prompt: str, plain: float, own: float) -> dict[str, Any]:
        return {"category": "a", "prompts": [prompt], "runs": {"plain": run_of(plain, 10), "auto": run_of(own, 10)}}

    once = [trial("x", 2.0, 1.0), trial("y", 2.0, 2.0)]
    found = summarise([*once, trial("x", 2.0, 1.0), trial("y", 2.0, 2.0), trial("x", 2.0, 8.0)], seed=0)["auto"]
    assert found["median_ratio"] == summarise(once, seed=0)["auto"]["median_ratio"]  # of x the median, whatever one run was
    assert found["total_ratio"]["value"] == pytest.approx((6 + 4) / (10 + 4))
    assert found["trials"] == 5


def test_several_draft_lengths_are_compared_in_one_run(model_folder: Path, prompt_file: Path, tmp_path: Path) -> None:
    output, table = tmp_path / "speed.json", tmp_path / "table.md"
    given = ["--variant", "plain,none,suffix,hf-lookup,hf-lookup:3", "--draft-tokens", "2,4", "--markdown", str(table)]
    assert main([*command(model_folder, prompt_file, output), *given]) == 0
    summary = json.loads(output.read_text(encoding="utf-8"))["summary"]
    names = ["plain", "none", "suffix K=2", "suffix K=4", "hf-lookup K=2", "hf-lookup K=4", "hf-lookup:3"]
    assert list(summary) == names
    assert [summary[name]["draft_tokens"] for name in names] == [None, None, 2, 4, 2, 4, None]
    assert summary["suffix K=4"]["variant"] == "suffix"
    assert len(summary["suffix K=2"]["speculation"]["acceptance_at_position"]) <= 2
    lines = table.read_text(encoding="utf-8").splitlines()
    assert lines[2] == "| variant | tokens/s | all | writing | qa | τ | greedy texts |"
    assert [line.split("|")[1].strip(" `") for line in lines[4:]] == names
    assert all(line.count("|") == lines[2].count("|") for line in lines[2:])


@pytest.mark.parametrize("text", ["0", "2,,3", "two", "2,2"])
def test_bad_draft_lengths_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--draft-tokens"):
        lengths_of(text)
