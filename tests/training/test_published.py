from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import specheads
from specheads.heads.results import load_records
from tests.hub import Hub

from .runs import flags, run, write_chats

HELD = ["eval_examples", "6", "eval_task_column", "kind", "generate_prompts", "3", "generate_tokens", "8"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats of two kinds."""
    file = write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 30)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kinds = [{**row, "kind": "code" if place % 2 else "talk"} for place, row in enumerate(rows)]
    file.write_text("\n".join(map(json.dumps, kinds)) + "\n")
    return file


def test_card_tells_of_the_run_and_its_tasks(target_folder: Path, chats: Path, tmp_path: Path) -> None:
    more = ["max_steps", "6", "eval_strategy", "steps", "eval_steps", "2", *HELD]
    trainer = run(flags(target_folder, chats, tmp_path / "out", *more))
    results, training = load_records(tmp_path / "out")
    assert results is not None and [task.task for task in results.tasks] == ["code", "talk"]
    assert all(len(task.acceptance_at_position) == 3 for task in results.tasks)
    assert training is not None and training.datasets == ["chats.jsonl"] and len(training.data_fingerprint or "") == 32
    assert training.arguments["depth"] == 3 and training.arguments["max_steps"] == 6
    assert [point["step"] for point in training.curve] == [2, 4, 6]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["training_data"] == {"template_arguments": {}, "datasets": [{"source": "chats.jsonl"}]}
    card = (tmp_path / "out" / "README.md").read_text()
    evaluated = [entry for entry in trainer.state.log_history if "eval_mean_acceptance_length" in entry]
    assert f"{evaluated[-1]['eval_mean_acceptance_length']:.3f}" in card and "| talk |" in card
    assert not any(path.suffix in (".bin", ".pt", ".pth", ".pkl") for path in (tmp_path / "out").rglob("*"))


@pytest.mark.parametrize(("strategy", "commits"), [("end", 1), ("every_save", 3), ("checkpoint", 5)])
def test_push_takes_config_weights_and_card_and_no_pickle(
    strategy: str, commits: int, hub: Hub, target_folder: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A user's command line, which the card repeats.
    monkeypatch.setattr(sys, "argv", ["heads.py", "--hub-token", "secret", "--hub_token=secret", "--depth", "3"])
    more = ["max_steps", "4", "save_strategy", "steps", "save_steps", "2", "push_to_hub", "true", *HELD]
    more += ["hub_model_id", "someone/head", "hub_token", "secret", "hub_strategy", strategy]
    run(flags(target_folder, chats, tmp_path / "out", *more))
    files = hub.files("someone/head")
    assert {"config.json", "model.safetensors", "README.md", "specheads/results.json"} <= files.keys()
    # But where checkpoints were asked for: those hold an optimiser's state.
    pickles = {name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl"))}
    assert bool(pickles) == (strategy == "checkpoint") and all(name.startswith("last-checkpoint/") for name in pickles)
    assert b"| talk |" in files["README.md"] and b"secret" not in b"".join(files.values())
    assert b"--depth 3" in files["README.md"]
    assert len(hub.asked("commit")) == commits
    model: Any = AutoModelForCausalLM.from_pretrained(target_folder)
    specheads.enable(model, drafter="someone/head")


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_trackers_get_acceptance_by_position(
    tracker: str, target_folder: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(tracker)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    more = ["max_steps", "2", "report_to", tracker, "eval_strategy", "steps", "eval_steps", "2", *HELD]
    run(flags(target_folder, chats, tmp_path / "out", *more))
    names = _wandb_names() if tracker == "wandb" else _tensorboard_names(tmp_path / "tensorboard")
    for place in (1, 2, 3):
        assert {f"train/acceptance_{place}", f"eval/acceptance_at_position_{place}"} <= names


def _wandb_names() -> set[str]:
    import wandb

    assert wandb.run is not None and wandb.run.settings.mode == "offline"
    names = set(wandb.run.summary.keys())
    wandb.finish()
    return names


def _tensorboard_names(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(folder.rglob("events.*")).parent))
    events.Reload()
    return set(events.Tags()["scalars"])
