"""Pacing drafts what pays, notices what does not, and repeats itself where it must."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from specheads.config import SpeculativeConfig
from specheads.drafters.base import Budget, DraftContext
from specheads.pacing import ALLOWANCE, INCOME, MOST_SAVED, TRY_GAP, Acceptance, Pacer, PassCost, caution, shares
from specheads.processors import ScoreProcessors
from specheads.sequences import Sequences

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def context(rows: int = 1, room: int = 1000) -> DraftContext:
    sequences = Sequences(torch.ones(rows, 1, dtype=torch.long), StoppingCriteriaList(), room + 1, None)
    processors = ScoreProcessors(LogitsProcessorList(), sequences)
    config = SpeculativeConfig()
    return DraftContext(
        list(range(rows)), sequences, [[1]] * rows, None, None, processors, None, config, 8, CPU, True, None, False
    )


def pacer(
    device: torch.device = CPU,
    step_cost: float = 0.0,
    weighs: bool = False,
    clock: bool = False,
    packed: bool = False,
    rows: int = 1,
    **fields,
) -> Pacer:
    config = SpeculativeConfig(draft_tokens=6, **fields)
    return Pacer(config, PassCost(device, packed), step_cost, weighs, clock, 6, rows)


def play(paced: Pacer, rounds: int, *right: int, on: DraftContext | None = None, hopes: float | None = None) -> list[Budget]:
    """Rounds of a drafter that drafts all it may, of which as many tokens are accepted per line as given here."""
    on = on or context(len(right))
    budgets = []
    for _ in range(rounds):
        budget = paced.budget(on)
        budgets.append(budget)
        accepted = [min(depth, most) for depth, most in zip(budget.depths, right, strict=True)]
        expected = None if hopes is None or not budget.depth else hopes * budget.nodes * len(right)
        paced.observe(budget.depths, accepted, expected, len(right) * (1 + budget.nodes), 0.0)
    return budgets


def lost(budgets: list[Budget], cost: PassCost) -> float:
    """What drafts that were all rejected cost, in plain passes."""
    rows = len(budgets[0].depths)
    return sum(cost(rows, 1 + budget.nodes) / cost(rows, 1) - 1 for budget in budgets)


def test_good_drafts_are_made_long_and_bad_ones_not_at_all() -> None:
    assert play(pacer(), 20, 6)[-1].depth == 6
    assert play(pacer(), 20, 0)[-1].depth == 0


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("packed", [False, True])
def test_a_drafter_that_is_always_wrong_loses_no_more_than_agreed(weighs: bool, rows: int, packed: bool) -> None:
    paced = pacer(weighs=weighs, packed=packed, rows=rows)
    budgets = play(paced, 200, *[0] * rows, hopes=0.9 if weighs else None)
    assert 0 < lost(budgets, paced.cost) <= (ALLOWANCE + 200 * INCOME) * caution(rows)
    assert caution(8) < caution(2) < caution(1) == 1


def test_gains_cover_losses_up_to_a_limit() -> None:
    paced = pacer()
    play(paced, 50, 6)
    assert paced.balance == MOST_SAVED
    assert lost(play(paced, 100, 0), paced.cost) <= MOST_SAVED + 100 * INCOME


def test_a_bad_drafter_is_tried_again_and_comes_back() -> None:
    paced = pacer(packed=True)
    play(paced, 30, 0)
    depths = [budget.depth for budget in play(paced, 60, 0)]
    assert 1 <= sum(depth > 0 for depth in depths) <= 60 / TRY_GAP
    assert max(depths) <= 3
    depths = [budget.depth for budget in play(paced, 60, 6)]
    first = next(index for index, depth in enumerate(depths) if depth)
    assert all(depths[first : first + 10]), "once a try succeeds, it goes on"
    assert depths[-1] == 6


def test_costly_steps_make_short_drafts() -> None:
    depths = []
    for step_cost in (0.0, 0.25):
        paced = pacer(CUDA, step_cost=step_cost)
        for right in (6, 2, 4, 1, 6, 3) * 4:
            depth = play(paced, 1, right)[0].depth
        depths.append(depth)
    assert 0 < depths[1] < depths[0]


def test_a_tree_grows_with_its_depth() -> None:
    paced = pacer(CUDA, tree_nodes=12)
    (first,) = play(paced, 1, 6)
    assert first.nodes == 2 * first.depth
    play(paced, 20, 6)
    assert play(paced, 1, 6)[0].nodes == 12


def test_rows_are_never_drafted_past_their_end() -> None:
    assert pacer(adaptive=False).budget(context(rows=2, room=3)).depths == [2, 2]
    assert pacer(adaptive=False).budget(context(room=1)).depth == 0
    assert pacer(weighs=True).budget(context(room=3)).depth <= 2


def test_a_fixed_draft_is_left_alone() -> None:
    paced = pacer(adaptive=False, tree_nodes=9)
    budget = play(paced, 30, 0)[-1]
    assert (budget.depth, budget.nodes, budget.entry_cost, budget.node_cost) == (6, 9, 0.0, 0.0)


def test_rows_get_their_own_depths() -> None:
    budgets = play(pacer(CUDA), 40, 6, 1, 3)[20:]
    deep, shallow, middle = (sum(budget.depths[line] for budget in budgets) / len(budgets) for line in range(3))
    assert shallow < middle < deep


def test_a_column_must_pay_for_all_rows() -> None:
    """What one row gains pays for a pass alone, and not for eight rows' tokens."""
    assert play(pacer(packed=True), 30, 6)[-1].depth == 6
    paced = pacer(packed=True)
    budgets = play(paced, 100, 6, *[0] * 7)
    assert lost(budgets, paced.cost) <= ALLOWANCE + 100 * INCOME + sum(budget.depths[0] for budget in budgets) / 8
    assert budgets[-1].depth == 0
    assert play(pacer(packed=True), 30, *[6] * 8)[-1].depth == 6


