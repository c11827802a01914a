"""Muon beside AdamW: each weight goes to the right one, and both do what they do alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon

from specheads.heads import DraftHead
from specheads.training.muon import MuonWithAdamW, by_kind
from tests.tiny import tiny

from .tools import new_head

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


@pytest.fixture(params=["eagle 3, own vocabulary", "medusa, markov"])
def head(request: pytest.FixtureRequest) -> DraftHead:
    return new_head(tiny("llama", vocab_size=48, hidden_size=32), request.param)


def _give_gradients(head: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for weight in head.parameters():
        weight.grad = torch.randn_like(weight)


def test_all_weights_have_a_place_and_tables_are_not_for_muon(head: DraftHead) -> None:
    matrices, tables, vectors = by_kind(head)
    trained = [weight for weight in head.parameters() if weight.requires_grad]
    assert {id(weight) for weight in (*matrices, *tables, *vectors)} == {id(weight) for weight in trained}
    assert len(matrices) + len(tables) + len(vectors) == len(trained) and matrices
    assert not {weight.shape[0] for weight in matrices} & {head.config.own_vocab_size, head.config.vocab_size}


def test_each_part_steps_as_it_does_alone(head: DraftHead) -> None:
    both, muon, adamw = head, copy.deepcopy(head), copy.deepcopy(head)
    ours = MuonWithAdamW(both, 0.02, 0.1, SETTINGS)
    matrices, (_, tables, vectors) = by_kind(muon)[0], by_kind(adamw)
    theirs = [
        Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        *(AdamW(group, weight_decay=decay, **SETTINGS) for group, decay in ((tables, 0.1), (vectors, 0.0)) if group),
    ]
    for seed in range(3):
        for each in (both, muon, adamw):
            _give_gradients(each, seed)
        for optimiser in (ours, *theirs):
            optimiser.step()
    for kind, alone in enumerate((muon, adamw, adamw)):
        for stepped, expected in zip(by_kind(both)[kind], by_kind(alone)[kind], strict=True):
            assert torch.equal(stepped, expected)


def test_learning_rate_of_a_schedule_reaches_both(head: DraftHead) -> None:
    optimiser, before = MuonWithAdamW(head, 0.02, 0.0, SETTINGS), copy.deepcopy(head)
    torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 0.0)
    _give_gradients(head, 0)
    optimiser.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(head.parameters(), before.parameters(), strict=True))
