"""How much rounding alone changes a target's scores: its passes over one token against those over several.

Shapes: P tokens of the prompt, T of its continuation, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..mixin import SpeculativeGenerationMixin
from ..processors import in_full_precision
from .runs import Run, continuations

# What is measured on some texts may be exceeded on others.
ALLOWANCE = 2.0


@dataclass(frozen=True)
class Rounding:
    """What rounding explains.

    Args:
        positions: At how many places of texts it was measured.
        explained_gap: The largest top-2 gap at which it may make another token the first: twice the largest change seen.
        law_divergence: How far it may carry the law of a token: the mean chi-square distance seen, for twice the change.
    """

    positions: int
    explained_gap: float
    law_divergence: float


@torch.no_grad()
def plain_greedy(model: Any, inputs: Mapping[str, Tensor], **arguments: Any) -> tuple[Run, Tensor]:
    """Plain greedy text of one prompt, and the raw logits `[T, V]` that its one-token passes gave."""
    if isinstance(model, SpeculativeGenerationMixin):
        arguments["speculative"] = False
    output = model.generate(**inputs, **arguments, do_sample=False, output_logits=True, return_dict_in_generate=True)
    run = Run(continuations(model, inputs, output.sequences), 0.0)
    return run, torch.cat(output.logits)[: len(run.rows[0])]


def measure_rounding(
    model: Any,
    texts: Iterable[tuple[Mapping[str, Tensor], Sequence[int], Tensor]],
    chunk: int,
    temperature: float,
) -> Rounding:
    """Compares passes.

    Args:
        model: The target.
        texts: Prompts with the continuations and logits that `plain_greedy` gave.
        chunk: How many tokens a pass of a round has.
        temperature: That laws are taken at.
    """
    gaps, distances = [], []
    for inputs, row, logits in texts:
        one = in_full_precision(logits).double()
        first, second = one.topk(2, dim=-1).indices.unbind(dim=-1)
        law = (one / temperature).softmax(dim=-1)
        for several in _longer_passes(model, inputs, row, chunk):
            change = in_full_precision(several).double() - one
            gaps.append((_at(change, first) - _at(change, second)).abs())
            other = ((one + ALLOWANCE * change) / temperature).softmax(dim=-1)
            distances.append(((other - law).square() / law.clamp(min=torch.finfo(law.dtype).tiny)).sum(dim=-1))
    gap, distance = torch.cat(gaps), torch.cat(distances)
    return Rounding(len(gap), ALLOWANCE * gap.max().item(), distance.mean().item())


@torch.no_grad()
def _longer_passes(model: Any, inputs: Mapping[str, Tensor], row: Sequence[int], chunk: int) -> list[Tensor]:
    """Logits `[T, V]` of a text in one pass over all of it and, where the model has such passes, in those over a few tokens."""
    prompt = inputs["input_ids"]
    tail = torch.tensor([row[:-1]], dtype=torch.long, device=prompt.device)
    if model.config.is_encoder_decoder:
        start = torch.full_like(prompt[:, :1], model.generation_config.decoder_start_token_id)
        return [model(**inputs, decoder_input_ids=torch.cat([start, tail], dim=1)).logits[0]]
    ids = torch.cat([prompt, tail], dim=1)
    passes = [model(input_ids=ids, use_cache=False).logits[0, -len(row) :]]
    if not getattr(model, "_is_stateful", False):
        cache = {compat.cache_name(model): compat.new_cache(model)}
        parts = [prompt, *tail.split(chunk, dim=1)]
        logits = [model(input_ids=part, use_cache=True, **cache).logits[0] for part in parts if part.shape[1]]
        passes.append(torch.cat([logits[0][-1:], *logits[1:]]))
    return passes


def _at(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index[:, None])[:, 0]
