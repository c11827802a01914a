"""Drawing: in proportion to the weights, never what has none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.randomness import GeneratorNoise, RowwiseNoise, pick

WEIGHTS = torch.tensor([[0.0, 3.0, 0.0, 1.0, 0.0], [0.0, 0.0, 2.0, 0.0, 0.0]])
ALMOST_ONE = 1 - 2**-53


@pytest.mark.parametrize(("coin", "expected"), [(0.0, [1, 2]), (0.74, [1, 2]), (0.76, [3, 2]), (ALMOST_ONE, [3, 2])])
def test_a_coin_falls_where_a_weight_is(coin: float, expected: list[int]) -> None:
    coins = torch.full((2, 1), coin, dtype=torch.double)
    assert pick(WEIGHTS, coins).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30).filter(any), st.floats(0, ALMOST_ONE))
def test_never_what_has_no_weight(weights: list[float], coin: float) -> None:
    table = torch.tensor([weights], dtype=torch.double)
    if table.sum() > 0:
        chosen = pick(table, torch.tensor([[coin]], dtype=torch.double))
        assert table[0, chosen] > 0


@pytest.mark.parametrize("vocab_size", [5, 200])
def test_weights_that_are_nan_give_some_index(vocab_size: int) -> None:
    chosen = pick(torch.full((2, vocab_size), torch.nan), torch.full((2, 1), 0.5, dtype=torch.double))
    assert bool((chosen >= 0).all() and (chosen < vocab_size).all())


def test_small_weights_beside_large_ones_count() -> None:
    """A running sum in single precision would lose them."""
    weights = torch.full((1, 20_000), 1e-9)
    weights[0, 0] = 1.0
    coin = torch.tensor([[1 - 1e-6]], dtype=torch.double)
    assert 18_000 < int(pick(weights, coin)) < 20_000


@pytest.mark.parametrize("vocab_size", [5, 64, 1000])
def test_the_place_is_that_of_the_whole_running_sum(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.rand(500, vocab_size, dtype=torch.double, generator=generator)
    weights[torch.rand(weights.shape, generator=generator) < 0.5] = 0
    weights[:, vocab_size // 2] = 1
    coins = torch.rand(500, 1, dtype=torch.double, generator=generator)
    sums = weights.cumsum(dim=1)
    assert torch.equal(pick(weights, coins), torch.searchsorted(sums, coins * sums[:, -1:], right=True)[:, 0])


def test_frequencies() -> None:
    weights = torch.tensor([[0.1, 0.0, 0.6, 0.3]]).expand(40_000, -1)
    drawn = GeneratorNoise(5).draw(weights, range(40_000), [0] * 40_000)
    shares = torch.bincount(drawn, minlength=4) / 40_000
    torch.testing.assert_close(shares, weights[0], atol=0.01, rtol=0.0)


def test_a_row_of_its_own_generator_does_not_see_its_neighbours() -> None:
    weights = torch.rand(3, 50, generator=torch.Generator().manual_seed(1))
    together = RowwiseNoise([7, 8, 9]).draw(weights, [0, 1, 2], [0, 0, 0])
    alone = RowwiseNoise([7, 8, 9]).draw(weights[1:2], [1], [0])
    assert together[1] == alone[0]
