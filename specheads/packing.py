"""Prepacked weights for CPU passes of a few tokens.

A matrix product over a few rows repacks its weight at every call, which costs more than the product: a stock pass over 4 to
8 tokens takes about one and a half times a pass over one, which speculation then has to earn back. oneDNN can keep a weight in
the layout it computes in; then a pass over 8 tokens costs little more than one. The layout is a second copy of the linear
weights.

Shapes: n rows of a product, i inputs, o outputs.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

Model = TypeVar("Model", bound=PreTrainedModel)

FEW_ROWS = 128  # beyond, a product is bound by arithmetic and the stock one is as good
LAYOUT_ROWS = 8  # the number of rows that the layout is chosen for
LEAST_ROWS = 4  # the kernel takes longer for fewer rows than for this many


class PackedLinear(nn.Linear):
    """A linear layer with a packed copy of its weight, made on first use and anew when the weight has changed.

    `pack_for_cpu` turns a layer into one by its class; weights and names stay as they are.
    """

    _packed: Tensor | None = None
    _packed_from: tuple[int, int] | None = None
    _packed_sample: float | None = None

    def forward(self, input: Tensor) -> Tensor:
        """The layer's outputs `[..., o]` for inputs `[..., i]`."""
        rows = input.numel() // max(1, input.shape[-1])
        takes_gradient = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        if not 0 < rows <= FEW_ROWS or takes_gradient or input.dtype != torch.float32 or self.weight.device.type != "cpu":
            return functional.linear(input, self.weight, self.bias)
        if rows >= LEAST_ROWS:
            return torch.ops.mkldnn._linear_pointwise(input, self._current(), self.bias, "none", [], "")
        filled = functional.pad(input.reshape(rows, -1), (0, 0, 0, LEAST_ROWS - rows))
        outputs = torch.ops.mkldnn._linear_pointwise(filled, self._current(), self.bias, "none", [], "")[:rows]
        return outputs.view(*input.shape[:-1], -1)

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
    """Prepacks a model's linear weights for passes of a few tokens on a CPU, in place.

    The outputs are those of the same products in another order of summation. It takes as much memory again as the linear
    weights, an output layer that shares its weight with the embedding among them.

    Args:
        model: A model in single precision on a CPU.

    Returns:
        The same model.

    Raises:
        ValueError: if this torch has no oneDNN, or the model has no linear layer in single precision on a CPU.
    """
    if not torch.backends.mkldnn.is_available():
        raise ValueError("`pack_for_cpu` needs a torch built with oneDNN, and this one is not; leave it out.")
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
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    packed = sum(type(layer) is PackedLinear for layer in linear)
    if packed < len(linear):
        warnings.warn(
            f"`pack_for_cpu` packed {packed} of {len(linear)} linear layers; the others are quantised, of another precision "
            "or not on the CPU.",
            stacklevel=2,
        )
    return model


def pack_like(model: PreTrainedModel, target: PreTrainedModel) -> None:
    """Packs a model that works beside a packed target, where its weights can be packed."""
    if is_packed(target) and any(map(_fits, model.modules())):
        pack_for_cpu(model)


def unpack(model: Model) -> Model:
    """Undoes `pack_for_cpu` and frees the packed copies. Returns the model."""
    packed: list[Any] = [layer for layer in model.modules() if type(layer) is PackedLinear]
    for layer in packed:
        for name in PACKED:
            layer.__dict__.pop(name, None)
        layer.__class__ = nn.Linear
    return model


def is_packed(model: PreTrainedModel) -> bool:
    """Whether `pack_for_cpu` was applied to a model."""
    return any(type(layer) is PackedLinear for layer in model.modules())
