"""A model card says what was measured, and of these weights; without results it says that there are none."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from specheads.evaluation.intervals import Interval
from specheads.heads import DraftHead, EagleHead, HeadConfig, MedusaHeads
from specheads.heads.card import MARK, make_card, write_card
from specheads.heads.provenance import weights_fingerprint
from specheads.heads.results import MeasuredResults, TaskResult, TrainingRecord, load_records
from tests.hub import Hub
from tests.tiny import tiny

TRAINING = TrainingRecord(
    command="train/heads.py --config recipe.yaml",
    datasets=["someone/chats", "/home/me/own.jsonl"],
    data_fingerprint="d1",
    arguments={"learning_rate": 1e-3},
    versions={"torch": "2.13.0"},
)


def target_of(name: str = "someone/model") -> Any:
    target = tiny()
    target.config._name_or_path = name
    return target


def results_of(head: Any, task: str = "chat", command: str = "eval/acceptance.py --head x") -> MeasuredResults:
    return MeasuredResults(
        tasks=[
            TaskResult(task, 8, Interval(2.3125, 2.2, 2.4), [0.75, 0.5], Interval(1.5), {"draft_tokens": 5, "temperature": 0}),
            TaskResult("code", 4, Interval(3.0), [0.9]),
        ],
        provenance={"command": command, "versions": {"specheads": "0.1.0", "numpy": None}, "device": "cpu", "dtype": "float32"},
        data_fingerprint="p1",
        head_fingerprint=weights_fingerprint(head),
    )


@pytest.fixture
def head() -> EagleHead:
    return EagleHead.from_target(target_of(), revision="abc123")


def table_rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]


def test_without_results_none_are_shown(head: EagleHead) -> None:
    made = make_card(head)
    assert "No acceptance and no speed were measured for these weights." in made.text
    assert "How it was trained was not recorded." in made.text
    assert "model-index" not in str(made)
    before, after = made.text.split("## What was measured")[1].split("## Where it comes from")
    assert not any(sign.isdigit() for sign in before), after


def test_what_was_measured_is_shown(head: EagleHead) -> None:
    made = make_card(head, results_of(head), TRAINING, repo_id="someone/head")
    rows = table_rows(made.text)
    assert ["chat", r"draft\_tokens=5, temperature=0", "8", "2.31 (2.20 to 2.40)", "0.75, 0.50", "1.50"] in rows
    assert ["code", "-", "4", "3.00", "0.90", "-"] in rows
    assert "$ eval/acceptance.py --head x" in made.text
    assert ["measured with", "specheads 0.1.0, cpu, float32"] in rows
    assert ["fingerprint of the prompts", "p1"] in rows and ["fingerprint of the training data", "d1"] in rows
    assert ["base model", "someone/model"] in rows and ["its revision", "abc123"] in rows
    assert ["trained on", "someone/chats, /home/me/own.jsonl"] in rows
    assert "$ train/heads.py --config recipe.yaml" in made.text and "not recorded" not in made.text
    assert 'specheads.enable(model, drafter="someone/head")' in made.text
    assert 'from_pretrained("someone/model", revision="abc123")' in made.text


def test_metadata(head: EagleHead) -> None:
    data = make_card(head, results_of(head), TRAINING, repo_id="someone/head", tags=["mine"]).data
    assert data.library_name == "specheads" and data.pipeline_tag == "text-generation"
    assert data.base_model == "someone/model" and data.to_dict()["base_model_relation"] == "adapter"
    assert data.tags == ["speculative-decoding", "draft-model", "eagle3", "mine"]
    assert data.datasets == ["someone/chats"]
    found = {(result.dataset_name, result.metric_type): result.metric_value for result in data.eval_results}
    assert found == {
        ("chat", "mean_acceptance_length"): 2.3125,
        ("chat", "speed_ratio"): 1.5,
        ("code", "mean_acceptance_length"): 3.0,
    }
    local = make_card(EagleHead.from_target(target_of("/home/me/models/tuned")))
    assert local.data.base_model is None and "path/to/tuned" in local.text and "/home/me" not in str(local)


@pytest.mark.parametrize(
    ("make", "tag", "method"),
    [
        (lambda target: EagleHead.from_target(target, version=1), "eagle1", None),
        (lambda target: EagleHead.from_target(target, version=2), "eagle2", None),
        (lambda target: EagleHead.from_target(target, version=3), "eagle3", "eagle3"),
        (lambda target: MedusaHeads.from_target(target, num_heads=3), "medusa", "medusa"),
        (lambda target: MedusaHeads.from_target(target, dependence="hydra"), "hydra", None),
        (lambda target: MedusaHeads.from_target(target, dependence="markov", markov_rank=2), "medusa", None),
    ],
)
def test_kinds_and_engines(make: Any, tag: str, method: str | None) -> None:
    made = make_card(make(target_of()), repo_id="someone/head")
    assert tag in made.data.tags
    lines = [line for line in made.text.splitlines() if line.startswith("vllm serve")]
    if method is None:
        assert not lines and "ngine" in made.text
        return
    words = shlex.split(lines[0])
    assert words[:3] == ["vllm", "serve", "someone/model"]
    settings = json.loads(words[-1])
    assert settings == {"method": method, "model": "someone/head", "num_speculative_tokens": 3 if method == "medusa" else 5}


HOSTILE = [
    "a | b",
    "x\n---\nlicense: mit\n---\n# Owned",
    "<script>alert(1)</script>",
    "[click](https://example.org)",
    "![](https://example.org/x.png)",
    "```\n# out of the fence",
    "` `` ```",
    '"); import os; ("',
    "'; rm -rf ~; '",
    "{{ 7 * 7 }}{% raw %}",
    "a\u2028b\u202ec\x00d",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_names(name: str) -> None:
    plain_head, hostile_head = (EagleHead.from_target(target_of(base), revision=base) for base in ("plain", name))
    training = replace(TRAINING, command=name, datasets=[name], arguments={name: name}, data_fingerprint=name)
    hostile = make_card(hostile_head, results_of(hostile_head, name, name), training, tags=[name])
    plain = make_card(
        plain_head,
        results_of(plain_head, "plain", "plain"),
        replace(TRAINING, command="plain", datasets=["plain"], arguments={"plain": "plain"}, data_fingerprint="plain"),
        tags=["plain"],
    )
    # As many lines, rows, cells and fences as with a harmless name: the text's structure does not depend on it.
    assert structure(hostile.text) == structure(plain.text)
    assert hostile.data.to_dict().get("license") is None
    outside = "".join(hostile.text.split("```")[::2])
    assert not re.search(r"<script|(?<!\\)\]\(|://", outside)
    for line in hostile.text.splitlines():
        if line.startswith("model = "):
            compile(line, "card", "exec")
        if line.startswith("vllm"):
            assert len(shlex.split(line)) == 7


def structure(text: str) -> list[str]:
    kinds = []
    for line in text.splitlines():
        cells = line.replace("\\\\", "").replace("\\|", "").count("|")
        kinds.append(f"row of {cells}" if line.startswith("|") else "fence" if line.startswith("```") else line[:2])
    return [kind if kind.startswith(("row", "fence", "# ", "##", "$ ", "- ")) else "" for kind in kinds]


def test_results_of_other_weights_are_refused(head: EagleHead, tmp_path: Path) -> None:
    results = results_of(head)
    with torch.no_grad():
        head.fc.weight.add_(1)
    for call in (lambda: make_card(head, results), lambda: head.save_pretrained(tmp_path / "new", results=results)):
        with pytest.raises(ValueError, match="measured with other weights"):
            call()
    assert not list((tmp_path / "new").glob("*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": 0}, "at least one prompt"),
        ({"mean_acceptance_length": Interval(0.5)}, "at least 1.0"),
        ({"mean_acceptance_length": Interval(float("nan"))}, "finite"),
        ({"mean_acceptance_length": Interval(2.0, 2.1, 2.2)}, "ends around it"),
        ({"acceptance_at_position": [1.5]}, "between 0 and 1"),
        ({"speed_ratio": Interval(-1.0)}, "speed_ratio"),
    ],
)
def test_figures_that_cannot_have_been_measured_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TaskResult("chat", 8, Interval(2.0), [0.5]), **changes)


def test_results_need_tasks_and_a_command(head: EagleHead) -> None:
    with pytest.raises(ValueError, match="at least one task"):
        replace(results_of(head), tasks=[])
    with pytest.raises(ValueError, match="command"):
        replace(results_of(head), provenance={})


def test_saving_writes_the_card_and_keeps_results_of_the_same_weights(head: EagleHead, tmp_path: Path) -> None:
    results = results_of(head)
    head.save_pretrained(tmp_path, results=results, training=TRAINING)
    assert load_records(tmp_path) == (results, TRAINING)
    assert "2.31 (2.20 to 2.40)" in (tmp_path / "README.md").read_text()
    head.save_pretrained(tmp_path)
    assert load_records(tmp_path) == (results, TRAINING)
    assert "2.31 (2.20 to 2.40)" in (tmp_path / "README.md").read_text()
    with torch.no_grad():
        head.fc.weight.add_(1)
    head.save_pretrained(tmp_path)
    assert load_records(tmp_path) == (None, None)
    assert "No acceptance and no speed" in (tmp_path / "README.md").read_text()
    assert not (tmp_path / "specheads" / "results.json").exists()


def test_a_damaged_record_is_an_error(head: EagleHead, tmp_path: Path) -> None:
    head.save_pretrained(tmp_path, results=results_of(head))
    file = tmp_path / "specheads" / "results.json"
    for content in ("{", "{}", '{"results": {"tasks": [{"task": "chat"}]}, "training": null}'):
        file.write_text(content)
        with pytest.raises(ValueError, match=r"results\.json is damaged"):
            load_records(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_records(tmp_path / "specheads")
    with pytest.raises(TypeError, match="branch"):
        load_records(tmp_path, branch="v1")


def test_a_readme_of_the_users_own_stays(head: EagleHead, tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "README.md").write_text("mine")
    head.save_pretrained(tmp_path, results=results_of(head))
    assert (tmp_path / "README.md").read_text() == "mine"
    assert load_records(tmp_path)[0] is not None
    assert write_card(head, tmp_path) is False
    (tmp_path / "README.md").write_text(f"old\n{MARK}\n")
    assert write_card(head, tmp_path) is True
    assert "old" not in (tmp_path / "README.md").read_text()

    head.push_to_hub("someone/head", token="secret", results=results_of(head))
    files = hub.files("someone/head")
    assert MARK in files["README.md"].decode()
    head.push_to_hub("someone/head", token="secret")
    assert "2.31 (2.20 to 2.40)" in hub.files("someone/head")["README.md"].decode()  # the weights are the same
    assert load_records("someone/head", token="secret")[0] == results_of(head)
    with torch.no_grad():
        head.fc.weight.add_(1)
    head.push_to_hub("someone/head", token="secret")
    assert "specheads/results.json" not in hub.files("someone/head")
    files["README.md"] = b"mine"
    hub.repositories["someone/head"].commit(files)
    head.push_to_hub("someone/head", token="secret")
    assert hub.files("someone/head")["README.md"] == b"mine"


def test_pushing_after_saving_takes_everything_along(head: EagleHead, tmp_path: Path, hub: Hub) -> None:
    results = results_of(head)
    head.save_pretrained(
        tmp_path,
        push_to_hub=True,
        repo_id="someone/head",
        token="secret",
        private=True,
        tags=["mine"],
        results=results,
        training=TRAINING,
        with_custom_generate=True,
    )
    files = hub.files("someone/head")
    assert {"specheads/results.json", "custom_generate/generate.py"} <= set(files)
    assert files["README.md"] == (tmp_path / "README.md").read_bytes()
    assert "custom_generate" in ModelCard(files["README.md"].decode()).data.tags
    assert hub.repositories["someone/head"].private
    front = files["README.md"].decode().split("---")[1]
    assert yaml.safe_load(front)["tags"][-2:] == ["mine", "custom_generate"]


def test_a_head_of_another_kind_has_a_card_too() -> None:
    class OwnConfig(HeadConfig):
        model_type = "own"

    class OwnHead(DraftHead):
        config_class = OwnConfig

        def __init__(self, config: OwnConfig):
            super().__init__(config)
            self.layer = torch.nn.Linear(2, 2)
            self.post_init()

    made = make_card(OwnHead(OwnConfig(base_model={"name_or_path": "someone/model"})), repo_id="someone/own")
    assert "Draft head for someone/model" in made.text and "No engine is known" in made.text
    assert "## Literature" not in made.text and made.data.tags == ["speculative-decoding", "draft-model"]


def test_a_recipe_that_is_there_stays_and_is_told_of(head: EagleHead, tmp_path: Path, hub: Hub) -> None:
    for more in ({"with_custom_generate": True}, {}):
        head.save_pretrained(tmp_path, **more)
        head.push_to_hub("someone/head", token="secret", **more)
        for text in ((tmp_path / "README.md").read_text(), hub.files("someone/head")["README.md"].decode()):
            assert "custom_generate=" in text and "custom_generate" in ModelCard(text).data.tags
        assert (tmp_path / "custom_generate" / "generate.py").exists()
        assert "custom_generate/generate.py" in hub.files("someone/head")
