"""Whether two greedy texts are identical and, where they part, how near to a tie the target was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..mixin import SpeculativeGenerationMixin
from .runs import Run


@dataclass(frozen=True)
class Divergence:
    """The first place where a row differs from that of plain `generate`.

    Args:
        row: The row of the batch.
        position: The index within the continuation.
        plain: The id that plain `generate` has there; `None` if its text had ended.
        other: The id that the other run has there; `None` if its text had ended.
        gap: By how much the higher of the two scores exceeds the lower, in a fresh pass of the target over the common text;
            `None` where one text had ended. For two tokens that are the target's first choices it is the top-2 gap. Passes of
            different shapes round differently: in float32 that explains a gap of up to about 1e-3, and not more.
    """

    row: int
    position: int
    plain: int | None
    other: int | None
    gap: float | None


def divergences(model: Any, inputs: Mapping[str, Any], plain: Run, other: Run) -> list[Divergence]:
    """The rows of a greedy run that differ from those of plain `generate`.

    Args:
        model: The target.
        inputs: The inputs of both runs.
        plain: The run of plain `generate`.
        other: The run that should have emitted the same.
    """
    found = []
    for row, (ours, theirs) in enumerate(zip(plain.rows, other.rows, strict=True)):
        position = first_difference(ours, theirs)
        if position is not None:
            found.append(_explain(model, inputs, row, position, ours, theirs))
    return found


def first_difference(left: list[int], right: list[int]) -> int | None:
    """The first index at which two lists differ, `None` if they are equal."""
    if left == right:
        return None
    pairs = zip(left, right, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _explain(model: Any, inputs: Mapping[str, Any], row: int, position: int, plain: list[int], other: list[int]) -> Divergence:
    ours = plain[position] if position < len(plain) else None
    theirs = other[position] if position < len(other) else None
    if ours is None or theirs is None:
        return Divergence(row, position, ours, theirs, None)
    scores = _next_scores(model, inputs, row, plain[:position])
    gap = scores.max() - scores[[ours, theirs]].min()
    return Divergence(row, position, ours, theirs, gap.item())


def _next_scores(model: Any, inputs: Mapping[str, Any], row: int, continuation: list[int]) -> torch.Tensor:
    """The target's processed scores `[V]` for the token after a continuation."""
    held = inputs["attention_mask"][row].bool()
    prompt = inputs["input_ids"][row, held]
    tail = torch.tensor(continuation, dtype=prompt.dtype, device=prompt.device)
    if model.config.is_encoder_decoder:
        start = prompt.new_tensor([model.generation_config.decoder_start_token_id])
        given: dict[str, Any] = {"input_ids": prompt[None], "decoder_input_ids": torch.cat([start, tail])[None]}
    else:
        ids = torch.cat([prompt, tail])[None]
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if isinstance(model, SpeculativeGenerationMixin):
        given["speculative"] = False  # whatever the model's generation config says
    # Through `generate`, so that the processors of the model's generation config are applied as they were in the runs.
    output = model.generate(**given, do_sample=False, max_new_tokens=1, output_scores=True, return_dict_in_generate=True)
    scores: torch.Tensor = output.scores[0][0].float()
    return scores
