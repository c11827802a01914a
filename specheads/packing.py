"""Products of a few rows on a CPU.

A matrix product over a few rows repacks its weight at every call, which costs more than the product: a stock pass over 4 to
8 tokens takes one and a half times to twice as long as a pass over one, which speculation then has to earn back. With numba
there are products that read a weight as it lies, once (`prefetched.py`), and need no memory; without it, oneDNN can keep a
weight in the layout it computes in, a second copy of it. How much they bring differs from processor to processor and with the
number of rows, so that is measured, and where the stock product is quicker it stays.

Shapes: n rows of a product, i inputs, o outputs.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

Model = TypeVar("Model", bound=PreTrainedModel)

MEASURED_ROWS = (1, 2, 3, 4, 8, 16, 32, 64)  # of a product; between two of them, what is quickest for the greater one is taken
FEW_ROWS = 128  # beyond, a product is bound by arithmetic and the stock one is as good
LAYOUT_ROWS = 8  # the number of rows that the layout is chosen for
LEAST_ROWS = 4  # on some processors the kernel takes longer for fewer rows than for this many
MEASURED_BYTES = 2**27  # of weights, so that they come from memory, as in a pass, and not from a cache
MEASURED_TIMES = 3
GAIN = 0.95  # a way other than the first must take less than this share of its time


class PackedLinear(nn.Linear):
    """A linear layer that makes products of a few rows the quickest way.

    `pack_for_cpu` turns a layer into one by its class; weights and names stay as they are. A packed copy of the weight, where
    there is one, is made on first use and anew when the weight has changed.
    """

    _ways: tuple[Callable[[PackedLinear, Tensor], Tensor], ...]  # the product for every number of rows, from none
    _packed: Tensor | None = None
    _packed_from: tuple[int, int] | None = None
    _packed_sample: float | None = None

    def forward(self, input: Tensor) -> Tensor:
        """The layer's outputs `[..., o]` for inputs `[..., i]`."""
        rows, weight = input.numel() // max(1, input.shape[-1]), self.weight
        takes_gradient = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
        if not 0 < rows <= FEW_ROWS or takes_gradient or input.dtype != torch.float32 or not weight.is_cpu:
            return stock_product(self, input)
        return self._ways[rows](self, input)

    def _current(self) -> Tensor:
        # Training steps and loaded weights change the version; assigned ones the place.
        origin = (self.weight._version, self.weight.data_ptr())
        if self._packed is None or self._packed_from != origin:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), LAYOUT_ROWS)
            self._packed_from = origin
            self._packed_sample = _sample(self.weight)
        return self._packed

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles pack anew: the layout is opaque.
        return {name: value for name, value in self.__dict__.items() if name not in PACKED}


def stock_product(layer: PackedLinear, input: Tensor) -> Tensor:
    """With the weight as it is."""
    return functional.linear(input, layer.weight, layer.bias)


def prefetched_product(layer: PackedLinear, input: Tensor) -> Tensor:
    """With the weight as it is, by `prefetched.py`."""
    if torch.compiler.is_compiling():
        return stock_product(layer, input)
    weight, bias, module = layer.weight, layer.bias, _prefetched()
    if module is None or not module.fits(input, weight):  # it may be another weight by now
        return stock_product(layer, input)
    output = module.prefetched(input, weight)
    return output if bias is None else output.add_(bias.detach())


def packed_product(layer: PackedLinear, input: Tensor) -> Tensor:
    """With the packed copy."""
    return torch.ops.mkldnn._linear_pointwise(input, layer._current(), layer.bias, "none", [], "")


def filled_product(layer: PackedLinear, input: Tensor) -> Tensor:
    """With the packed copy and rows of zeros besides."""
    rows = input.numel() // input.shape[-1]
    filled = functional.pad(input.reshape(rows, -1), (0, 0, 0, max(0, LEAST_ROWS - rows)))
    return packed_product(layer, filled)[:rows].view(*input.shape[:-1], -1)


@cache
def _prefetched() -> Any:
    """The module, or None without numba; to import that takes a while, so it is done when first needed."""
    if importlib.util.find_spec("numba") is None:
        return None
    from . import prefetched

    return prefetched


PACKED = ("_packed", "_packed_from", "_packed_sample")
SAMPLE_EVERY = 1009  # of a weight's elements, one in so many is looked at


def _sample(weight: Tensor) -> float:
    return float(weight.detach().reshape(-1)[::SAMPLE_EVERY].double().sum())


def refresh(model: PreTrainedModel) -> None:
    """Drops copies whose weight was written through `weight.data`, as PEFT's merges do: its version stays as it was."""
    for layer in model.modules():
        is_held = type(layer) is PackedLinear and layer._packed is not None and layer.weight.device.type == "cpu"
        if is_held and layer._packed_sample != _sample(layer.weight):
            layer._packed = None


