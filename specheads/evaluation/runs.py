"""One timed call of `generate`, and what it emitted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

COUNTS = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "num_emitted_tokens")


@dataclass
class Run:
    """One call of `generate`.

    Args:
        rows: Per row, the ids of the continuation, up to and with the token that ended it.
        seconds: How long the call took.
        speculation: Its statistics if it was speculative.
    """

    rows: list[list[int]]
    seconds: float
    speculation: Any = None

    @property
    def tokens(self) -> int:
        """How many tokens were emitted, counted in ids."""
        return sum(len(row) for row in self.rows)

    @property
    def tokens_per_second(self) -> float:
        """The speed of the call, its pass over the prompt included."""
        return self.tokens / self.seconds


def sampling_arguments(temperature: float) -> dict[str, Any]:
    """The arguments of `generate` for a temperature; 0 is greedy. No other warper is left on."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def timed_run(model: Any, inputs: Mapping[str, Any], seed: int, **arguments: Any) -> Run:
    """Calls `generate` and takes the time.

    Args:
        model: The target.
        inputs: Its inputs.
        seed: Set before the call, for those that sample.
        **arguments: Further arguments of `generate`.
    """
    torch.manual_seed(seed)
    _wait_for_device()
    start = time.perf_counter()
    output = model.generate(**inputs, **arguments, return_dict_in_generate=True)
    _wait_for_device()
    seconds = time.perf_counter() - start
    return Run(continuations(model, inputs, output.sequences), seconds, getattr(output, "speculation", None))


def continuations(model: Any, inputs: Mapping[str, Any], sequences: torch.Tensor) -> list[list[int]]:
    """Per row, the ids after the prompt, up to and with the first that ends a text."""
    # An encoder-decoder's output starts with its decoder start token.
    start = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    ends = end_ids(model)
    return [_up_to_end(row, ends) for row in sequences[:, start:].tolist()]


def end_ids(model: Any) -> set[int]:
    """The ids that end a text."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return set()
    return {ends} if isinstance(ends, int) else set(ends)


def _up_to_end(row: list[int], ends: set[int]) -> list[int]:
    length = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
    return row[:length]


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
