"""A draft model that copies are drafted for: its law stays its own, and the output's the target's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specheads
from specheads.drafters import load_drafter, staged
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.tree import DraftTree

from ..tiny import perturbed, tiny
from .replay import branches, total_variation
from .test_greedy import NEW_TOKENS, prompt
from .whole_loop import distance, noise_of, target_and_draft

# A text that repeats itself, so that there is something to copy; and a shorter row beside it.
REPEATS = torch.tensor([[1, 0, 2, 1, 0], [0, 0, 1, 2, 1]])
REPEATS_MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])


def enabled(inner: str | None, seed: int = 1) -> PreTrainedModel:
    target, draft = target_and_draft()
    return specheads.enable(target, drafter=load_drafter(draft, target, **({} if inner is None else {"inner": inner})))


def draft_law(inner: str | None, patch: pytest.MonkeyPatch, batch: int, draft_tokens: int = 3) -> dict[Any, float]:
    """The law of the first row's first draft."""
    target = enabled(inner)
    kind = DraftModelDrafter if inner is None else staged.StagedDrafter
    propose, drafts = kind.propose, []

    def noted(self: Any, *arguments: Any) -> DraftTree:
        drafts.append(propose(self, *arguments))
        return drafts[-1]

    def run(noise: Any) -> tuple[int, ...]:
        drafts.clear()
        with noise_of(noise):
            out = target.generate(
                REPEATS[:batch], attention_mask=REPEATS_MASK[:batch], do_sample=True, top_k=0, pad_token_id=0,
                max_new_tokens=draft_tokens + 2, speculative={"draft_tokens": draft_tokens, "adaptive": False},
            )  # fmt: skip
        return (int(out[0, REPEATS.shape[1]]), *drafts[0].tokens[0].tolist())

    law: dict[Any, float] = {}
    with patch.context() as inner_patch:
        inner_patch.setattr(kind, "propose", noted)
        inner_patch.setattr("specheads.loop.settle", cut_short)
        for probability, result in branches(run, 0 if batch > 1 else None):
            law[result] = law.get(result, 0.0) + probability
    return law


def cut_short(tree: DraftTree, laws: Any, noise: Any, rows: Any, positions: Any, carry: bool) -> Any:
    """All of the draft is taken, and one token besides: what comes after it is of no interest."""
    from specheads.verify import Verdict

    paths = [list(range(1, tree.size + 1)) for _ in rows]
    emitted = [[*line, 0] for line in tree.tokens.tolist()]
    return Verdict(paths, emitted, [tree.size] * len(paths), [tree.depth] * len(paths))


def everything_visible(self: Any, chains: Any, written: int, size: int, device: Any) -> Tensor:
    """Copies that did not hold stay in sight."""
    visible = torch.ones(len(chains), size, written + size, dtype=torch.bool)
    visible[:, :, written:] = torch.ones(size, size, dtype=torch.bool).tril()
    return visible


@pytest.mark.parametrize("batch", [1, 2])
def test_the_draft_models_law_is_its_own(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = draft_law(None, monkeypatch, batch)
    assert len(plain) == 3**4
    assert total_variation(draft_law("suffix", monkeypatch, batch), plain) < 1e-9
    monkeypatch.setattr(staged.StagedDrafter, "_visible", everything_visible)
    assert total_variation(draft_law("suffix", monkeypatch, batch), plain) > 1e-6


@pytest.mark.parametrize(
    ("mode", "setting", "batch"), [("block", "warped", 1), ("token", "repetition", 1), ("block", "warped", 2)]
)
def test_replay(mode: str, setting: str, batch: int) -> None:
    speculative = {"draft_tokens": 2, "adaptive": False, "verification": mode}
    assert (
        distance(enabled("suffix"), None, speculative, setting, batch, 4 if setting == "warped" and batch == 1 else 3)[0] < 1e-9
    )


def test_a_copy_that_passes_for_a_drawn_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "draw", lambda context, law, lines, depth: law.argmax(dim=-1))
    speculative = {"draft_tokens": 2, "adaptive": False, "verification": "block"}
    assert distance(enabled("suffix"), None, speculative, "plain", 1, 3)[0] > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "opt"])
def test_greedy_text_is_plain_for_fewer_passes(family: str) -> None:
    target = specheads.enable(tiny(family))
    draft = perturbed(target, 0.02)
    for batch in (1, 4):
        inputs = prompt(family, batch)
        settings = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False}
        plain = target.generate(**settings)
        passes, lengths = [], []
        for options in ({}, {"inner": "suffix"}):
            specheads.enable(target, drafter=load_drafter(draft, target, **options))
            count: list[int] = []
            hook = draft.register_forward_pre_hook(lambda *_, count=count: count.append(1))
            speculative = {"draft_tokens": 6, "adaptive": False}
            out = target.generate(**settings, speculative=speculative, return_dict_in_generate=True)
            hook.remove()
            assert torch.equal(out.sequences, plain)
            passes.append(len(count))
            lengths.append(out.speculation.mean_acceptance_length)
        assert lengths[0] == lengths[1]
        assert passes[1] < passes[0]


def test_what_is_wrong_is_said() -> None:
    target, draft = target_and_draft()
    assert isinstance(load_drafter({"draft": draft, "inner": "suffix"}, target), staged.StagedDrafter)
    with pytest.raises(ValueError, match="must be one of suffix, got 'auto'"):
        load_drafter(draft, target, inner="auto")
    with pytest.raises(ValueError, match="must have a `draft` and an `inner`"):
        load_drafter({"draft": draft}, target)
    for name, said in (
        ("suffix", "got 'suffix'"),
        ("some/head", "got 'some/head'"),
        (None, "got NoneType"),
        (draft.config, "got L"),
    ):
        with pytest.raises(TypeError, match=rf"must be a draft model, {said}.*from_pretrained"):
            load_drafter({"draft": name, "inner": "suffix"}, target)
    with pytest.raises(TypeError, match="inner: a list of draft models takes `branches`"):
        load_drafter([draft], target, inner="suffix")
    with pytest.raises(ValueError, match=r"T5.* takes chains in step"):
        load_drafter(tiny("t5"), tiny("t5"), inner="suffix")
