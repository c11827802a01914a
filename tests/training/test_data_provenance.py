"""What travels with generated data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled

from specheads.evaluation.prompts import InputError
from specheads.training.data_provenance import describe_data, provenance_of, template_arguments, warn_of_other_writers


def folder(path: Path, name: str, **content: Any) -> str:
    (path / name / "data").mkdir(parents=True)
    (path / name / "data" / "train.jsonl").touch()
    (path / name / "provenance.json").write_text(json.dumps(content), encoding="utf-8")
    return str(path / name)


def test_datasets_of_different_templates_are_refused(tmp_path: Path) -> None:
    thinking = folder(tmp_path, "a", template_arguments={"enable_thinking": True})
    other = folder(tmp_path, "b", template_arguments={"enable_thinking": False})
    unknown = tmp_path / "c.jsonl"
    unknown.touch()
    assert template_arguments([str(unknown), thinking]) == {"enable_thinking": True}
    assert template_arguments([str(unknown)], {"enable_thinking": True}) == {"enable_thinking": True}
    with pytest.raises(InputError, match=rf"{other} was written under .*False.*, not .*True"):
        template_arguments([thinking, other])


def test_data_of_another_target_is_warned_of(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    source = folder(tmp_path, "a", target={"name_or_path": "theirs", "weights_fingerprint": "123"})
    warn_of_other_writers([source], {"name_or_path": "ours", "weights_fingerprint": "123"})
    warn_of_other_writers([source], {"name_or_path": "ours", "weights_fingerprint": None})
    assert not recwarn
    with pytest.warns(UserWarning, match=r"written by theirs \(weights 123\), and the head is for ours \(weights 456\)"):
        warn_of_other_writers([source], {"name_or_path": "ours", "weights_fingerprint": "456"})


def test_a_dataset_on_the_hub_has_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"template_arguments": {"enable_thinking": False}, "seed": 3, "shards": 1}
    file = Path(folder(tmp_path, "a", **content)) / "provenance.json"
    asked = []

    def download(repo: str, name: str, **options: Any) -> str:
        asked.append((repo, name, options["repo_type"], options["revision"]))
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert provenance_of("someone/answers", revision="v1") == content
    assert asked == [("someone/answers", "provenance.json", "dataset", "v1")]
    assert describe_data(["someone/answers"], {"enable_thinking": False}) == {
        "template_arguments": {"enable_thinking": False},
        "datasets": [{"source": "someone/answers", "seed": 3}],
    }


@pytest.mark.parametrize("error", [EntryNotFoundError("none"), OfflineModeIsEnabled("offline")], ids=["none", "offline"])
def test_a_dataset_on_the_hub_may_have_none(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert provenance_of("someone/answers") is None
    assert describe_data(["someone/answers"], {})["datasets"] == [{"source": "someone/answers"}]
