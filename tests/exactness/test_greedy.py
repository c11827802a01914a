"""Greedy decoding is token-identical to plain `generate`: every family, drafter, draft length and batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specheads
from specheads.target import FAMILIES

from ..tiny import perturbed, tiny

NEW_TOKENS = 26  # with the prompt, more than three sliding windows
# Tried with every drafter and draft length; the other families with some.
CORE = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gpt2", "opt", "t5"]
DRAFTERS = ["none", "lookup", "suffix", "recycling", "auto", "draft model", "draft tree"]


def prompt(family: str, batch: int) -> dict[str, Tensor]:
    """Prompts of mixed lengths, padded as `generate` wants them."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 12, (batch, 11), generator=generator)
    # Something to copy, for the drafters that look back.
    ids[:, 6:] = ids[:, 1:6]
    mask = torch.ones_like(ids)
    for row, padding in enumerate([0, 4, 1, 7][:batch]):
        hidden = slice(0, padding) if family != "t5" else slice(11 - padding, 11)
        mask[row, hidden] = 0
        ids[row, hidden] = 0
    return {"input_ids": ids, "attention_mask": mask}


def arguments(drafter: str, draft_tokens: int, draft: PreTrainedModel, family: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"draft_tokens": draft_tokens, "adaptive": False}
    if drafter == "draft model":
        return {"speculative": settings, "assistant_model": draft}
    if drafter == "draft tree":
        return {"speculative": {**settings, "tree_nodes": 2 * draft_tokens + 1}, "assistant_model": draft}
    if draft_tokens % 2:
        settings["tree_nodes"] = 3 * draft_tokens
    return {"speculative": {**settings, "drafter": drafter}}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", CORE)
def test_identical_to_plain(family: str, drafter: str, attention: str) -> None:
    lengths = range(1, 9) if attention == "sdpa" else [3, 8]
    target = specheads.enable(tiny(family, attention=attention))
    if attention == "eager":
        # Stock eager attention turns double-precision masks into -inf, and left padding into NaN.
        target.float()
    draft = perturbed(target, 0.05)
    single = {name: value[:1] for name, value in prompt(family, 4).items()}
    accepted = 0
    for inputs in (single, prompt(family, 4)):
        plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        for draft_tokens in lengths:
            out = target.generate(
                **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True,
                **arguments(drafter, draft_tokens, draft, family),
            )  # fmt: skip
            assert torch.equal(out.sequences, plain), (draft_tokens, inputs["input_ids"].shape[0])
            accepted += out.speculation.num_accepted_draft_tokens
    assert (accepted > 0) == (drafter != "none")


# Stock eager attention and stock experts do not take double precision (with left padding, in the former's case).
SINGLE_PRECISION = {"gemma2", "mixtral", "qwen3_moe"}


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(CORE)))
def test_other_families_identical_to_plain(family: str) -> None:
    target = tiny(family, attention="eager" if family == "gemma2" else "sdpa")
    if family in SINGLE_PRECISION:
        target.float()
    draft = perturbed(specheads.enable(target), 0.05)
    accepted = dict.fromkeys(["recycling", "draft model", "draft tree"], 0)
    for batch in (1, 4):
        inputs = prompt(family, batch)
        plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        for drafter in accepted:
            for draft_tokens in (1, 3, 8):
                settings = arguments(drafter, draft_tokens, draft, family)
                settings |= {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
                out = target.generate(**inputs, **settings)
                assert torch.equal(out.sequences, plain), (drafter, draft_tokens, batch)
                accepted[drafter] += out.speculation.num_accepted_draft_tokens
    assert all(accepted.values())


def test_distance_biases_are_refused() -> None:
    with pytest.raises(ValueError, match="ALiBi"):
        specheads.enable(tiny("falcon", alibi=True))


@pytest.mark.parametrize("drafter", ["draft model", "draft tree", "auto"])
@pytest.mark.parametrize("family", CORE)
def test_a_row_is_what_it_is_alone(family: str, drafter: str) -> None:
    target = specheads.enable(tiny(family))
    draft = perturbed(target, 0.05)
    inputs = prompt(family, 4)
    together = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **arguments(drafter, 4, draft, family))
    for row in range(4):
        kept = inputs["attention_mask"][row].bool()
        alone = target.generate(
            inputs["input_ids"][row][kept][None], attention_mask=torch.ones(1, int(kept.sum()), dtype=torch.long),
            max_new_tokens=NEW_TOKENS, do_sample=False, **arguments(drafter, 4, draft, family),
        )  # fmt: skip
        start = inputs["input_ids"].shape[1] if family != "t5" else 1
        own = alone[0, int(kept.sum()) if family != "t5" else 1 :]
        assert together[row, start:][: len(own)].tolist() == own.tolist()
        assert set(together[row, start:][len(own) :].tolist()) <= {0}


def test_a_family_not_proven_is_refused_by_name() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=16, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="'bloom'"):
        specheads.enable(model)


@pytest.mark.parametrize("mistake", ["positions", "mask", "window", "rollback", "path"])
def test_the_comparison_sees(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the target's pass, broken on purpose."""
    from specheads.cache import Layout, SlotCache
    from specheads.target import ModelRunner

    if mistake == "positions":
        original_extend = ModelRunner.extend
        monkeypatch.setattr(
            ModelRunner, "extend", lambda self, tokens, depths, visible: original_extend(self, tokens, depths * 0, visible)
        )
    elif mistake == "mask":
        original_mask = ModelRunner._mask
        monkeypatch.setattr(
            ModelRunner, "_mask", lambda self, window, depths, visible: original_mask(self, window, depths, visible | True)
        )
    elif mistake == "window":
        original_window = ModelRunner._mask
        monkeypatch.setattr(
            ModelRunner,
            "_mask",
            lambda self, window, depths, visible: original_window(self, window and window - 1, depths, visible),
        )
        monkeypatch.setattr(Layout, "first", lambda self, window: 0)
    elif mistake == "rollback":
        original_commit = SlotCache.commit
        monkeypatch.setattr(
            SlotCache,
            "commit",
            lambda self, kept: original_commit(self, [[*slots, len(slots)] if slots else [] for slots in kept]),
        )
    else:
        monkeypatch.setattr("specheads.cache.SlotLayer.gather_slots", lambda self, sources, targets: None)
    target = specheads.enable(tiny("mistral"))
    inputs = prompt("mistral", 4)
    plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    out = target.generate(
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **arguments("draft tree", 4, perturbed(target, 0.05), "mistral")
    )
    assert out.shape != plain.shape or not torch.equal(out, plain)
