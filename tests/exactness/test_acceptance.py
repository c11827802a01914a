"""Drafts are accepted as often as theory says: a draft law that is off by a warper stays exact, but shows here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specheads

from ..tiny import perturbed
from .test_monte_carlo import PROMPT, models
from .whole_loop import _prepared

ROWS = 8000


def law(model: PreTrainedModel, ids: Tensor, processors: Any) -> Tensor:
    with torch.no_grad():
        return processors(ids, model(input_ids=ids).logits[:, -1]).softmax(-1)


def expected_acceptance(
    target: PreTrainedModel, draft: PreTrainedModel, draft_temperature: float | None, **arguments: Any
) -> float:
    """The sum of min(p, q) at the second token, averaged over the first."""
    processors = _prepared(target, PROMPT, torch.ones_like(PROMPT), {"max_new_tokens": 3, **arguments})["logits_processor"]
    first = law(target, PROMPT, processors)[0]
    tokens = torch.arange(first.shape[0])
    ids = torch.cat([PROMPT.expand(len(tokens), -1), tokens[:, None]], dim=1)
    changed = {**arguments, **({"temperature": draft_temperature} if draft_temperature else {})}
    own = _prepared(target, PROMPT, torch.ones_like(PROMPT), {"max_new_tokens": 3, **changed})["logits_processor"]
    return float(first @ torch.minimum(law(target, ids, processors), law(draft, ids, own)).sum(-1))


@pytest.mark.parametrize(
    ("arguments", "draft_temperature"),
    [
        ({"top_k": 0}, None),
        ({"top_k": 0, "temperature": 0.5}, None),
        ({"top_k": 6, "temperature": 1.5}, None),
        ({"top_k": 0, "temperature": 0.6}, 1.4),
        ({"top_k": 0}, 0.5),
    ],
)
def test_acceptance_is_the_overlap_of_the_laws(arguments: dict[str, Any], draft_temperature: float | None) -> None:
    target, draft = models()
    ids = PROMPT.expand(ROWS, -1)
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=3,
        pad_token_id=0,
        return_dict_in_generate=True,
        assistant_model=draft,
        speculative={"draft_tokens": 1, "adaptive": False, "per_step": True, "draft_temperature": draft_temperature, "seed": 1},
        **arguments,
    )
    accepted = sum(row.per_step_accepted[1] for row in out.speculation.rows) / ROWS
    expected = expected_acceptance(target, draft, draft_temperature, **arguments)
    assert accepted == pytest.approx(expected, abs=4 * (expected * (1 - expected) / ROWS) ** 0.5)
    assert expected < 0.97


def test_a_temperature_applied_twice_shows() -> None:
    target, draft = models()
    once, twice = (expected_acceptance(target, draft, t, top_k=0, temperature=1.5) for t in (1.5, 1.5**2))
    assert abs(once - twice) > 0.03  # more than the test above allows


def test_pooled_acceptance_does_not_depend_on_the_batch() -> None:
    """A drafter whose cache or positions were off in a ragged batch would be accepted less there."""
    target, draft = models()
    settings = {"draft_tokens": 3, "adaptive": False}
    lengths = [6, 3, 5, 4]
    alone, together = [], []
    ids = torch.zeros(4, 6, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = PROMPT[0, :length], 1
    for seed in range(6):
        arguments = {"do_sample": True, "max_new_tokens": 60, "top_k": 0, "return_dict_in_generate": True, "pad_token_id": 0}
        out = target.generate(
            ids, attention_mask=mask, assistant_model=draft, speculative={**settings, "seed": seed}, **arguments
        )
        together += [row.mean_acceptance_length for row in out.speculation.rows]
        for row, length in enumerate(lengths):
            one = target.generate(
                ids[row : row + 1, -length:],
                attention_mask=mask[row : row + 1, -length:],
                assistant_model=draft,
                speculative={**settings, "seed": 100 + seed},
                **arguments,
            )
            alone.append(one.speculation.mean_acceptance_length)
    assert sum(together) / len(together) == pytest.approx(sum(alone) / len(alone), rel=0.08)


def test_enabled_models_can_draft_for_each_other() -> None:
    target, _ = models()
    draft = specheads.enable(perturbed(target, 0.03), drafter=target)
    out = target.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=21,
        do_sample=False,
        assistant_model=draft,
        speculative={"draft_tokens": 4, "adaptive": False},
        return_dict_in_generate=True,
    )
    assert out.speculation.num_accepted_draft_tokens > 4
