"""Pacing drafts what pays, notices what does not, and repeats itself where it must."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from specheads.config import SpeculativeConfig
from specheads.drafters.base import DraftContext
from specheads.pacing import PROBE_EVERY, Pacer, PassCost
from specheads.processors import ScoreProcessors
from specheads.sequences import Sequences

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def context(rows: int = 1, room: int = 100) -> DraftContext:
    sequences = Sequences(torch.ones(rows, 1, dtype=torch.long), StoppingCriteriaList(), room + 1, None)
    processors = ScoreProcessors(LogitsProcessorList(), sequences)
    config = SpeculativeConfig()
    return DraftContext(
        list(range(rows)), sequences, [[1]] * rows, None, None, processors, None, config, 8, CPU, True, None, False
    )


def pacer(device: torch.device = CPU, step_cost: float = 0.0, weighs: bool = False, clock: bool = False, **fields) -> Pacer:
    config = SpeculativeConfig(draft_tokens=6, **fields)
    return Pacer(config, PassCost(device, is_packed=False), step_cost, weighs, clock, most=6)


def observe(paced: Pacer, accepted: int, rounds: int, depth: int = 6) -> None:
    for _ in range(rounds):
        paced.observe([depth], [accepted], None, 0, 0.0)


def test_good_drafts_are_made_long_and_bad_ones_not_at_all() -> None:
    good, bad = pacer(), pacer()
    observe(good, 6, 20)
    observe(bad, 0, 20)
    assert good.budget(context()).depth == 6
    assert bad.budget(context()).depth == 0


def test_a_bad_drafter_is_tried_again_and_comes_back() -> None:
    paced = pacer()
    observe(paced, 0, 20)
    depths = [paced.budget(context()).depth for _ in range(2 * PROBE_EVERY)]
    assert 0 < sum(depth > 0 for depth in depths) <= 3
    observe(paced, 6, 10)
    assert paced.budget(context()).depth == 6


def test_costly_steps_make_short_drafts() -> None:
    cheap, dear = pacer(CUDA), pacer(CUDA, step_cost=0.3)
    for paced in (cheap, dear):
        observe(paced, 3, 3, depth=4)
    assert dear.budget(context()).depth < cheap.budget(context()).depth


def test_rows_are_never_drafted_past_their_end() -> None:
    assert pacer(adaptive=False).budget(context(rows=2, room=3)).depths == [2, 2]
    assert pacer(adaptive=False).budget(context(room=1)).depth == 0


def test_a_fixed_draft_is_left_alone() -> None:
    paced = pacer(adaptive=False, tree_nodes=9)
    observe(paced, 0, 30)
    budget = paced.budget(context())
    assert (budget.depth, budget.nodes, budget.entry_cost, budget.node_cost) == (6, 9, 0.0, 0.0)


def test_a_drafter_that_hopes_too_much_is_charged_more() -> None:
    honest, hopeful = pacer(weighs=True), pacer(weighs=True)
    for _ in range(10):
        honest.observe([6], [3], 3.0, 0, 0.0)
        hopeful.observe([6], [1], 5.0, 0, 0.0)
    assert hopeful.budget(context()).entry_cost > 1.5 * honest.budget(context()).entry_cost
    for _ in range(60):
        hopeful.observe([0], [0], 0.0, 0, 0.0)
    assert hopeful.budget(context()).entry_cost == pytest.approx(pacer(weighs=True).budget(context()).entry_cost, rel=0.05)


def test_measured_costs_are_believed_only_where_the_clock_may_count() -> None:
    for clock in (False, True):
        paced = pacer(weighs=True, clock=clock)
        before = paced.budget(context()).entry_cost
        seconds = 0.0
        for _ in range(20):
            for tokens, duration in ((1, 0.1), (7, 0.1)):  # a pass over seven costs what one over a single token costs
                seconds += duration
                paced.observe([0], [0], None, tokens, seconds)
        after = paced.budget(context()).entry_cost
        assert (after < 0.5 * before) == clock


def test_an_interrupted_pass_counts_for_little() -> None:
    cost = PassCost(CPU, is_packed=False)
    for seconds in (0.1, 0.1, 0.1, 50.0, 0.1, 0.1, 0.1):
        cost.observe(4, seconds)
    assert cost(4) < 0.15


def test_costs_are_learnt_from_passes_of_other_sizes() -> None:
    cost = PassCost(CPU, is_packed=True)
    for tokens in (4, 36, 12, 28, 20, 8, 36, 4, 16, 32):
        cost.observe(tokens, 0.05 + 0.004 * tokens)  # twice as steep as assumed
    for tokens in (6, 24, 40):
        assert cost(tokens) == pytest.approx(0.05 + 0.004 * tokens, rel=0.15)
