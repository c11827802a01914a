"""From a call that has run to what `generate` returns besides the ids: the cache, and what every step gave.

Shapes: B rows, n tokens of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache

from . import compat
from .loop import Call
from .preparation import Request
from .processors import in_full_precision

CHUNK = 64  # columns of padding that are run at once


@contextmanager
def lent_cache(call: Call, request: Request) -> Iterator[None]:
    """Gives a cache that was passed in back with what was committed, should the call be interrupted."""
    try:
        yield
    except BaseException:
        if _is_lent(request):
            call.target.reopen()
            call.target.give_back()
        raise


def returned_fields(call: Call, request: Request) -> dict[str, Any]:
    """The fields of the output besides the ids, by name. A cache that was passed in gets its content back."""
    config, given = request.generation_config, request.model_kwargs
    fields: dict[str, Any] = {}
    if call.outputs.are_wanted or _is_lent(request):
        run_over_padding(call)
    if _is_lent(request):
        call.target.give_back()
    if config.return_dict_in_generate and config.use_cache:
        fields[compat.CACHE] = call.target.stock_cache if _is_lent(request) else cache_on_demand(call)
    is_encoder_decoder = call.target.model.config.is_encoder_decoder
    fields.update(call.outputs.collected(is_encoder_decoder))
    if is_encoder_decoder:
        encoder = given["encoder_outputs"]
        for name in ("attentions", "hidden_states"):
            if getattr(call.outputs, name):
                fields[f"encoder_{name}"] = encoder.get(name)
    return fields


def cache_on_demand(call: Call) -> Cache:
    """The stock cache, filled when it is first looked at: most who ask for an output with the statistics never do."""
    stock = call.target.stock_cache
    kind = type(stock)

    def fill(cache: Any) -> None:
        cache.__class__ = kind
        with torch.no_grad():
            run_over_padding(call)
            cache.__dict__.update(vars(call.target.give_back()))

    def look_up(cache: Any, name: str) -> Any:
        fill(cache)
        return getattr(cache, name)

    def reduce(cache: Any, protocol: Any) -> Any:
        fill(cache)
        return cache.__reduce_ex__(protocol)

    # Without attributes of its own, so that the first look for one ends in `look_up`.
    own = {"__getattr__": look_up, "__reduce_ex__": reduce, "__module__": kind.__module__}
    unfilled: Any = type(kind.__name__, (kind,), own)
    return unfilled.__new__(unfilled)


def run_over_padding(call: Call) -> None:
    """Runs rows that ended before the others over their padding, as plain decoding does.

    The target then has every column of every row but the last one, and `call.outputs` has every step of every row.
    """
    target, sequences, outputs = call.target, call.context.sequences, call.outputs
    last = max(sequences.widths) - 1
    rows = target.reopen()
    fed = [sequences.widths[row] - 1 for row in rows]  # how many columns of the ids the target has
    while min(fed) < last:
        lacking = [min(CHUNK, last - own) for own in fed]
        size = max(lacking)
        # Rows that lack fewer columns are fed something that is forgotten, at a position that exists.
        steps = torch.tensor([[max(0, min(step, own - 1)) for step in range(size)] for own in lacking])
        tokens = sequences.ids[torch.tensor(rows)[:, None], (torch.tensor(fed)[:, None] + steps).clamp(max=last)]
        causal = torch.ones(size, size, dtype=torch.bool).tril()
        given = target.extend(tokens, steps, causal.expand(len(rows), -1, -1))
        if outputs.are_wanted:
            for line, row in enumerate(rows):
                _record_padding(call, row, line, fed[line], given, range(lacking[line]))
        target.commit([range(count) for count in lacking])
        fed = [own + count for own, count in zip(fed, lacking, strict=True)]


def _record_padding(call: Call, row: int, line: int, fed: int, given: Any, nodes: range) -> None:
    sequences, scores = call.context.sequences, None
    if call.outputs.scores and nodes:
        ended, logits = sequences.widths[row], in_full_precision(given.logits[line])
        scores = torch.cat(
            [
                call.context.processors([row], sequences.ids[row, ended : fed + node + 1][None], logits[node][None])
                for node in nodes
            ]
        )
    call.outputs.record(row, line, nodes, scores, given, call.target)


def _is_lent(request: Request) -> bool:
    given = (request.model_kwargs.get(name) for name in compat.CACHE_NAMES)
    return any(getattr(cache, "_is_user_defined", False) for cache in given)
