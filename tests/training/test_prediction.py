"""What evaluation works out is what `generate` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset

from specheads.training import DraftTraining, Teacher
from specheads.training.arguments import HeadArguments, HeadTrainingArguments
from specheads.training.data import Collator
from specheads.training.trainer import HeadTrainer
from specheads.training.warm_start import make_head
from tests.tiny import tiny

from .templates import tokenizer_for

PROMPT, TEXTS, NEW = 4, 64, 32


def _written(target: Any, temperature: float) -> Dataset:
    """Texts that the target wrote, from random prompts."""
    prompts = torch.randint(3, 32, (TEXTS, PROMPT))
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    ids = target.generate(prompts, max_new_tokens=NEW, min_new_tokens=NEW, eos_token_id=None, **sampled)
    mask = torch.arange(ids.shape[1]) >= PROMPT
    return Dataset.from_dict({"input_ids": ids.tolist(), "loss_mask": mask.expand(TEXTS, -1).tolist()})


@pytest.mark.parametrize(
    ("head", "temperature", "verification"),
    [("eagle3", 1.0, "block"), ("eagle3", 1.0, "token"), ("medusa", 0.7, "block"), ("eagle1", 0.0, "block")],
)
def test_predicted_length_is_that_of_generate(head: str, temperature: float, verification: str, tmp_path: Any) -> None:
    # No text ends by itself: where one ends within a draft, what `generate` reports is cut with it.
    target = tiny("llama", spread=0.5).float().requires_grad_(False)
    target.generation_config.eos_token_id = None
    texts = _written(target, temperature)
    args = HeadTrainingArguments(
        output_dir=str(tmp_path), depth=3, max_steps=40, learning_rate=1e-2, per_device_train_batch_size=16, save_strategy="no",
        temperature=temperature, verification=verification, generate_tokens=NEW, use_cpu=True, disable_tqdm=True,
        eval_strategy="no", per_device_eval_batch_size=48, seed=1, report_to="none", logging_steps=40,
    )  # fmt: skip
    made = make_head(HeadArguments("", head=head, num_heads=3), target, tokenizer_for("chatml"), None, 3)
    drafts = DraftTraining(made, Teacher(target, made.config.feature_layers), args.settings)
    prompts = [ids[:PROMPT] for ids in texts["input_ids"]]
    trainer = HeadTrainer(drafts, args, texts, Collator(0), texts, prompts=prompts)
    trainer.train()
    found = trainer.evaluate()
    # The drafts are of some use, or the figures would agree trivially.
    assert found["eval_mean_acceptance_length"] > 1.15
    assert trainer.measured is not None
    if temperature == 0:  # nothing is left to chance
        assert found["eval_generate_mean_acceptance_length"] == pytest.approx(found["eval_mean_acceptance_length"], rel=1e-9)
    generated = trainer.measured.generated_length()
    worked_out = trainer.measured.evaluation.sums["deployed"].interval()
    assert generated.low is not None and generated.high is not None
    assert generated.low <= worked_out.high and worked_out.low <= generated.high
    assert found["eval_generate_mean_acceptance_length"] == pytest.approx(found["eval_mean_acceptance_length"], rel=0.05)
    first = found["eval_generate_acceptance_at_position_1"]
    assert first == pytest.approx(found["eval_acceptance_at_position_1"], abs=0.04)