def _fits(layer: nn.Module) -> bool:
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:  # a quantised weight is of a class of its own
        return False
    return layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu"


def pack_for_cpu(model: Model) -> Model:
    """Makes passes of a few tokens on a CPU cost little more than passes of one, in place.

    The outputs are those of the same products in another order of summation. With numba (the extra `cpu`) this takes
    no memory; without it, or for layers that it does not fit, weights are prepacked by oneDNN, which takes as much memory
    again as they do, and brings less. Which product is the quickest for how many rows is measured here, with as many threads
    as torch now has, in a few seconds.

    Args:
        model: A model in single precision on a CPU.

    Returns:
        The same model.

    Raises:
        ValueError: if there is neither numba nor a torch with oneDNN, or the model has no linear layer in single precision on a
            CPU.
    """
    if not torch.backends.mkldnn.is_available() and _prefetched() is None:
        raise ValueError(
            "`pack_for_cpu` needs numba, which is not installed, or a torch built with oneDNN, which this one is not; install "
            "numba, or leave it out."
        )
    fitting = list(filter(_fits, model.modules()))
    if not fitting and not any(type(layer) is PackedLinear for layer in model.modules()):
        kinds = {
            f"{layer.weight.dtype} on {layer.weight.device.type}" for layer in model.modules() if isinstance(layer, nn.Linear)
        }
        raise ValueError(
            "`pack_for_cpu` packs linear layers in torch.float32 on cpu, and this model has none "
            f"(it has {', '.join(sorted(kinds)) or 'no linear layers'}); leave it out."
        )
    for layer in fitting:
        layer.__class__ = PackedLinear
    _measure(fitting)
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    packed = sum(type(layer) is PackedLinear for layer in linear)
    if packed < len(linear):
        warnings.warn(
            f"`pack_for_cpu` packed {packed} of {len(linear)} linear layers; the others are quantised, of another precision "
            "or not on the CPU.",
            stacklevel=2,
        )
    return model


@torch.no_grad()
def _measure(layers: Sequence[Any]) -> None:
    """Finds the quickest product for the layers of each shape."""
    by_shape: dict[torch.Size, list[PackedLinear]] = defaultdict(list)
    for layer in layers:
        by_shape[layer.weight.shape].append(layer)
    for shape, same in by_shape.items():
        some = same[: 1 + MEASURED_BYTES // (4 * shape.numel())]
        ways: list[Any] = [stock_product]  # of no rows
        for rows in MEASURED_ROWS:
            ways += [_quickest(some, torch.ones(rows, shape[1]))] * (rows + 1 - len(ways))
        ways += ways[-1:] * (FEW_ROWS + 1 - len(ways))
        for layer in same:
            layer._ways = tuple(ways)


def _quickest(layers: Sequence[PackedLinear], inputs: Tensor) -> Callable[[PackedLinear, Tensor], Tensor]:
    usual, *others = _ways_to_choose_from(layers[0], inputs)
    seconds: dict[Any, float] = {}
    for way in [usual, *others] * MEASURED_TIMES:
        start = time.perf_counter()
        for layer in layers:
            way(layer, inputs)
        seconds[way] = min(seconds.get(way, torch.inf), time.perf_counter() - start)
    best = min(seconds, key=lambda way: seconds[way])
    return best if seconds[best] < GAIN * seconds[usual] else usual


def _ways_to_choose_from(layer: PackedLinear, inputs: Tensor) -> list[Callable[[PackedLinear, Tensor], Tensor]]:
    """The first is taken unless another is clearly quicker. Where a product can be had without a packed copy, none is made."""
    module = _prefetched()
    if module is not None and module.fits(inputs, layer.weight):
        return [stock_product, prefetched_product]
    if not torch.backends.mkldnn.is_available():
        return [stock_product]
    filled = [filled_product] if len(inputs) < LEAST_ROWS else []
    return [*filled, packed_product, stock_product]


def pack_like(model: PreTrainedModel, target: PreTrainedModel) -> None:
    """Packs a model that works beside a packed target, where its weights can be packed."""
    if is_packed(target) and any(map(_fits, model.modules())):
        pack_for_cpu(model)


def unpack(model: Model) -> Model:
    """Undoes `pack_for_cpu` and frees the packed copies. Returns the model."""
    packed: list[Any] = [layer for layer in model.modules() if type(layer) is PackedLinear]
    for layer in packed:
        for name in (*PACKED, "_ways"):
            layer.__dict__.pop(name, None)
        layer.__class__ = nn.Linear
    return model


def is_packed(model: PreTrainedModel) -> bool:
    """Whether `pack_for_cpu` was applied to a model."""
    return any(type(layer) is PackedLinear for layer in model.modules())
