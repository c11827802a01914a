"""Eight texts are learnt by heart: drafts are accepted at every depth, for every kind of head and every loss used alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specheads.heads import DraftHead
from specheads.training import (
    Deployment,
    DepthWeights,
    DraftTraining,
    Evaluation,
    Objective,
    Sampling,
    Teacher,
    TrainingBatch,
)
from specheads.training.losses import FOR_TRAINED_HEADS, LOSSES, ONLY_MIXED

from ..tiny import tiny
from .tools import DEPTH, HEADS, batch_of, new_head, training_of

VOCAB, PROMPT, LEARNING_RATE = 16, 3, 1.5e-2
# Heads with layers take longer.
STEPS = {name: 300 if name.startswith("eagle") else 200 for name in HEADS}
VARIANTS = ("eagle 1, normalised pairs", "eagle 3, two layers")  # they learn as their kinds do, and take their time
ALONE = [name for name in LOSSES if name not in (*ONLY_MIXED, *FOR_TRAINED_HEADS, "lk_log")]


def setting(name: str, greedy: bool = False) -> tuple[Any, DraftHead, TrainingBatch]:
    """A target that is sure of itself, eight of its texts, and a fresh head."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
    target = tiny("llama", VOCAB, spread=0.2, eos_token_id=None, **sizes).float()
    with torch.no_grad():
        target.lm_head.weight.mul_(3)
    prompts = torch.randint(3, VOCAB, (8, PROMPT), generator=torch.Generator().manual_seed(2))
    arguments: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    ids = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=7, pad_token_id=0, **arguments)
    fields: dict[str, Any] = {"num_hidden_layers": 2} if name.startswith("medusa") and "hydra" not in name else {}
    if "own vocabulary" in name:
        with torch.no_grad():  # nearly all that the target says on these texts
            fields["draft_tokens"] = (
                target(ids).logits[:, PROMPT - 1 :].softmax(-1).amax((0, 1)).topk(VOCAB - 1).indices.tolist()
            )
    head = new_head(target, name, spread=None, **fields)
    batch = batch_of(ids.tolist(), [PROMPT] * 8)
    states = Teacher(target, head.config.feature_layers)(batch)
    batch.features, batch.last_hidden = states.features, states.last_hidden  # so that the target runs once
    return target, head, batch


def train(
    target: Any, head: DraftHead, batch: TrainingBatch, loss: Any, steps: int, rate: float = LEARNING_RATE
) -> DraftTraining:
    training = training_of(head, target, objective=Objective.parse(loss), weights=DepthWeights("geometric", 1.0))
    optimiser = torch.optim.Adam(training.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        output = training(batch)
        (output.loss_sum / output.trained).backward()
        optimiser.step()
        schedule.step()
    return training


def accepted(training: DraftTraining, batch: TrainingBatch, deployment: Deployment) -> list[float]:
    evaluation = Evaluation(DEPTH, {"": deployment})
    training.evaluate(batch, evaluation)
    return evaluation.sums[""].conditional_acceptance


@pytest.mark.parametrize("name", [name for name in HEADS if name not in VARIANTS])
def test_every_head_learns_with_the_default_loss(name: str) -> None:
    target, head, batch = setting(name)
    training = train(target, head, batch, "lk_log", STEPS[name])
    assert min(accepted(training, batch, Deployment(verification="token"))) > 0.95


@pytest.mark.parametrize("loss", ALONE)
def test_every_loss_used_alone_teaches(loss: str) -> None:
    # One token is all that cross entropy sees of a law: it is for greedy drafts of greedy text.
    greedy = loss == "cross_entropy"
    target, head, batch = setting("medusa, hydra", greedy)
    training = train(target, head, batch, loss, STEPS["medusa, hydra"])
    deployment = Deployment(Sampling(temperature=0)) if greedy else Deployment(verification="token")
    assert min(accepted(training, batch, deployment)) > 0.95


@pytest.mark.parametrize("loss", FOR_TRAINED_HEADS)
def test_losses_for_trained_heads_go_on_from_there(loss: str) -> None:
    target, head, batch = setting("medusa, hydra")
    before = accepted(train(target, head, batch, "forward_kl", 40), batch, Deployment(verification="token"))
    after = accepted(train(target, head, batch, loss, 60, 1e-3), batch, Deployment(verification="token"))
    assert min(after) > max(0.95, min(before) + 0.01)


def test_a_loss_for_trained_heads_does_not_teach_a_fresh_one() -> None:
    target, head, batch = setting("medusa, hydra")
    assert Objective.parse("total_variation").is_for_trained_heads
    assert not Objective.parse("dspark").is_for_trained_heads
    training = train(target, head, batch, "total_variation", 40)
    assert min(accepted(training, batch, Deployment(verification="token"))) < 0.9
