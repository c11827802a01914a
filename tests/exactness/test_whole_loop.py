"""Speculative sampling has the law of plain sampling, to rounding: every branch of the real `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specheads

from .replay import total_variation
from .whole_loop import PADDED, PADDED_MASK, SETTINGS, beginning_with, distance, plain_law, speculative_law, target_and_draft

# name: settings, and whether a draft model is passed
SAMPLED: dict[str, dict[str, Any]] = {
    "chain-match": {"draft_tokens": 2, "verification": "match"},
    "chain-token": {"draft_tokens": 2, "verification": "token"},
    "chain-block": {"draft_tokens": 2, "verification": "block"},
    "tree-match": {"draft_tokens": 2, "tree_nodes": 4, "verification": "match"},
    "tree-token": {"draft_tokens": 2, "tree_nodes": 4, "verification": "token"},
    "tree-traversal": {"draft_tokens": 2, "tree_nodes": 4, "verification": "traversal"},
    "hot-draft": {"draft_tokens": 2, "draft_temperature": 2.0},
    "most-probable-draft": {"draft_tokens": 2, "draft_temperature": 0, "verification": "block"},
}
FREE = ["lookup", "suffix", "recycling", "auto"]
FREE_MODES = ["match", "token", "traversal"]
# Where nothing cuts the law short, the walk begins with one token: the one after which the setting has most to say.
FIRST = {"plain": 2, "repetition": 0, "no_repeat": 0, "stop_rule": 1, "end_token": 1}


def _distance(
    speculative: dict[str, Any], setting: str, batch: int, with_draft: bool, tokens: int, first: int | None = None
) -> float:
    target, draft = target_and_draft()
    speculative = {"adaptive": False, **speculative}
    worst, branches = distance(target, draft if with_draft else None, speculative, setting, batch, tokens, first)
    assert branches > 3
    return worst


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("scheme", SAMPLED)
def test_draft_model(scheme: str, setting: str, batch: int) -> None:
    # A match draws every drafted and every emitted token, and two rows double it all.
    is_short = setting in FIRST and (batch == 2 or scheme.endswith("match"))
    first = None if batch == 1 and is_short else FIRST.get(setting)
    assert _distance(SAMPLED[scheme], setting, batch, True, 3 if is_short else 4, first) < 1e-9


def test_the_walks_from_each_first_token_make_up_the_whole() -> None:
    target, draft = target_and_draft()
    arguments = {"max_new_tokens": 3, "top_k": 0, "assistant_model": draft}
    arguments["speculative"] = {"adaptive": False, **SAMPLED["chain-token"]}
    whole, count = speculative_law(target, PADDED, 1, attention_mask=PADDED_MASK, **arguments)
    parts = [speculative_law(target, PADDED, 1, first=first, attention_mask=PADDED_MASK, **arguments) for first in range(3)]
    assert count == sum(part for _, part in parts)
    for first, (law, _) in enumerate(parts):
        assert law == beginning_with(whole, first)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", FREE_MODES)
@pytest.mark.parametrize("drafter", FREE)
def test_training_free_drafter(drafter: str, mode: str, setting: str) -> None:
    speculative = {"drafter": drafter, "draft_tokens": 2, "tree_nodes": 3, "verification": mode}
    assert _distance(speculative, setting, 1, False, tokens=4) < 1e-9


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", FREE)
def test_training_free_drafter_in_a_batch(drafter: str, setting: str) -> None:
    mode = FREE_MODES[(FREE.index(drafter) + list(SETTINGS).index(setting)) % len(FREE_MODES)]  # each with each, by turns
    speculative = {"drafter": drafter, "draft_tokens": 2, "tree_nodes": 3, "verification": mode}
    assert _distance(speculative, setting, 2, False, tokens=3) < 1e-9


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_our_loop_without_drafts(setting: str, batch: int) -> None:
    assert _distance({"drafter": "none"}, setting, batch, False, tokens=4 if batch == 1 else 3) < 1e-9


@pytest.mark.parametrize("scheme", ["chain-block", "tree-traversal"])
def test_rows_that_go_in_step(scheme: str) -> None:
    """Cutting all rows at the shortest keeps each row's law, whatever the others drew."""
    target, draft = target_and_draft()
    expected = plain_law(target, PADDED, 0, PADDED_MASK, max_new_tokens=3, **SETTINGS["stop_rule"])
    for stream in range(4):
        law, _ = speculative_law(
            target, PADDED, 0, stream, attention_mask=PADDED_MASK, max_new_tokens=3, assistant_model=draft,
            speculative={"adaptive": False, **SAMPLED[scheme]}, **SETTINGS["stop_rule"],
        )  # fmt: skip
        assert total_variation(law, expected) < 1e-9


@pytest.mark.parametrize("vocab_size", [4, 5])
@pytest.mark.parametrize("scheme", ["chain-block", "tree-traversal"])
def test_larger_vocabularies(scheme: str, vocab_size: int) -> None:
    target, draft = target_and_draft(vocab_size)
    assert distance(target, draft, {"adaptive": False, **SAMPLED[scheme]}, "repetition", 1, 3, first=2)[0] < 1e-9


def test_pacing_does_not_touch_the_law() -> None:
    target, draft = target_and_draft()
    assert distance(target, draft, {"draft_tokens": 2, "adaptive": True}, "plain", 1)[0] < 1e-9


def test_the_reference_is_what_transformers_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain law used above equals that of the stock `generate`, whose draws are replayed too."""
    from .replay import ReplayNoise, law_of

    target, _ = target_and_draft()
    specheads.disable(target)
    for setting in ("warped", "repetition", "end_token"):
        arguments = {"max_new_tokens": 3, "top_k": 0, **SETTINGS[setting]}

        def run(noise: ReplayNoise, arguments: dict[str, Any] = arguments) -> tuple[int, ...]:
            def draw(weights: torch.Tensor, num_samples: int) -> torch.Tensor:
                rows = range(weights.shape[0])
                return noise.draw(weights, rows, [0] * len(rows))[:, None]

            with monkeypatch.context() as patch:
                patch.setattr(torch, "multinomial", draw)
                out = target.generate(PADDED[:1], attention_mask=PADDED_MASK[:1], do_sample=True, pad_token_id=0, **arguments)
            return tuple(out[0, PADDED.shape[1] :].tolist())

        law, _ = law_of(run)
        expected = plain_law(target, PADDED[:1], 0, PADDED_MASK[:1], **arguments)
        # The stock loop works in single precision.
        assert total_variation(law, expected) < 1e-6
