"""A draft model reads a text when it is first asked, however much has been said by then and whichever rows are left."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specheads
from specheads.drafters.base import Budget, DraftContext
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.pacing import Pacer

from ..exactness.test_greedy import prompt
from ..tiny import perturbed, tiny

WAITING = 6  # rounds without a draft
LENGTH = 3


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is to be drafted in the first rounds of a call."""
    chosen = Pacer.budget

    def budget(self: Any, context: DraftContext) -> Budget:
        self.round = getattr(self, "round", 0) + 1
        given = chosen(self, context)
        if self.round > WAITING:
            return given
        self.depths = [0] * len(context.rows)
        return Budget(list(self.depths), 0)

    monkeypatch.setattr(Pacer, "budget", budget)


def early_end(said: list[list[int]]) -> int | None:
    """A token that the first row says before drafts begin, and the others not until long after."""
    return next((t for t in said[0][1:WAITING] if all(t not in row[: WAITING + 8] for row in said[1:])), None)


def accepted_late(family: str, batch_size: int) -> list[int]:
    """What the rounds accepted that had a draft of full length; in a batch the first row ends before there is any."""
    inputs, end = prompt(family, batch_size), None
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    for seed in range(20):
        target = tiny(family, seed=seed)
        plain = target.generate(**inputs, **settings, eos_token_id=None)
        end = early_end(plain[:, -24:].tolist())
        if end is not None or batch_size == 1:
            break
    assert batch_size == 1 or end is not None
    end = end if batch_size > 1 else None
    plain = target.generate(**inputs, **settings, eos_token_id=end)
    specheads.enable(target, drafter=perturbed(target, 0.0))
    out = target.generate(
        **inputs, **settings, eos_token_id=end, return_dict_in_generate=True,
        speculative={"draft_tokens": LENGTH, "adaptive": False, "per_step": True},
    )  # fmt: skip
    assert torch.equal(out.sequences, plain)
    rows = out.speculation.rows[1:] if batch_size > 1 else out.speculation.rows
    assert batch_size == 1 or out.speculation.rows[0].num_draft_tokens == 0
    rounds = [pair for row in rows for pair in zip(row.per_step_drafted[:-1], row.per_step_accepted[:-1], strict=True)]
    return [accepted for drafted, accepted in rounds if drafted == LENGTH]


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_a_perfect_model_that_begins_late_is_accepted_whole(family: str, batch_size: int) -> None:
    accepted = accepted_late(family, batch_size)
    assert len(accepted) >= 2 * (batch_size - (batch_size > 1)) and set(accepted) == {LENGTH}


@pytest.mark.usefixtures("waits")
def test_one_that_misses_a_token_of_the_text_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = DraftModelDrafter._text
    monkeypatch.setattr(DraftModelDrafter, "_text", lambda self, *args: [1, *whole(self, *args)][: len(whole(self, *args))])
    assert set(accepted_late("llama", 1)) != {LENGTH}


def test_one_that_is_never_asked_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    draft = perturbed(target)
    passes: list[None] = []
    draft.register_forward_hook(lambda *arguments: passes.append(None))
    specheads.enable(target, drafter=draft)
    for asked in (False, True):
        monkeypatch.setattr(DraftModelDrafter, "depth_within_limit", lambda self, context, budget, asked=asked: 2 * asked)
        target.generate(**prompt("llama", 2), do_sample=False, max_new_tokens=8, speculative={"adaptive": False})
        assert bool(passes) == asked
