"""Every loss against its formula written out, its gradient in closed form where there is one, and what objectives refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.training.laws import DraftVocabulary, Laws, Sampling, TargetLaws
from specheads.training.losses import LOSSES, ONLY_MIXED, Objective

VOCAB, COUNT = 9, 5
KNOWN = torch.tensor([7, 1, 2, 5])


def laws(ids: Tensor | None = None, sampling: Sampling | None = None, seed: int = 0) -> tuple[Laws, Tensor, Tensor, Tensor]:
    """Random laws; also p `[N, V]`, q `[N, V]` with zeros for what the draft lacks, and the text's tokens."""
    generator = torch.Generator().manual_seed(seed)
    scores = (sampling or Sampling()).warp(2 * torch.randn(COUNT, VOCAB, generator=generator, dtype=torch.double))
    size = VOCAB if ids is None else len(ids)
    logits = 2 * torch.randn(COUNT, size, generator=generator, dtype=torch.double)
    tokens = torch.tensor([7, 1, 0, 5, 8])
    q = torch.zeros(COUNT, VOCAB, dtype=torch.double)
    q[:, torch.arange(VOCAB) if ids is None else ids] = logits.softmax(-1)
    own = Laws(logits.requires_grad_(), TargetLaws.of(scores, ids), DraftVocabulary(ids, VOCAB).index(tokens))
    return own, scores.softmax(-1), q, tokens


def kl(p: Tensor, q: Tensor) -> Tensor:
    return torch.where(p > 0, p * (p / q).log(), 0).sum(-1)


def restricted(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p as the draft can say it, its mass, and q, on the tokens that the draft knows."""
    known = (q > 0).all(0)
    mass = p[:, known].sum(-1)
    return p[:, known] / mass[:, None], mass, q[:, known]


def of_known(formula: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def weighted(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
        own, mass, q = restricted(p, q)
        return mass * formula(own, q)

    return weighted


def alpha(p: Tensor, q: Tensor) -> Tensor:
    return torch.minimum(p, q).sum(-1)


def mixed(p: Tensor, q: Tensor, tokens: Tensor, other: Callable[[Tensor], Tensor]) -> Tensor:
    share = (-3 * alpha(p, q)).exp()
    return share * FORMULAS["forward_kl"](p, q, tokens) + (1 - share) * other(alpha(p, q))


def best_ten(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    known = (q > 0).all(0)
    return -(p[:, known] * q[:, known].log()).sum(-1)  # there are fewer than ten


FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda p, q, tokens: (
        -torch.where(q.gather(1, tokens[:, None]) > 0, q.gather(1, tokens[:, None]), 1)[:, 0].log()
    ),
    "forward_kl": of_known(kl),
    "reverse_kl": of_known(lambda p, q: kl(q, p)),
    "jensen_shannon": of_known(lambda p, q: (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2),
    "total_variation": lambda p, q, tokens: (p - q).abs().sum(-1) / 2,
    "negative_log_acceptance": lambda p, q, tokens: -alpha(p, q).log(),
    "lk": lambda p, q, tokens: mixed(p, q, tokens, lambda a: 1 - a),
    "lk_log": lambda p, q, tokens: mixed(p, q, tokens, lambda a: -a.log()),
    "top_k": best_ten,
}


@pytest.mark.parametrize("ids", [None, KNOWN])
@pytest.mark.parametrize("name", FORMULAS)
def test_each_loss_is_its_formula(name: str, ids: Tensor | None) -> None:
    own, p, q, tokens = laws(ids)
    torch.testing.assert_close(LOSSES[name](own), FORMULAS[name](p, q, tokens))


def test_every_loss_is_tested() -> None:
    assert set(LOSSES) == {*FORMULAS, "feature_smooth_l1"}


@pytest.mark.parametrize("ids", [None, KNOWN])
def test_acceptance_is_counted_against_the_whole_law(ids: Tensor | None) -> None:
    own, p, q, _ = laws(ids)
    torch.testing.assert_close(own.acceptance, 1 - (p - q).abs().sum(-1) / 2)
    if ids is not None:
        again, _, q = restricted(p, q)
        assert bool((alpha(again, q) > own.acceptance + 0.01).any())  # with p made to sum to 1, it would look better


def gradient(loss: str, own: Laws) -> Tensor:
    (value,) = torch.autograd.grad(LOSSES[loss](own).sum(), own.logits, retain_graph=True)
    return value


@pytest.mark.parametrize("ids", [None, KNOWN])
def test_gradients(ids: Tensor | None) -> None:
    own, p, q, _ = laws(ids)
    known = slice(None) if ids is None else ids
    p, q = p[:, known], q[:, known]
    torch.testing.assert_close(gradient("forward_kl", own), p.sum(-1, keepdim=True) * q - p)
    below = (q < p).double()
    variation = -q * (below - (below * q).sum(-1, keepdim=True))
    torch.testing.assert_close(gradient("total_variation", own), variation)
    torch.testing.assert_close(gradient("negative_log_acceptance", own), variation / own.acceptance[:, None])


@pytest.mark.parametrize("ids", [None, KNOWN])
@pytest.mark.parametrize("name", FORMULAS)
def test_losses_stay_finite_where_the_target_excludes_tokens(name: str, ids: Tensor | None) -> None:
    own, *_ = laws(ids, Sampling(0.2, 3, 0.5))
    assert bool((own.target.probs == 0).any())
    assert bool(LOSSES[name](own).isfinite().all())
    assert bool(gradient(name, own).isfinite().all())


def test_hidden_states_are_compared() -> None:
    own, *_ = laws()
    own.states, own.target_states = torch.zeros(COUNT, 4), torch.full((COUNT, 4), 3.0)
    torch.testing.assert_close(LOSSES["feature_smooth_l1"](own), torch.full((COUNT,), 2.5))
    own.target_states = None
    with pytest.raises(ValueError, match="EAGLE versions 1"):
        LOSSES["feature_smooth_l1"](own)


def test_losses_mix_with_weights_and_settings() -> None:
    own, *_ = laws()
    mixture = Objective.parse({"forward_kl": 0.5, "lk": {"weight": 2, "eta": 10}})
    torch.testing.assert_close(mixture(own), 0.5 * LOSSES["forward_kl"](own) + 2 * LOSSES["lk"](own, eta=10))
    assert not torch.allclose(LOSSES["lk"](own, eta=10), LOSSES["lk"](own))
    torch.testing.assert_close(
        Objective.parse("dspark")(own), 0.1 * LOSSES["cross_entropy"](own) + 1.8 * LOSSES["total_variation"](own)
    )


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("kl", "Unknown loss kl; known are cross_entropy, forward_kl"),
        ({"lk": 1, "huber": 1}, "Unknown loss huber"),
        ({}, "Unknown loss"),
        ({"lk": 0}, "weight of lk must be a number above 0, got 0"),
        ({"lk": "much"}, "weight of lk must be a number above 0, got 'much'"),
        ({"lk": {"beta": 1}}, "lk takes eta, got beta"),
        ({"forward_kl": {"eta": 1}}, "forward_kl takes no arguments, got eta"),
        *[(name, "must be mixed with another loss") for name in ONLY_MIXED],
    ],
)
def test_what_is_no_objective_is_refused(wanted: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Objective.parse(wanted)


@pytest.mark.parametrize("arguments", [{"temperature": -1}, {"top_p": 0}, {"top_k": -2}])
def test_no_sampling_of_that_kind(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Sampling needs"):
        Sampling(**arguments)
