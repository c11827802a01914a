from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import specheads
from specheads.adapters import NAME, WEIGHTS
from specheads.heads.provenance import weights_fingerprint
from specheads.training.medusa2 import AdaptedTeacher
from tests.hub import Hub

from .runs import flags, losses, run, write_chats

LORA = ["head", "medusa", "num_heads", "3", "lora_rank", "4", "lora_learning_rate", "5e-3", "learning_rate", "1e-2"]
SAVING = ["save_strategy", "steps", "save_steps", "4", "max_steps", "12", "heads_alone", "0.5"]


@pytest.fixture(scope="module")
def trained(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("medusa2")
    chats = write_chats(folder / "chats.jsonl")
    return folder, run(flags(target_folder, chats, folder / "out", *LORA, *SAVING)), chats


def _model(target_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float)


def test_heads_come_first_and_then_the_adapter_too(trained: Any) -> None:
    folder, _, _ = trained
    early, late = (load_file(folder / "out" / f"checkpoint-{step}" / WEIGHTS) for step in (8, 12))
    assert {name: weight.shape for name, weight in early.items()} == {name: weight.shape for name, weight in late.items()}
    assert all(not torch.equal(early[name], weight) for name, weight in late.items() if "lora_B" in name)


def test_first_stage_leaves_the_target_as_it_is(target_folder: Path, trained: Any, tmp_path: Path) -> None:
    alone = ["save_strategy", "no", "max_steps", "3", "heads_alone", "1.0"]
    run(flags(target_folder, trained[2], tmp_path, *LORA, *alone))
    weights = load_file(tmp_path / WEIGHTS)
    assert weights and all(not weight.any() for name, weight in weights.items() if "lora_B" in name)


def test_enable_loads_both_and_says_so_and_disable_undoes_it(target_folder: Path, trained: Any) -> None:
    folder, trainer, _ = trained
    model = _model(target_folder)
    ids = torch.tensor([[5, 6, 7, 8]])
    plain, before = model(ids).logits, weights_fingerprint(model)
    with pytest.warns(UserWarning, match="that of the adapted model"):
        specheads.enable(model, drafter=str(folder / "out"), adaptive=False)
    adapted = model(ids).logits
    torch.testing.assert_close(adapted, trainer.drafts.teacher.target(ids).logits)
    assert (adapted - plain).abs().max() > 1e-3
    greedy = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, speculative=True, **greedy), model.generate(ids, **greedy))
    specheads.disable(model)
    assert torch.equal(model(ids).logits, plain) and weights_fingerprint(model) == before
    assert NAME not in getattr(model, "peft_config", {})


def test_adapter_is_held_to_the_target(target_folder: Path, trained: Any, tmp_path: Path) -> None:
    """The more self-distillation weighs, the closer the adapted law stays."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    plain = _model(target_folder)(ids).logits.log_softmax(-1)

    def distance(weight: str) -> float:
        more = ["save_strategy", "no", "max_steps", "8", "heads_alone", "0.0", "self_distillation", weight]
        trainer = run(flags(target_folder, trained[2], tmp_path / weight, *LORA, *more))
        own = trainer.drafts.teacher.target(ids).logits.log_softmax(-1)
        return float(torch.nn.functional.kl_div(own, plain, log_target=True, reduction="batchmean"))

    assert distance("100.0") < distance("0.0") / 2


def test_resumed_as_if_it_had_not_ended(target_folder: Path, trained: Any, tmp_path: Path) -> None:
    folder, unbroken, chats = trained
    copied = copy.copy(folder / "out" / "checkpoint-8")
    resumed = run([*flags(target_folder, chats, tmp_path / "out", *LORA, *SAVING), "--resume_from_checkpoint", str(copied)])
    assert losses(tmp_path / "out") == losses(folder / "out")
    ours, theirs = resumed.drafts, unbroken.drafts
    assert isinstance(ours.teacher, AdaptedTeacher)
    assert all(torch.equal(a, b) for a, b in zip(ours.adapter, theirs.adapter, strict=True))


def test_both_come_from_the_hub(hub: Hub, target_folder: Path, trained: Any, tmp_path: Path) -> None:
    more = [
        "max_steps",
        "4",
        "heads_alone",
        "0.0",
        "push_to_hub",
        "true",
        "hub_model_id",
        "someone/medusa2",
        "hub_token",
        "secret",
    ]
    trainer = run(flags(target_folder, trained[2], tmp_path / "out", *LORA, *more))
    model, ids = _model(target_folder), torch.tensor([[5, 6, 7, 8]])
    with pytest.warns(UserWarning, match="that of the adapted model"):
        specheads.enable(model, drafter="someone/medusa2")
    torch.testing.assert_close(model(ids).logits, trainer.drafts.teacher.target(ids).logits)
