"""Products compiled by numba: their values, their bits, and what they leave to torch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import specheads
from specheads import packing, prefetched
from specheads.packing import FEW_ROWS

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 33]
SIZES = [(2, 16), (3, 32), (16, 16), (577, 64), (64, 576), (7, 1104), (66, 2048), (33, 4096)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def expected(inputs: Tensor, weight: Tensor) -> Tensor:
    return (inputs.double() @ weight.double().T).float()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "width"), SIZES)
def test_products(threads: int, rows: int, outputs: int, width: int) -> None:
    inputs, weight = torch.randn(2, rows, width), torch.randn(outputs, width)
    assert prefetched.fits(inputs, weight)
    torch.testing.assert_close(prefetched.prefetched(inputs, weight), expected(inputs, weight), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", ROWS)
def test_a_row_is_the_same_bits_whatever_is_beside_it(threads: int, rows: int) -> None:
    inputs, weight = torch.randn(rows, 576), torch.randn(97, 576)
    together = prefetched.prefetched(inputs, weight)
    assert torch.equal(together, torch.cat([prefetched.prefetched(row, weight) for row in inputs.split(1)]))


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    prefetched._compiled.cache_clear()
    yield
    prefetched._compiled.cache_clear()


@pytest.mark.parametrize(("lanes", "tile"), [(4, 4), (8, 4), (16, 8)])
@pytest.mark.usefixtures("compiled_anew")
def test_other_processors(monkeypatch: pytest.MonkeyPatch, lanes: int, tile: int) -> None:
    """The code for registers of 4, 8 and 16 floats, which any processor can run, if not quickly."""
    monkeypatch.setattr(prefetched, "LANES", lanes)
    monkeypatch.setattr(prefetched, "TILE", tile)
    for rows in ROWS:
        for outputs, width in SIZES:
            test_products(1, rows, outputs, width)
        test_a_row_is_the_same_bits_whatever_is_beside_it(1, rows)


@pytest.mark.usefixtures("compiled_anew")
def test_totals_of_the_wrong_sums_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of the compiled code."""
    totals = prefetched._totals
    half = prefetched.LANES // 2
    monkeypatch.setattr(prefetched, "_totals", lambda build, vectors: totals(build, vectors[:half] * 2))
    with pytest.raises(AssertionError):
        test_products(1, 8, 64, 576)


def test_strided_inputs_and_weights_at_odd_addresses() -> None:
    inputs, memory = torch.randn(5, 3, 64), torch.randn(48 * 64 + 3)
    last, weight = inputs[:, -1:], memory[3:].view(48, 64)
    torch.testing.assert_close(prefetched.prefetched(last, weight), expected(last, weight), atol=1e-4, rtol=1e-4)


def test_values_that_are_not_finite() -> None:
    inputs, weight = torch.randn(3, 32), torch.randn(6, 32)
    inputs[1, 4] = torch.nan
    product = prefetched.prefetched(inputs, weight)
    assert product[1].isnan().all() and product[[0, 2]].isfinite().all()


UNFIT = {
    "another width": (torch.randn(3, 32), torch.randn(4, 48)),
    "an odd width": (torch.randn(3, 15), torch.randn(4, 15)),
    "a single output": (torch.randn(3, 32), torch.randn(1, 32)),
    "half precision": (torch.randn(3, 32), torch.randn(4, 32).half()),
    "a strided weight": (torch.randn(3, 32), torch.randn(32, 4).T),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_left_to_torch(case: str) -> None:
    inputs, weight = UNFIT[case]
    assert not prefetched.fits(inputs, weight)
    layer = specheads.pack_for_cpu(nn.Linear(32, 4, bias=False))
    layer._ways = (packing.prefetched_product,) * (FEW_ROWS + 1)
    layer.weight = nn.Parameter(weight)

    def outcome(product: nn.Module) -> object:
        try:
            return product(inputs).tolist()
        except (RuntimeError, NotImplementedError) as error:
            return str(error)

    stock = nn.Linear(32, 4, bias=False)
    stock.weight = layer.weight
    with torch.no_grad():
        assert outcome(layer) == outcome(stock)


def test_two_callers_at_once(threads: int) -> None:
    inputs, weights = torch.randn(4, 128), [torch.randn(256, 128) for _ in range(40)]

    def products(_: int) -> list[Tensor]:
        torch.set_num_threads(threads)  # a thread of Python's starts with torch's default
        return [prefetched.prefetched(inputs, weight) for weight in weights]

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(products, range(2))
    for weight, *results in zip(weights, one, other, strict=True):
        for result in results:
            torch.testing.assert_close(result, expected(inputs, weight), atol=1e-4, rtol=1e-4)
