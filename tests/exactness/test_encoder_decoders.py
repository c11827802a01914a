"""Encoder-decoder targets: with drafts of their kind, of decoder-only models, and of copies of what the encoder reads."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import specheads
from specheads.drafters import draft_model, growth, known_text
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.rounds import DraftRound

from ..tiny import perturbed, tiny
from .replay import branches, total_variation
from .test_greedy import prompt
from .whole_loop import noise_of

FAMILIES = ["t5", "marian", "bart"]
NEW_TOKENS = 21  # one of the pass over the prompt, and five rounds of four
DRAFT = {"draft_tokens": 3, "adaptive": False}
LENGTHS = (DRAFT, {"draft_tokens": 6}, {"adaptive": True})


def said(target: Any, inputs: dict[str, Tensor], **more: Any) -> Any:
    lengths = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    return target.generate(**inputs, do_sample=False, **lengths, return_dict_in_generate=True, **more)


def identical(target: Any, drafter: Any) -> int:
    """Holds greedy text against plain, alone and in a padded batch. Returns how many drafted tokens were accepted."""
    specheads.enable(target, drafter=drafter)
    accepted = 0
    for batch in (1, 4):
        inputs = prompt("t5", batch)
        plain = said(target, inputs).sequences
        for settings in LENGTHS:
            out = said(target, inputs, speculative={"adaptive": False, **settings})
            assert torch.equal(out.sequences, plain), (batch, settings)
            accepted += out.speculation.num_accepted_draft_tokens
    return accepted


def rounds(target: Any, drafter: Any, inputs: dict[str, Tensor]) -> list[list[DraftRound]]:
    """Per row, its rounds, the pass over the prompt left out."""
    specheads.enable(target, drafter=drafter)
    out = said(target, inputs, speculative={**DRAFT, "per_step_drafts": True})
    return [row.per_step_drafts[1:] for row in out.speculation.rows]


def length_after_the_prompt(target: Any, inputs: dict[str, Tensor], **more: Any) -> float:
    """The mean acceptance length of the rounds that drafted."""
    stats = said(target, inputs, speculative=DRAFT, **more).speculation
    rows = len(inputs["input_ids"])
    return float((stats.num_emitted_tokens - rows) / (stats.num_spec_steps - rows))


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_of_an_encoder_decoder(family: str) -> None:
    target = tiny(family)
    assert identical(target, perturbed(target, 0.05)) > 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_perfect_encoder_decoder_is_accepted_whole(family: str, batch: int) -> None:
    target = tiny(family)
    specheads.enable(target, drafter=perturbed(target, 0.0))
    assert length_after_the_prompt(target, prompt("t5", batch)) == DRAFT["draft_tokens"] + 1
    specheads.enable(target, drafter=perturbed(target, 0.5))
    assert length_after_the_prompt(target, prompt("t5", batch)) < DRAFT["draft_tokens"] + 1


@pytest.mark.parametrize("draft_family", ["llama", "gpt2", "lfm2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_of_a_decoder_only_model(family: str, draft_family: str) -> None:
    identical(tiny(family), tiny(draft_family))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_only_draft_model_sped_up_by_copies(family: str) -> None:
    identical(tiny(family), {"draft": tiny("llama"), "inner": "suffix"})


def follows_source_and_text(family: str) -> bool:
    """Whether each draft is what the draft model says after the encoder's tokens and the decoder's."""
    target, draft = specheads.enable(tiny(family)), tiny("llama")
    inputs = prompt("t5", 3)
    text = said(target, inputs).sequences
    end = target.generation_config.eos_token_id  # which is not to be said
    for row, drafts in enumerate(rounds(target, draft, inputs)):
        source = inputs["input_ids"][row][inputs["attention_mask"][row].bool()]
        length = 2  # the start and what the pass over the prompt said
        for each in drafts:
            given = torch.cat([source, text[row, :length]])[None]
            expected = draft.generate(
                given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=3, suppress_tokens=[end]
            )[0, given.shape[1] :].tolist()
            if each.tokens != expected[: len(each.tokens)]:
                return False
            length += len(each.emitted)
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_only_draft_model_reads_the_encoders_tokens_first(family: str) -> None:
    assert follows_source_and_text(family)


@pytest.mark.parametrize("mistake", ["no source", "source again", "length"])
def test_a_source_that_is_misread_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not change the text, but what is drafted."""
    original = DraftModelDrafter._text
    if mistake == "no source":
        monkeypatch.setattr(draft_model, "encoder_tokens", lambda context, line: [])
    elif mistake == "source again":
        monkeypatch.setattr(DraftModelDrafter, "_text", lambda self, context, line, start=0: original(self, context, line))
    else:
        monkeypatch.setattr(DraftModelDrafter, "_sources", lambda self, context: [[3]] * len(context.rows))
    assert not follows_source_and_text("t5")


