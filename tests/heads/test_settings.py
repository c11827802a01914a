"""The settings that a head's config has for calls that draft with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import specheads
from specheads import EagleHead
from tests.tiny import tiny

SAVED = {"draft_tokens": 3, "tree_nodes": 9}


def head_with(target: Any, settings: Any) -> EagleHead:
    return EagleHead.from_target(target, speculative=settings)


def settings_of(target: Any) -> specheads.SpeculativeConfig:
    return target._speculation.config  # type: ignore[no-any-return]


def test_they_hold_where_nothing_else_is_said(tmp_path: Path) -> None:
    target = tiny()
    head_with(target, SAVED).save_pretrained(tmp_path)
    for drafter in (str(tmp_path), head_with(target, SAVED), specheads.load_drafter(tmp_path, target)):
        found = settings_of(specheads.enable(target, drafter=drafter))
        assert (found.draft_tokens, found.tree_nodes, found.adaptive) == (3, 9, True)
    found = settings_of(specheads.enable(target, drafter=str(tmp_path), tree_nodes=None, adaptive=False))
    assert (found.draft_tokens, found.tree_nodes, found.adaptive) == (3, None, False)
    specheads.enable(target, drafter=head_with(target, None))
    assert settings_of(target) == specheads.SpeculativeConfig()


def test_a_call_has_the_last_word() -> None:
    target = tiny()
    specheads.enable(target, drafter=head_with(target, {**SAVED, "adaptive": False}))
    prompt = {"input_ids": target.dummy_inputs["input_ids"][:1], "max_new_tokens": 12, "do_sample": False}
    drafted = []
    for speculative in (True, {"tree_nodes": None}, specheads.SpeculativeConfig(draft_tokens=1, adaptive=False)):
        out = target.generate(**prompt, eos_token_id=None, speculative=speculative, return_dict_in_generate=True)
        drafted.append(out.speculation.num_draft_tokens / out.speculation.num_spec_steps)
    assert drafted[0] > 3 >= drafted[1] > 1 >= drafted[2] > 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("fast", "must be None or have fields of SpeculativeConfig"),
        ({"drafter": "auto"}, "other than `drafter`"),
        ({"tree_node": 3}, "Unknown speculative option"),
        ({"tree_nodes": 0}, "`tree_nodes` must be an integer of at least 1"),
    ],
)
def test_what_is_no_setting_is_refused(settings: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        head_with(tiny(), settings)
