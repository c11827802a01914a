"""The real `generate`, every branch of it, against plain decoding worked out from the model's logits alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import specheads
from specheads import preparation

from ..tiny import perturbed, tiny
from .replay import ReplayNoise, branches, total_variation

SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}
PROMPT = torch.tensor([[1, 0, 1]])
PADDED = torch.tensor([[1, 0, 1], [0, 0, 1]])
PADDED_MASK = torch.tensor([[1, 1, 1], [0, 1, 1]])


class StopAfterPair(StoppingCriteria):
    """Stops a row whose last two tokens are the given ones."""

    def __init__(self, first: int, second: int):
        self.pair = torch.tensor([first, second])

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, -2:] == self.pair).all(dim=1)


# name: arguments of `generate`
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warped": {"temperature": 0.7, "top_k": 2},
    "top_p": {"top_p": 0.8},
    "repetition": {"repetition_penalty": 1.7},
    "no_repeat": {"no_repeat_ngram_size": 3},
    "end_token": {"eos_token_id": 2},
    "stop_rule": {"stopping_criteria": StoppingCriteriaList([StopAfterPair(1, 0)])},
}


def target_and_draft(vocab_size: int = 3) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A small model, enabled, and one close to it."""
    target = tiny("llama", vocab_size, spread=0.9, **SMALL, eos_token_id=None)
    return specheads.enable(target), perturbed(target, 0.4)


@contextlib.contextmanager
def noise_of(noise: ReplayNoise) -> Iterator[None]:
    """Makes the library draw from `noise`."""
    original = preparation.noise_for
    preparation.noise_for = lambda config, batch_size: noise
    try:
        yield
    finally:
        preparation.noise_for = original


def speculative_law(
    model: PreTrainedModel, ids: Tensor, watched: int, stream: int = 0, first: int | None = None, **arguments: Any
) -> tuple[dict[Any, float], int]:
    """The exact law of one row's continuation, or the part of it that begins with a token, and the number of branches."""

    def run(noise: ReplayNoise) -> tuple[int, ...]:
        with noise_of(noise):
            out = model.generate(ids, do_sample=True, return_dict_in_generate=True, pad_token_id=0, **arguments)
        ends = out.speculation.rows[watched].num_emitted_tokens
        return tuple(out.sequences[watched, ids.shape[1] :].tolist()[:ends])

    law: dict[Any, float] = {}
    count = 0
    for probability, result in branches(run, watched, stream, first):
        law[result] = law.get(result, 0.0) + probability
        count += 1
    return law, count


def beginning_with(law: dict[Any, float], first: int | None) -> dict[Any, float]:
    """The part of a law whose continuations begin with a token; all of it for `None`."""
    return {result: probability for result, probability in law.items() if first in (None, result[0])}


def plain_law(model: PreTrainedModel, ids: Tensor, row: int, mask: Tensor | None, **arguments: Any) -> dict[Any, float]:
    """The law of one row's continuation under plain decoding: no cache, no batch of drafts, one prefix at a time."""
    prepared = _prepared(model, ids, mask, arguments)
    processors, criteria = prepared["logits_processor"], prepared["stopping_criteria"]
    kept = torch.ones(ids.shape[1], dtype=torch.bool) if mask is None else mask[row].bool()
    law: dict[Any, float] = {}

    def extend(continuation: list[int], probability: float) -> None:
        tokens = torch.cat([ids[row][kept], torch.tensor(continuation, dtype=torch.long)])
        logits = model(input_ids=tokens[None]).logits[0, -1]
        # Rows beside it do not matter to a row: the processors get it repeated.
        shown = torch.cat([ids[row], torch.tensor(continuation, dtype=torch.long)]).expand(ids.shape[0], -1)
        scores = processors(shown, logits.expand(ids.shape[0], -1).clone())[row]
        for token, more in enumerate(scores.softmax(-1).tolist()):
            if not more:
                continue
            longer = [*continuation, token]
            grown = torch.cat([ids[row], torch.tensor(longer)]).expand(ids.shape[0], -1)
            if bool(criteria(grown, None)[row]):
                law[tuple(longer)] = law.get(tuple(longer), 0.0) + probability * more
            else:
                extend(longer, probability * more)

    with torch.no_grad():
        extend([], 1.0)
    return law


class _Captured(Exception):
    pass


def _prepared(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """The processors and criteria that `generate` builds."""
    captured: dict[str, Any] = {}
    cls = type(model)
    original: Callable[..., Any] = cls.__dict__.get("_sample", None)

    def capture(self: Any, input_ids: Tensor, **kwargs: Any) -> None:
        captured.update(kwargs)
        raise _Captured

    cls._sample = capture
    try:
        model.generate(ids, attention_mask=mask, do_sample=True, pad_token_id=0, **arguments)
    except _Captured:
        pass
    finally:
        if original is None:
            del cls._sample
        else:
            cls._sample = original
    return captured


def distance(
    model: PreTrainedModel,
    draft: PreTrainedModel | None,
    speculative: dict[str, Any],
    setting: str,
    batch: int,
    tokens: int = 4,
    first: int | None = None,
) -> tuple[float, int]:
    """Total variation between speculative and plain sampling, the worst over the rows, and the number of branches.

    With `first`, only of what begins with that token. It comes from the prompt's pass, before anything is drafted.
    """
    ids, mask = (PROMPT, torch.ones_like(PROMPT)) if batch == 1 else (PADDED, PADDED_MASK)
    arguments = {"max_new_tokens": tokens, "top_k": 0, **SETTINGS[setting]}
    worst, count = 0.0, 0
    for row in range(batch):
        expected = beginning_with(plain_law(model, ids, row, mask, **arguments), first)
        law, branches_of_row = speculative_law(
            model, ids, row, first=first, attention_mask=mask, speculative=speculative, assistant_model=draft, **arguments
        )
        worst, count = max(worst, total_variation(law, expected)), count + branches_of_row
    return worst, count


def differs(model: PreTrainedModel, draft: PreTrainedModel, speculative: dict[str, Any], setting: str) -> bool:
    """Whether `distance` is more than rounding: looked for in short texts first, and no further than needed."""
    parts = [(tokens, first) for tokens in (3, 4) for first in range(model.config.vocab_size)]
    return any(distance(model, draft, speculative, setting, 1, *part)[0] > 1e-3 for part in parts)
