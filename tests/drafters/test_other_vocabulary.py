"""Draft models with another tokenizer: how texts are read, what is drafted, and that the model stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import specheads
from specheads.drafters.other_vocabulary import OtherVocabularyDrafter
from specheads.drafters.translation import LOOK_BEHIND, Reading, Translation

from ..exactness.test_greedy import prompt as prompts
from ..tiny import tiny
from .vocabularies import LETTERS, TEXT, byte_level, reworded, spelling

OURS, THEIRS = byte_level(420), byte_level(330, TEXT[::-1] + TEXT, end="<stop>")
BETWEEN = Translation(OURS, THEIRS, (len(OURS), len(THEIRS)))


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Tokens with a mark for a space, and bytes by their numbers."""
    names = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "h", "e", "the", "\u2581lazy"]
    tokenizer = Tokenizer(BPE({name: index for index, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def test_shared_tokens_stand_for_the_same_bytes() -> None:
    names = OURS.get_vocab(), THEIRS.get_vocab()
    both = names[0].keys() & names[1].keys()
    ends = (OURS.eos_token_id, THEIRS.eos_token_id)
    assert BETWEEN.pairs == {**{names[0][name]: names[1][name] for name in both}, ends[0]: ends[1]}
    assert 256 < len(BETWEEN.pairs) < min(len(OURS), len(THEIRS))
    assert len(set(BETWEEN.pairs.values())) == len(BETWEEN.pairs)
    pieces = sentence_pieces()
    across = Translation(OURS, pieces, (len(OURS), len(pieces))).pairs
    theirs = pieces.get_vocab()
    assert across[names[0]["\u0120the"]] == theirs["\u2581the"]
    assert across[names[0]["Z"]] == theirs["<0x5A>"]
    assert OURS.eos_token_id not in across  # the other has none


@settings(max_examples=60)
@given(
    prompt=st.integers(0, 90),
    pieces=st.lists(st.sampled_from([*TEXT.split(), " ", "東京", "é", "\n\n", "x"]), min_size=40, max_size=120),
)
def test_what_is_read_is_the_text(prompt: int, pieces: list[str]) -> None:
    """Wherever the prompt ends and however the text grows; and a draft comes back as the target would say it."""
    text, more = "".join(pieces), " lazy dog and é back"
    ids = OURS(text).input_ids
    reading = Reading(BETWEEN, ids[:prompt])
    for place in range(prompt, len(ids), 3):
        reading.extend(ids[place : place + 3])
    assert THEIRS.decode(reading.ids) == text
    assert OURS.decode(BETWEEN.to_target(ids[-LOOK_BEHIND:], THEIRS(more).input_ids)) == more


def test_a_long_text_is_settled_and_read_once() -> None:
    ids = OURS(TEXT * 3).input_ids
    reading = Reading(BETWEEN, ids[:20])
    for token in ids[20:]:
        reading.extend([token])
        assert len(reading.open) <= 3 * LOOK_BEHIND
    assert THEIRS.decode(reading.ids) == TEXT * 3


def test_the_boundary_of_a_draft() -> None:
    assert (
        BETWEEN.to_target(OURS("The la").input_ids, THEIRS("zy dog").input_ids)
        in (
            OURS("zy dog").input_ids,  # a token of the target's spans the boundary, or none does
            OURS("The lazy dog").input_ids[len(OURS("The la").input_ids) :],
        )
    )
    end = THEIRS.eos_token_id
    assert BETWEEN.to_target(OURS("The").input_ids, [*THEIRS(" dog").input_ids, end, 5]) == [
        *OURS(" dog").input_ids,
        OURS.eos_token_id,
    ]
    half, other = "é".encode()
    ours, theirs = ({value: key for key, value in text.bytes_of.items()} for text in (BETWEEN.target, BETWEEN.draft))
    assert OURS.decode([ours[bytes([half])], *BETWEEN.to_target([ours[bytes([half])]], [theirs[bytes([other])]])]) == "é"
    assert BETWEEN.to_target(OURS("a").input_ids, [theirs[bytes([half])]]) == []  # half a character is no draft


def letters_and_draft(lacking: int = 0) -> tuple[Any, dict[str, Any]]:
    """A target of 32 letters, and a draft model like it that has these in another order, the last ones not, and two more."""
    target = specheads.enable(tiny())
    theirs = ["?", *reversed(LETTERS[: 32 - lacking]), "!"]
    places = [theirs.index(letter) if letter in theirs else -1 for letter in LETTERS]
    draft = reworded(target, places, len(theirs), amount=0.0)
    tokenizers = {"tokenizer": spelling(LETTERS), "assistant_tokenizer": spelling(theirs)}
    return target, {"assistant_model": draft, **tokenizers}


@pytest.mark.parametrize("speculation", [{}, {"tree_nodes": 9}])
@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "top_k": 4}, {"do_sample": True, "repetition_penalty": 1.2}])
def test_a_draft_with_the_targets_own_weights_is_accepted(sampled: dict[str, Any], speculation: dict[str, Any]) -> None:
    """Ragged rows, whose texts are of other lengths to the draft model; and the model, whatever it drafts, is not changed."""
    target, more = letters_and_draft()
    draft = more["assistant_model"]
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    config = copy.deepcopy(draft.generation_config.to_dict())
    out = target.generate(
        **prompts("llama", 4), max_new_tokens=40, return_dict_in_generate=True, eos_token_id=None, pad_token_id=0, **more,
        **{"do_sample": False, **sampled}, speculative={"draft_tokens": 3, "adaptive": False, **speculation},
    )  # fmt: skip
    assert out.speculation.mean_acceptance_length > 3.6  # 40 tokens in 11 rounds of 4
    assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())
    assert draft.generation_config.to_dict() == config


