"""Products of a few rows on a CPU: the same outputs, undone without a trace, never of an old weight."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import specheads
from specheads import EagleHead, packing
from specheads.drafters import head_of
from specheads.packing import FEW_ROWS, PackedLinear, unpack

from .exactness.test_greedy import prompt
from .tiny import tiny


def single_precision():
    return tiny().float()


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_prefetched", lambda: None)


@pytest.fixture(params=["with numba", "without"])
def with_or_without_numba(request: pytest.FixtureRequest) -> None:
    if request.param == "without":
        request.getfixturevalue("without_numba")


@pytest.mark.parametrize("rows", [1, 2, 7, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("with_or_without_numba")
def test_outputs_are_those_of_the_stock_layer(rows: int, bias: bool) -> None:
    stock = nn.Linear(96, 80, bias=bias)
    packed = specheads.pack_for_cpu(copy.deepcopy(stock))
    inputs = torch.randn(2, rows, 96)[:, :, :]
    with torch.no_grad():
        torch.testing.assert_close(packed(inputs), stock(inputs), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed(inputs[0]), stock(inputs[0]), atol=1e-5, rtol=1e-5)
    assert packed(inputs).requires_grad, "training goes the stock way"


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9, FEW_ROWS])
@pytest.mark.parametrize(
    "way", [packing.stock_product, packing.prefetched_product, packing.packed_product, packing.filled_product]
)
def test_every_way_gives_the_same(way: Callable[[PackedLinear, torch.Tensor], torch.Tensor], rows: int) -> None:
    layer = specheads.pack_for_cpu(nn.Linear(96, 80))
    layer._ways = (way,) * (FEW_ROWS + 1)
    inputs = torch.randn(1, rows, 96)
    with torch.no_grad():
        expected = nn.functional.linear(inputs.double(), layer.weight.double(), layer.bias.double()).float()
        torch.testing.assert_close(layer(inputs), expected, atol=1e-5, rtol=1e-5)


# Of 1, 2, 3, 4, 8, 16, 32 and 64 rows. A gain of 3 % is not enough to leave what comes first.
COSTS = {
    "stock_product": [1, 1, 9, 9, 1, 1, 1, 1],
    "packed_product": [5, 5, 5, 2, 2, 5, 1.03, 1.03],
    "filled_product": [3, 3, 3],
    "prefetched_product": [0.97, 2, 2, 2, 2, 0.9, 9, 9],
}
QUICKEST = ["stock", "stock", "filled", "packed", *["stock"] * 12, *["packed"] * 112]
QUICKEST_WITH_NUMBA = ["stock", "stock", "prefetched", "prefetched", *["stock"] * 4, *["prefetched"] * 8, *["stock"] * 112]


@pytest.mark.parametrize("has_numba", [True, False])
def test_for_every_number_of_rows_the_quickest_way(monkeypatch: pytest.MonkeyPatch, has_numba: bool) -> None:
    """By a clock that the products themselves set forward."""
    if not has_numba:
        monkeypatch.setattr(packing, "_prefetched", lambda: None)
    now = [0.0]
    for name, costs in COSTS.items():

        def product(layer: PackedLinear, inputs: torch.Tensor, costs: list[float] = costs, name: str = name) -> None:
            now[0] += costs[packing.MEASURED_ROWS.index(len(inputs))]

        product.__name__ = name
        monkeypatch.setattr(packing, name, product)
    monkeypatch.setattr(packing.time, "perf_counter", lambda: now[0])
    layer = specheads.pack_for_cpu(nn.Linear(16, 8))
    names = [way.__name__.removesuffix("_product") for way in layer._ways]
    assert names[1:] == (QUICKEST_WITH_NUMBA if has_numba else QUICKEST)


@pytest.mark.usefixtures("with_or_without_numba")
def test_a_changed_weight_is_packed_anew() -> None:
    layer = specheads.pack_for_cpu(nn.Linear(16, 16))
    inputs = torch.randn(3, 16)
    with torch.no_grad():
        layer(inputs)
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias), atol=1e-5, rtol=1e-5)
        layer.weight = nn.Parameter(torch.randn(16, 16))
        torch.testing.assert_close(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("with_or_without_numba")
def test_enable_packs_and_disable_unpacks() -> None:
    model = single_precision()
    names = list(model.state_dict())
    inputs = prompt("llama", 2)
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    specheads.enable(model, pack_for_cpu=True)
    assert any(type(layer) is PackedLinear for layer in model.modules())
    assert list(model.state_dict()) == names
    assert torch.equal(expected, model.generate(**inputs, max_new_tokens=12, do_sample=False, speculative=True))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(expected, other.generate(**inputs, max_new_tokens=12, do_sample=False, speculative=True))
    specheads.disable(model)
    assert not any(type(layer) is PackedLinear for layer in model.modules())
    assert torch.equal(expected, model.generate(**inputs, max_new_tokens=12, do_sample=False))


def test_with_numba_there_are_no_copies() -> None:
    model = specheads.pack_for_cpu(single_precision())
    model.generate(**prompt("llama", 2), max_new_tokens=8, do_sample=False)
    layers = [layer for layer in model.modules() if type(layer) is PackedLinear]
    assert layers and all(layer._packed is None for layer in layers)


@pytest.mark.usefixtures("without_numba")
def test_without_numba_and_onednn_there_is_nothing_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs numba"):
        specheads.pack_for_cpu(nn.Linear(16, 16))


def test_a_compiled_layer_takes_the_stock_product() -> None:
    layer = specheads.pack_for_cpu(nn.Linear(16, 16))
    layer._ways = (packing.prefetched_product,) * (FEW_ROWS + 1)
    inputs = torch.randn(3, 16)
    with torch.no_grad():
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        assert torch.equal(compiled(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))


def test_what_cannot_be_packed_is_refused() -> None:
    model = tiny()
    with pytest.raises(ValueError, match="float64 on cpu"):
        specheads.enable(model, pack_for_cpu=True)
    assert type(model).__dict__.get("_speculation_original") is None
    with pytest.raises(ValueError, match="no linear layers"):
        specheads.pack_for_cpu(nn.ReLU())


def test_packing_twice_and_unpacking_twice() -> None:
    model = specheads.pack_for_cpu(specheads.pack_for_cpu(single_precision()))
    assert all(type(layer) is not PackedLinear for layer in unpack(unpack(model)).modules())


def is_packed_whole(model: nn.Module) -> bool:
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return bool(linear) and all(type(layer) is PackedLinear for layer in linear)


def test_a_head_that_is_loaded_is_packed_as_its_target_is(tmp_path: Path) -> None:
    model = single_precision()
    EagleHead.from_target(model).save_pretrained(tmp_path)
    given = EagleHead.from_pretrained(tmp_path, dtype=torch.float32)
    inputs = prompt("llama", 2)
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    for drafter, packs, head_is_packed in ((tmp_path, True, True), (tmp_path, False, False), (given, True, False)):
        specheads.enable(model, drafter=drafter, pack_for_cpu=packs, tree_nodes=6)
        head = head_of(model._speculation.drafter)
        assert head is not None and is_packed_whole(head) == head_is_packed
        assert torch.equal(expected, model.generate(**inputs, max_new_tokens=12, do_sample=False, speculative=True))
        specheads.disable(model)
    specheads.pack_for_cpu(model)
    head = head_of(specheads.load_drafter(tmp_path, model))
    assert head is not None and is_packed_whole(head)
    unpack(model)


def test_a_drafter_that_cannot_be_loaded_leaves_weights_as_they_are(tmp_path: Path) -> None:
    model = single_precision()
    with pytest.raises(FileNotFoundError):
        specheads.enable(model, drafter=tmp_path, pack_for_cpu=True)
    assert not any(type(layer) is PackedLinear for layer in model.modules())
