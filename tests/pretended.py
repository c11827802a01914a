"""Devices that are not there: tensors on the host that say they are elsewhere, and fail where two places meet.

Stands in for a machine with accelerators. What torch would refuse there, an operation on tensors of two devices, is refused
here; what waits for the device is not noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# A type whose name torch knows and which it never starts.
FIRST, SECOND = torch.device("xla:0"), torch.device("xla:1")
HOST = torch.device("cpu")

aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
# They take indices on the host, whatever device the tensor is on.
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
MAKERS = {torch.tensor, torch.as_tensor}
# The place of the call in progress: within torch's C++ a pretended tensor is on the device "meta", and so is what it makes.
_places: list[torch.device] = []


class Pretended(Tensor):
    """A tensor on the host that says it is on another device."""

    held: Tensor
    place: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor, place: torch.device) -> Pretended:
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device="meta"
        )
        made.held, made.place = held, place
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    def tolist(self) -> Any:
        return self.held.tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pretended({self.held}, {self.place})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in MAKERS and kwargs.get("device") is not None:
            place = torch.device(kwargs.pop("device"))
            return func(*args, **kwargs).to(place)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            # C++ would make tensors of lists, and without their numbers: it takes the device for "meta".
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (args[0], tuple(torch.tensor(each) if isinstance(each, list) else each for each in index), *args[2:])
        places = [each.place for each in tree_leaves((args, kwargs)) if isinstance(each, Pretended)]
        _places.extend(places[:1])
        try:
            return func(*args, **kwargs)
        finally:
            del _places[len(_places) - len(places[:1]) :]


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is aten._fused_sdp_choice.default:
        return 0  # plain arithmetic: the others are kernels of one device
    asked = kwargs.get("device")
    place = _place_of(func, args, kwargs) if asked is None else torch.device(asked)
    place = _places[-1] if place.type == "meta" else place
    held = tree_map_only(Pretended, lambda each: each.held, (args, kwargs))
    inner = {name: value for name, value in held[1].items() if name != "non_blocking"}
    out = func(*held[0], **(inner if asked is None else {**inner, "device": HOST}))
    if func._schema.name.endswith("_") and func._schema.is_mutable:
        return args[0]
    return out if place == HOST else tree_map_only(Tensor, lambda each: Pretended(each, place), out)


def _place_of(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device:
    """Where an operation takes place.

    Raises:
        RuntimeError: if its tensors are in several places.
    """
    if func in COPIES:
        return args[0].device
    given = tree_leaves((args, kwargs))
    if func in INDEXING:
        given = [args[0], *(index for index in args[1] if isinstance(index, Pretended)), *args[2:3]]
    tensors = [each for each in given if isinstance(each, Tensor)]
    places = {each.device for each in tensors if each.dim() or isinstance(each, Pretended)}
    if len(places) > 1:
        raise RuntimeError(f"{func} got tensors on {' and '.join(sorted(map(str, places)))}")
    return next(iter(places), HOST)


@contextmanager
def devices() -> Iterator[None]:
    """Makes `FIRST` and `SECOND` exist."""
    with _Functions(), _Dispatch():
        yield
