"""The loss and its gradients depend on the texts alone: not on padding, packing, splitting or chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.heads import DraftHead
from specheads.training import DepthWeights, DraftTraining, TrainingBatch, count_trained
from specheads.training.batch import Roots
from specheads.training.metrics import TrainingSums
from specheads.training.on_policy import RoundStarts

from ..tiny import tiny
from .tools import DEPTH, batch_of, confidence, new_head, packed, random_texts, training_of

TEXTS, PROMPTS = random_texts(4)


def step(training: DraftTraining, batches: Sequence[TrainingBatch]) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of all weights, divided by the number of trained tokens of all batches together."""
    trained = sum(int(count_trained(batch)) for batch in batches)
    training.zero_grad()
    total = torch.zeros((), dtype=torch.double)
    for batch in batches:
        output = training(batch)
        assert output.trained == int(count_trained(batch))
        (output.loss_sum / trained).backward()
        total += output.loss_sum.detach() / trained
    return total, [own.grad.clone() for own in training.head.parameters() if own.grad is not None]


def assert_same(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> None:
    assert len(one[1]) == len(other[1]) > 0
    for value, again in zip([one[0], *one[1]], [other[0], *other[1]], strict=True):
        torch.testing.assert_close(value, again, rtol=1e-6, atol=1e-9)


def halves() -> list[TrainingBatch]:
    return [batch_of(TEXTS[:1], PROMPTS[:1]), batch_of(TEXTS[1:], PROMPTS[1:])]


BATCHES = {
    "padding on the right": lambda: [batch_of(TEXTS, PROMPTS, width=24)],
    "padding on the left": lambda: [batch_of(TEXTS, PROMPTS, width=20, left=True)],
    "two batches": halves,
    "one row": lambda: [packed(TEXTS, PROMPTS, padding=3)],
    "the other order": lambda: [batch_of(TEXTS[::-1], PROMPTS[::-1])],
}


@pytest.mark.parametrize("name", ["eagle 1", "eagle 3, own vocabulary", "medusa, markov"])
@pytest.mark.parametrize("arranged", BATCHES)
def test_arrangements_of_the_same_texts(arranged: str, name: str) -> None:
    target = tiny("llama", spread=0.15)
    training = training_of(new_head(target, name, confidence=True), target, on_policy=0.4)
    assert_same(step(training, [batch_of(TEXTS, PROMPTS)]), step(training, BATCHES[arranged]()))


def test_a_loss_divided_batch_by_batch_would_depend_on_the_split() -> None:
    target = tiny("llama", spread=0.15)
    training = training_of(new_head(target, "medusa"), target)
    whole = step(training, [batch_of(TEXTS, PROMPTS)])[0]
    means = [step(training, [half])[0] for half in halves()]
    assert abs(float(sum(means)) / 2 - float(whole)) > 1e-3


@pytest.mark.parametrize("name", ["eagle 1", "eagle 3, own vocabulary", "medusa, hydra"])
@pytest.mark.parametrize("chunk_roots", [1, 5])
def test_chunks(chunk_roots: int, name: str) -> None:
    target = tiny("llama", spread=0.15)
    head = new_head(target, name, confidence=True)
    batch = [batch_of(TEXTS, PROMPTS)]
    whole = training_of(head, target, on_policy=0.4, chunk_roots=1000)
    assert_same(step(whole, batch), step(training_of(head, target, on_policy=0.4, chunk_roots=chunk_roots), batch))


def plain_loss(training: DraftTraining, batch: TrainingBatch) -> Tensor:
    """The same loss with nothing in chunks: torch's own gradients of everything at once."""
    plan = training._plan(batch)
    everything = slice(0, len(plan.roots))
    starts, sums = RoundStarts(batch.input_ids.shape[1]), TrainingSums.empty(DEPTH)
    return training._chunk_loss(plan, everything, plan.drafts.states, starts, sums)


@pytest.mark.usefixtures("_double_norms")
@pytest.mark.parametrize("name", ["eagle 1", "eagle 3, two layers", "medusa, hydra"])
def test_chunked_gradients_are_those_of_torch(name: str) -> None:
    target = tiny("llama", spread=0.15)
    training = training_of(new_head(target, name, confidence=True), target, chunk_roots=4)
    batch = batch_of(TEXTS, PROMPTS)
    training(batch).loss_sum.mul(3).backward()
    own = [parameter.grad for parameter in training.head.parameters() if parameter.requires_grad]
    training.zero_grad()
    plain_loss(training, batch).mul(3).backward()
    theirs = [parameter.grad for parameter in training.head.parameters() if parameter.requires_grad]
    for one, other in zip(own, theirs, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["eagle 3", "medusa"])
def test_tokens_that_are_not_trained_have_no_gradient(name: str) -> None:
    """Another reply to come, and padding, change nothing."""
    target = tiny("llama", spread=0.15)
    training = training_of(new_head(target, name), target)
    batch, other = batch_of(TEXTS, PROMPTS, width=20), batch_of(TEXTS, PROMPTS, width=20)
    batch.loss_mask[0] = other.loss_mask[0] = torch.arange(20) == 4
    other.input_ids[0, 5:] = 7
    other.input_ids[1, len(TEXTS[1]) :] = 9
    assert_same(step(training, [batch]), step(training, [other]))
    other.input_ids[0, 3] = (batch.input_ids[0, 3] + 1) % 32
    with pytest.raises(AssertionError):
        assert_same(step(training, [batch]), step(training, [other]))  # the prompt matters


def test_which_roots_there_are() -> None:
    batch = batch_of([[3] * 8, [4] * 8], [3, 0])
    batch.loss_mask[0, 5] = False  # a word of the user's between two replies
    roots = Roots.of(batch, 3)
    found = list(zip(roots.rows.tolist(), roots.places.tolist(), roots.depths.tolist(), roots.deployed.tolist(), strict=True))
    assert found == [
        (0, 2, 2, False), (0, 3, 1, True), (0, 5, 2, False), (0, 6, 1, True),
        (1, 1, 3, True), (1, 2, 3, True), (1, 3, 3, True), (1, 4, 3, True), (1, 5, 2, True), (1, 6, 1, True),
    ]  # fmt: skip


def test_texts_in_one_row_have_the_roots_of_their_own() -> None:
    own, together = Roots.of(batch_of(TEXTS, PROMPTS), 3), Roots.of(packed(TEXTS, PROMPTS), 3)
    assert own.depths.tolist() == together.depths.tolist()


def test_nothing_to_train() -> None:
    target = tiny("llama")
    training = training_of(new_head(target, "eagle 3"), target)
    batch = batch_of(TEXTS, PROMPTS)
    batch.loss_mask[:] = False
    output = training(batch)
    output.loss_sum.backward()
    assert output.trained == 0 and output.loss_sum.item() == 0
    assert all(not parameter.grad.any() for parameter in training.head.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("name", ["eagle 3", "medusa"])
def test_confidence_learns_acceptance_and_leaves_the_drafts_alone(name: str) -> None:
    target = tiny("llama", spread=0.15)
    plain, confident = (new_head(target, name, confidence=own) for own in (False, True))
    confident.load_state_dict(plain.state_dict(), strict=False)
    batch = batch_of(TEXTS, PROMPTS)

    def gradients(head: DraftHead) -> dict[str, Any]:
        training_of(head, target)(batch).loss_sum.backward()
        return {name: parameter.grad for name, parameter in head.named_parameters()}

    without, with_it = gradients(plain), gradients(confident)
    for own in without:
        torch.testing.assert_close(without[own], with_it[own])
    training = training_of(confident, target)
    weights = list(confident.confidence_head.parameters())
    torch.nn.init.constant_(weights[1], 3.0)  # it is too sure
    assert min(confidence(training, batch)) > 0.8
    optimiser = torch.optim.Adam(weights, lr=0.3)
    for _ in range(80):
        training.zero_grad()
        training(batch).loss_sum.backward()
        optimiser.step()
    assert confidence(training, batch) == pytest.approx(training(batch).sums.acceptance, abs=0.05)


def test_the_head_may_be_made_to_learn_confidence_too() -> None:
    target = tiny("llama", spread=0.15)
    head = new_head(target, "eagle 3", confidence=True)
    head.confidence_head.trains_trunk = True
    training = training_of(head, target, weights=DepthWeights("geometric", 1.0))
    batch = batch_of(TEXTS, PROMPTS)
    both = step(training, [batch])
    head.confidence_head.trains_trunk = False
    with pytest.raises(AssertionError):
        assert_same(both, step(training, [batch]))
