"""Length-aware weights give the gradient of the expected accepted length; and the plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specheads.training import DepthWeights, DraftTraining, Objective, TrainingBatch

from ..tiny import tiny
from .tools import batch_of, new_head, random_texts, training_of


def test_weights_by_hand() -> None:
    acceptance = torch.tensor([[0.5, 0.4, 0.2], [0.9, 0.0, 0.0]])
    trained = torch.tensor([[True, True, True], [True, False, False]])
    expected = torch.tensor([[0.5 + 0.2 + 0.04, 0.2 + 0.04, 0.04], [0.9, 0.0, 0.0]])
    torch.testing.assert_close(DepthWeights.parse({"length_aware": 0})(acceptance, trained), expected)
    smoothed = DepthWeights.parse("length_aware")(acceptance, trained)
    torch.testing.assert_close(smoothed[0, 2], torch.tensor(0.75 * 0.7 * 0.6))
    assert float(smoothed[1, 0]) == pytest.approx(0.95)  # what is not trained is not smoothed into being
    geometric = DepthWeights.parse({"geometric": 0.5})(acceptance, trained)
    torch.testing.assert_close(geometric, torch.tensor([[1, 0.5, 0.25]]).expand(2, 3))


class Recorded:
    """Weights that note the expected accepted length Σ_m Π_{j ≤ m} α_j of all roots."""

    def __init__(self) -> None:
        self.length = 0.0

    def __call__(self, acceptance: Tensor, trained: Tensor) -> Tensor:
        self.length += float((acceptance * trained).cumprod(dim=1).sum())
        return DepthWeights("length_aware", 0.0)(acceptance, trained)


@torch.no_grad()
def expected_length(training: DraftTraining, recorded: Recorded, batch: TrainingBatch) -> float:
    recorded.length = 0.0
    training(batch)
    return recorded.length


@pytest.mark.usefixtures("_double_norms")
@pytest.mark.parametrize("name", ["medusa, markov", "medusa, own vocabulary", "eagle 3", "eagle 1"])
def test_the_gradient_is_that_of_the_expected_length(name: str) -> None:
    target = tiny("llama", spread=0.15)
    head, recorded = new_head(target, name), Recorded()
    objective = Objective.parse("negative_log_acceptance")
    training = training_of(head, target, objective=objective, weights=recorded)
    batch = batch_of(*random_texts(3))
    training(batch).loss_sum.backward()
    generator = torch.Generator().manual_seed(3)
    for parameter in head.parameters():
        if not parameter.requires_grad:
            continue
        direction = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        step, lengths = 1e-6, []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * step * direction
                lengths.append(expected_length(training, recorded, batch))
                parameter -= sign * step * direction
        assert parameter.grad is not None
        slope = float((parameter.grad * direction).sum())
        assert -slope == pytest.approx((lengths[0] - lengths[1]) / (2 * step), rel=1e-4, abs=1e-5)


def test_smoothing_would_be_another_gradient() -> None:
    acceptance, trained = torch.tensor([[0.5, 0.4]]), torch.ones(1, 2, dtype=torch.bool)
    exact = DepthWeights.parse({"length_aware": 0})(acceptance, trained)
    assert not torch.allclose(DepthWeights.parse({"length_aware": 0.1})(acceptance, trained), exact)


@pytest.mark.parametrize("wanted", ["uniform", {"geometric": 1.5}, {"geometric": 0.8, "length_aware": 0.5}])
def test_what_are_no_weights_is_refused(wanted: object) -> None:
    with pytest.raises(ValueError, match=r"depth weights|Depth weights"):
        DepthWeights.parse(wanted)  # type: ignore[arg-type]
