"""Greedy decoding is token-identical to plain `generate`: every family, drafter, draft length and batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

import specheads
from specheads.families import FAMILIES, REFUSED, SEEING

from ..tiny import IMAGE_LENGTH, IMAGE_TOKEN, image_inputs, perturbed, sound_inputs, tiny

NEW_TOKENS = 26  # with the prompt, more than three sliding windows
# Tried with every drafter and draft length; the other families with some.
CORE = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gpt2", "opt", "t5"]
ENCODER_DECODERS = ["bart", "marian", "mbart", "mt5", "pegasus", "t5", "umt5"]
DRAFTERS = ["none", "lookup", "suffix", "recycling", "auto", "draft model", "draft tree"]


def prompt(family: str, batch: int) -> dict[str, Tensor]:
    """Prompts of mixed lengths, padded as `generate` wants them."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 12, (batch, 11), generator=generator)
    # Something to copy, for the drafters that look back.
    ids[:, 6:] = ids[:, 1:6]
    mask = torch.ones_like(ids)
    for row, padding in enumerate([0, 4, 1, 7][:batch]):
        hidden = slice(11 - padding, 11) if family in ENCODER_DECODERS else slice(0, padding)
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


def other_target(family: str) -> PreTrainedModel:
    """A model of a family, in double precision where its stock code takes that."""
    target = tiny(family, attention="eager" if family in ("gemma2", "xglm") else "sdpa")
    if hasattr(target, "set_experts_implementation"):
        target.set_experts_implementation("eager")
    return target.float() if family in ("gemma2", "xglm") else target


def other_prompt(family: str, batch: int, target: PreTrainedModel) -> dict[str, Tensor]:
    """Prompts with a picture for models that see, sound for those that hear."""
    if family == "whisper":
        return sound_inputs(batch, target.dtype)
    inputs = prompt(family, batch)
    if family in SEEING:
        seen = torch.randint(3, 12, (batch, IMAGE_LENGTH + 2), generator=torch.Generator().manual_seed(2))
        seen[:, 1:-1] = IMAGE_TOKEN
        ids = torch.cat([inputs["input_ids"], seen], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(seen)], dim=1)
        return {"input_ids": ids, "attention_mask": mask, **image_inputs(family, ids, target.dtype)}
    return inputs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted({*FAMILIES, *SEEING}.difference(CORE)))
def test_other_families_identical_to_plain(family: str) -> None:
    target = specheads.enable(other_target(family))
    draft = perturbed(target, 0.05)
    saved = dict.fromkeys(["suffix", "recycling", "draft model", "draft tree"], 0)
    for batch in (1, 4):
        settings = {**other_prompt(family, batch, target), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        settings["min_new_tokens"] = NEW_TOKENS if batch == 1 else None
        plain, plain_passes = counted(target, settings)
        for drafter, draft_tokens in zip(saved, (3, 2, 4, 3), strict=True):
            text, passes = counted(target, {**settings, **arguments(drafter, draft_tokens, draft, family)})
            assert torch.equal(text, plain), (drafter, batch)
            saved[drafter] += plain_passes - passes
    assert sum(saved.values()) > 0


def counted(target: PreTrainedModel, settings: dict[str, Any]) -> tuple[Tensor, int]:
    """What a call says and how many passes it takes."""
    passes: list[int] = []
    hook = target.register_forward_pre_hook(lambda *_: passes.append(1))
    text = target.generate(**settings)
    hook.remove()
    return text, len(passes)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_families_that_cannot_be_are_refused_by_name(family: str) -> None:
    config = AutoConfig.for_model(family)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        model = model_class(config)
    with pytest.raises(ValueError, match=f"'{family}' models"):
        specheads.enable(model)


def test_bounded_time_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="time_step_limit"):
        specheads.enable(tiny("mamba2", time_step_limit=(0.0, 0.1)))


@pytest.mark.parametrize("batch", [1, 4])
def test_distance_biases(batch: int) -> None:
    target = specheads.enable(tiny("falcon", alibi=True))
    inputs = prompt("falcon", batch)
    plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    for drafter in ("suffix", "draft model"):
        settings = arguments(drafter, 3, perturbed(target, 0.05), "falcon")
        assert torch.equal(target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **settings), plain)


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


@pytest.mark.parametrize("mistake", ["positions", "mask", "window", "rollback", "path"])
def test_the_comparison_sees(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the target's pass, broken on purpose."""
    from specheads.cache import Layout, SlotCache
    from specheads.target import SlotRunner

    if mistake == "positions":
        original_extend = SlotRunner.extend
        monkeypatch.setattr(
            SlotRunner, "extend", lambda self, tokens, depths, visible: original_extend(self, tokens, depths * 0, visible)
        )
    elif mistake == "mask":
        original_mask = SlotRunner._mask
        monkeypatch.setattr(
            SlotRunner, "_mask", lambda self, window, depths, visible: original_mask(self, window, depths, visible | True)
        )
    elif mistake == "window":
        original_window = SlotRunner._mask
        monkeypatch.setattr(
            SlotRunner,
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
        monkeypatch.setattr("specheads.cache.SlotCache._move", lambda self, sources, targets: None)
    target = specheads.enable(tiny("mistral"))
    inputs = prompt("mistral", 4)
    plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    out = target.generate(
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **arguments("draft tree", 4, perturbed(target, 0.05), "mistral")
    )
    assert out.shape != plain.shape or not torch.equal(out, plain)