def two_models() -> list[tuple[Any, Any]]:
    """Two models that have nothing in common, with tokenizers of their own for the same bytes."""
    return [
        (tiny("llama", vocab_size=len(OURS), eos_token_id=OURS.eos_token_id), OURS),
        (tiny("gpt2", vocab_size=len(THEIRS), eos_token_id=THEIRS.eos_token_id), THEIRS),
    ]


@pytest.mark.parametrize("is_swapped", [False, True])
def test_either_of_two_models_drafts_for_the_other(is_swapped: bool) -> None:
    """Greedy text is plain's, and keyed sampling what it is without a drafter, whichever of the two is the target."""
    (target, tokenizer), (draft, other) = two_models()[:: -1 if is_swapped else 1]
    specheads.enable(target, drafter=draft, tokenizer=tokenizer, assistant_tokenizer=other)
    tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(
        ["The quick brown fox", "the lazy dog and the lazy"], return_tensors="pt", padding=True, padding_side="left"
    )
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    length = {"max_new_tokens": 24, "pad_token_id": tokenizer.eos_token_id}
    plain = target.generate(**inputs, **length, do_sample=False)
    drafted = 0
    for speculation in ({"draft_tokens": 3, "adaptive": False}, {"draft_tokens": 4, "tree_nodes": 9, "adaptive": False}):
        out = target.generate(**inputs, **length, do_sample=False, speculative=speculation, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain)
        drafted += out.speculation.num_draft_tokens
    assert drafted > 0
    keyed = {"sampling_noise": "keyed", "seed": 5, "adaptive": False}
    ours = target.generate(**inputs, **length, do_sample=True, speculative=keyed)
    assert torch.equal(ours, target.generate(**inputs, **length, do_sample=True, speculative={**keyed, "drafter": "none"}))


def test_tokens_that_are_all_forbidden_do_no_harm() -> None:
    target, more = letters_and_draft(lacking=1)
    forbidden = list(range(31))  # all that the two share
    arguments = {
        **prompts("llama", 2),
        "max_new_tokens": 6,
        "do_sample": True,
        "suppress_tokens": forbidden,
        "eos_token_id": None,
    }
    out = target.generate(**arguments, pad_token_id=0, **more, speculative={"draft_tokens": 2, "adaptive": False})
    assert set(out[:, 11:].flatten().tolist()) == {31}


def test_keyed_noise_is_the_same_with_every_drafter() -> None:
    target, more = letters_and_draft()
    arguments = {**prompts("llama", 2), "max_new_tokens": 20, "do_sample": True, "eos_token_id": None, "pad_token_id": 0}
    keyed = {"sampling_noise": "keyed", "seed": 3}
    ours = target.generate(**arguments, **more, speculative=keyed)
    assert torch.equal(ours, target.generate(**arguments, speculative={**keyed, "drafter": "none"}))


def test_without_shared_tokens_what_is_written_is_encoded_anew() -> None:
    """Also when sampling: the law of what comes out is not known, so it is verified by match."""
    target, _ = letters_and_draft()
    draft = tiny(vocab_size=16)
    more = {"tokenizer": spelling(LETTERS), "assistant_tokenizer": spelling("0123456789@#$%&*")}
    for sampled in ({"do_sample": False}, {"do_sample": True}):
        out = target.generate(
            **prompts("llama", 2), max_new_tokens=6, assistant_model=draft, **more, **sampled, speculative=True
        )
        assert out.shape[1] <= 17


def test_what_cannot_be_is_refused() -> None:
    target, more = letters_and_draft()
    tokenizers = {name: more[name] for name in ("tokenizer", "assistant_tokenizer")}
    for family, reason in (("bloom", "'bloom' is not"), ("mamba2", "'mamba2' is not"), ("t5", "encoder-decoder")):
        with pytest.raises(ValueError, match=reason):
            specheads.enable(target, drafter=tiny(family, vocab_size=34), **tokenizers)
    with pytest.raises(ValueError, match="pass `tokenizer=` and `assistant_tokenizer=`"):
        specheads.enable(target, drafter=more["assistant_model"])
    drafter = specheads.load_drafter(more["assistant_model"], target, **tokenizers)
    assert isinstance(drafter, OtherVocabularyDrafter)