def law_distance(draft_family: str, verification: str) -> float:
    """Total variation between speculative and plain sampling: every branch of three tokens."""
    target = specheads.enable(tiny("t5", 3, eos_token_id=None))
    draft = perturbed(target, 0.1) if draft_family == "t5" else tiny(draft_family, 3)
    source = torch.tensor([[2, 1, 2, 0, 1]])
    settings = {"adaptive": False, "draft_tokens": 2, "verification": verification}

    def emitted(noise: Any) -> tuple[int, ...]:
        with noise_of(noise):
            out = target.generate(
                source, attention_mask=torch.ones_like(source), do_sample=True, top_k=0, max_new_tokens=3, pad_token_id=0,
                assistant_model=draft, speculative=settings,
            )  # fmt: skip
        return tuple(out[0, 1:].tolist())

    law: dict[Any, float] = {}
    for probability, result in branches(emitted):
        law[result] = law.get(result, 0.0) + probability
    expected: dict[Any, float] = {}
    for text in product(range(3), repeat=3):
        given = torch.tensor([[target.generation_config.decoder_start_token_id, *text]])
        with torch.no_grad():
            laws = target(input_ids=source, decoder_input_ids=given).logits[0].softmax(dim=-1)
        expected[text] = float(torch.stack([laws[place, token] for place, token in enumerate(text)]).prod())
    return total_variation(law, expected)


@pytest.mark.parametrize("verification", ["block", "match"])
@pytest.mark.parametrize("draft_family", ["t5", "llama"])
def test_the_law_is_kept(draft_family: str, verification: str) -> None:
    assert law_distance(draft_family, verification) < 1e-9


def test_a_law_that_is_not_the_drafts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = growth.over_all_tokens
    monkeypatch.setattr(growth, "over_all_tokens", lambda source, laws, size: original(source, laws, size).flip(-1))
    assert law_distance("llama", "block") > 1e-3


# Copies of what the encoder reads


def copied_text(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Lets the target say nothing but what its encoder reads, token by token; the source has no token twice."""
    return {"prefix_allowed_tokens_fn": lambda row, ids: [int(inputs["input_ids"][row, len(ids) - 1])]}


@pytest.mark.parametrize("family", FAMILIES)
def test_suffix_copies_what_the_encoder_reads(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = specheads.enable(tiny(family), drafter="suffix")
    order = torch.stack([torch.randperm(NEW_TOKENS + 4, generator=torch.Generator().manual_seed(row)) for row in range(2)])
    inputs = {"input_ids": order + 3, "attention_mask": torch.ones_like(order)}
    copying = copied_text(inputs)
    out = said(target, inputs, speculative=DRAFT, **copying)
    assert torch.equal(out.sequences, said(target, inputs, **copying).sequences)
    assert out.sequences[:, 1:].tolist() == inputs["input_ids"][:, :NEW_TOKENS].tolist()
    assert length_after_the_prompt(target, inputs, **copying) > 2
    monkeypatch.setattr(known_text, "encoder_tokens", lambda context, line: [])
    assert length_after_the_prompt(target, inputs, **copying) == 1  # nothing to copy in the text itself


@pytest.mark.parametrize("drafter", ["suffix", "auto", "recycling"])
@pytest.mark.parametrize("family", FAMILIES)
def test_copies_leave_the_text_as_it_is(family: str, drafter: str) -> None:
    assert identical(tiny(family), drafter) > 0


def test_an_encoder_decoder_cannot_draft_for_a_decoder() -> None:
    with pytest.raises(ValueError, match="nothing that its encoder could read"):
        specheads.enable(tiny("llama"), drafter=tiny("t5"))
