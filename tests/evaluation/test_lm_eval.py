"""Scores of the harness `lm-eval` are the same with and without speculation. Skipped where it is not installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval", reason='the harness is not installed: run `pip install ".[lm-eval]"`')

from specheads.evaluation.lm_eval import SpeculativeLM  # noqa: E402

TASK = """\
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n", "zz"], max_gen_toks: 24}}
metric_list:
  - metric: exact_match
"""
QUESTIONS = [{"question": f"{letters * 4}", "answer": letters} for letters in ("abc", "xy", "hello ", "12 ")]


@pytest.fixture
def task_folder(tmp_path: Path) -> Path:
    """A task of text to be generated, without network."""
    questions = tmp_path / "questions.json"
    questions.write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
    (tmp_path / "letters.yaml").write_text(TASK.format(questions=questions), encoding="utf-8")
    return tmp_path


def evaluated(kind: str, task_folder: Path, **arguments: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task_folder), include_defaults=False)
    given = {"device": "cpu", "dtype": "float64", **arguments}
    result: dict[str, Any] = lm_eval.simple_evaluate(
        model=kind, model_args=given, tasks=["letters"], task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    return result


@pytest.mark.parametrize(("batch_size", "way"), [(1, "drafter"), (3, "draft_model")])
def test_texts_and_scores_are_those_of_the_plain_model(
    model_folder: Path, task_folder: Path, batch_size: int, way: str
) -> None:
    chosen = {way: "suffix" if way == "drafter" else str(model_folder)}
    shared = {"pretrained": str(model_folder), "batch_size": batch_size}
    plain = evaluated("hf", task_folder, **shared)
    ours = evaluated("specheads", task_folder, draft_tokens=3, adaptive=False, **chosen, **shared)
    texts = [[sample["resps"] for sample in result["samples"]["letters"]] for result in (plain, ours)]
    assert texts[0] == texts[1]
    assert plain["results"]["letters"]["exact_match,none"] == ours["results"]["letters"]["exact_match,none"]
    assert ours["config"]["mean_acceptance_length"] > 1  # else nothing was speculated


def test_one_drafter_only(model_folder: Path) -> None:
    with pytest.raises(ValueError, match="not both"):
        SpeculativeLM(str(model_folder), drafter="suffix", draft_model=str(model_folder))
