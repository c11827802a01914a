"""Where rounds start, against the rounds themselves, walked through one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specheads.training import DepthWeights, TrainingBatch
from specheads.training.batch import Roots
from specheads.training.on_policy import RoundStarts

from ..tiny import tiny
from .tools import DEPTH, batch_of, new_head, packed, random_texts, training_of


def walked(depths: list[int], reached: list[list[float]]) -> list[float]:
    """How likely a round starts at each root of one reply: all ways through it, one after another."""
    chances = [0.0] * len(depths)

    def go(root: int, chance: float) -> None:
        if root >= len(depths):
            return
        chances[root] += chance
        accepted = [1.0, *reached[root][: depths[root]], 0.0]
        for count in range(depths[root] + 1):
            go(root + count + 1, chance * (accepted[count] - accepted[count + 1]))

    go(0, 1.0)
    return chances


def some_reached(count: int) -> Tensor:
    return torch.rand(count, DEPTH, generator=torch.Generator().manual_seed(5), dtype=torch.double).cumprod(dim=1)


@pytest.mark.parametrize("pieces", [[100], [1] * 40, [3, 2, 7, 100]])
def test_chances_are_those_of_walking(pieces: list[int]) -> None:
    texts, prompts = random_texts(3)
    batch = packed(texts, prompts)
    batch.loss_mask[0, prompts[0] + 3] = False  # a word of the user's
    roots = Roots.of(batch, DEPTH)
    reached = some_reached(len(roots))
    starts, found, begun, first = RoundStarts(batch.input_ids.shape[1]), [], [], 0
    for size in pieces:
        piece = slice(first, min(first + size, len(roots)))
        found += starts.at(roots.only(torch.arange(len(roots))[piece]), reached[piece]).tolist()
        begun += starts.begun
        first += size
    expected: list[float] = []
    replies = [place for place, begins in enumerate(begun) if begins]
    assert len(replies) == 4
    for root in range(len(roots)):
        if not bool(roots.deployed[root]):
            expected.append(0.0)
        elif begun[root]:
            end = next(
                (r for r in range(root, len(roots)) if r > root and (begun[r] or not bool(roots.deployed[r]))), len(roots)
            )
            expected += walked(roots.depths[root:end].tolist(), reached[root:end].tolist())
    assert found == pytest.approx(expected)


def test_what_is_never_accepted_starts_everywhere_and_what_is_always_accepted_seldom() -> None:
    batch = batch_of([[3] * 14], [2])
    roots = Roots.of(batch, DEPTH)
    nothing = RoundStarts(14).at(roots, torch.zeros(len(roots), DEPTH))
    assert nothing.tolist() == [0.0, *[1.0] * 11]  # the first root is the prompt's
    everything = RoundStarts(14).at(roots, torch.ones(len(roots), DEPTH))
    assert everything.tolist() == [0.0, *[1.0, 0, 0, 0] * 2, 1.0, 0, 0]


def test_rounds_weigh_roots() -> None:
    """A root counts as it is drafted from; with `on_policy=0` all count alike."""
    target = tiny("llama", spread=0.15)
    head = new_head(target, "medusa")
    batch = batch_of(*random_texts(3))
    equal, weighed, half = (
        training_of(head, target, weights=DepthWeights("geometric", 1.0), on_policy=share)(batch) for share in (0.0, 1.0, 0.5)
    )
    both = float(equal.loss_sum.detach() + weighed.loss_sum.detach())
    assert float(weighed.loss_sum.detach()) < 0.95 * float(equal.loss_sum.detach())
    assert float(half.loss_sum.detach()) == pytest.approx(both / 2)
    assert equal.trained == weighed.trained


def test_roots_that_no_round_starts_from_have_no_gradient() -> None:
    target = tiny("llama", spread=0.15)
    head = new_head(target, "medusa")
    training = training_of(head, target, on_policy=1.0)
    text = random_texts(1)[0][0]
    batch = TrainingBatch(**{**vars(batch_of([text], [len(text) - 1]))})
    training(batch).loss_sum.backward()  # the only root is the prompt's last token
    assert all(not parameter.grad.any() for parameter in head.parameters() if parameter.grad is not None)