def test_a_line_without_a_draft_counts_as_a_miss_where_others_made_the_pass_wide() -> None:
    acceptances = []
    for together in (False, True):
        paced = pacer(CUDA)
        for _ in range(10):
            paced.budget(context(2))
            paced.observe([6 if together else 0, 0], [6 if together else 0, 0], None, 2, 0.0)
        acceptances.append(paced.acceptance.survival(1)[0])
    assert acceptances[1] < 0.5 * acceptances[0]


def test_survival_leans_on_recent_rounds_then_on_lasting_memory() -> None:
    acceptance = Acceptance(3)
    for _ in range(50):
        acceptance.observe([0], [3], [0])
    assert acceptance.survival(0)[0] < 0.05
    for _ in range(30):
        acceptance.observe([0], [0], [0])  # nothing drafted: what was recent fades, what lasts does not
    assert acceptance.survival(0)[0] < 0.1
    acceptance.observe([0], [3], [3])
    assert acceptance.survival(0)[0] > 0.4
    assert acceptance.survival(7)[0] < acceptance.survival(0)[0], "another row has only the others to go by"


def test_survivals_fall() -> None:
    acceptance = Acceptance(4)
    for depth, kept in ((4, 2), (4, 4), (2, 1), (4, 0)):
        acceptance.observe([0], [depth], [kept])
    survival = acceptance.survival(0)
    assert 1 > survival[0] > survival[1] > survival[2] > survival[3] > 0


def test_rows_that_are_ahead_count_for_less() -> None:
    told = context(3)
    assert shares(told) == pytest.approx([1 / 3] * 3)
    told.sequences.append([0], [[1] * 20], in_step=False)
    told.sequences.append([1], [[1] * 5], in_step=False)
    ahead, between, behind = shares(told)
    assert ahead < 0.2 * behind < between < behind
    assert ahead + between + behind == pytest.approx(1)
    told.sequences.append([0], [[1] * 500], in_step=False)
    assert shares(told)[0] == 0
    told.rows[:] = [0]
    assert shares(told) == [1.0]


def test_a_drafter_that_hopes_too_much_is_charged_more() -> None:
    honest, hopeful = pacer(weighs=True), pacer(weighs=True)
    for paced, kept, hope in ((honest, 3, 3.0), (hopeful, 1, 5.0)):
        for _ in range(10):
            paced.observe([6], [kept], hope, 0, 0.0)
    assert hopeful.budget(context()).entry_cost > 1.5 * honest.budget(context()).entry_cost
    for _ in range(400):
        hopeful.observe([0], [0], None, 0, 0.0)
    assert hopeful.budget(context()).entry_cost == pytest.approx(pacer(weighs=True).budget(context()).entry_cost, rel=0.05)


def test_where_time_brings_more_a_node_costs_more() -> None:
    plain, fast = pacer(weighs=True), pacer(weighs=True)
    play(fast, 30, 6)
    assert fast.budget(context()).node_cost > 1.5 * plain.budget(context()).node_cost


def test_measured_costs_are_believed_only_where_the_clock_may_count() -> None:
    for clock in (False, True):
        paced = pacer(clock=clock)
        before = paced.cost(1, 7) / paced.cost(1, 1)
        seconds = 0.0
        for _ in range(20):
            for tokens, duration in ((1, 0.1), (7, 0.1)):  # a pass over seven costs what one over a single token costs
                seconds += duration
                paced.observe([0], [0], None, tokens, seconds)
        after = paced.cost(1, 7) / paced.cost(1, 1)
        assert after == pytest.approx(1 if clock else before, rel=0.1)


def test_an_interrupted_pass_counts_for_little() -> None:
    cost = PassCost(CPU, is_packed=False)
    for seconds in (0.1, 0.1, 0.1, 50.0, 0.1, 0.1, 0.1):
        cost.observe(1, 4, seconds)
    assert cost(1, 4) < 0.15


def test_one_pass_gives_the_scale_and_the_assumed_shape_the_rest() -> None:
    cost, assumed = PassCost(CPU, is_packed=True), PassCost(CPU, is_packed=True)
    cost.observe(8, 1, 0.08)
    for rows, columns in ((8, 1), (8, 4), (4, 9), (1, 1)):
        assert cost(rows, columns) / cost(8, 1) == pytest.approx(assumed(rows, columns) / assumed(8, 1))


def test_costs_are_learnt_from_passes_of_other_shapes() -> None:
    cost = PassCost(CPU, is_packed=True)

    def seconds(rows: int, columns: int) -> float:
        """Steeper than assumed, with more of a step between one column and two."""
        return 0.05 + 0.004 * rows * columns + (0.04 if columns > 1 else 0.0)

    for _ in range(4):
        for columns in (1, 9, 3, 7, 5, 2, 1, 8, 4):
            cost.observe(4, columns, seconds(4, columns))
    for columns in (1, 2, 6, 10):
        assert cost(4, columns) == pytest.approx(seconds(4, columns), rel=0.15)


def test_assumed_costs_grow_with_rows_and_columns() -> None:
    for device, packed in ((CPU, True), (CPU, False), (CUDA, False)):
        cost = PassCost(device, packed)
        for rows in (1, 2, 8):
            column_costs = [cost(rows, columns) for columns in range(1, 10)]
            assert column_costs == sorted(column_costs)
            assert cost(rows, 1) < cost(2 * rows, 1) or packed
