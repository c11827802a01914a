"""Faults that users of speculative decoding reported elsewhere, each as its whole kind.

`docs/reported_faults.md` lists the reports with the test of each. Here are those that no other file has, and the check that the
page names tests that exist.
"""

from __future__ import annotations

import ast
import copy
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
    WhisperFeatureExtractor,
    pipeline,
)

import specheads
from specheads import compat, mixin
from specheads.drafters import DraftContext, growth
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.tree import DraftTree

from .drafters.vocabularies import spelling
from .exactness import test_verifier, whole_loop
from .exactness.replay import ReplayNoise, law_of, total_variation
from .exactness.test_greedy import arguments, prompt
from .exactness.whole_loop import PADDED, PADDED_MASK, PROMPT, plain_law, speculative_law, target_and_draft
from .test_caches import assert_same_cache
from .test_generate import Recorder, letters
from .test_hostile import Own
from .test_kinds import assert_same, loaded
from .tiny import perturbed, sound_inputs, tiny

DRAFT = {"draft_tokens": 4, "adaptive": False}
TREE = {**DRAFT, "tree_nodes": 9}
GREEDY = {"max_new_tokens": 20, "do_sample": False}
SHORT_CHAIN = {"draft_tokens": 2, "adaptive": False}
SHORT_TREE = {**SHORT_CHAIN, "tree_nodes": 4}


class Vocabulary:
    """All that is asked of a tokenizer."""

    def __init__(self, tokens: str = ""):
        self.tokens = {token: index for index, token in enumerate(tokens)}

    def get_vocab(self) -> dict[str, int]:
        return self.tokens


PADDED_ONLY = {"tokenizer": Vocabulary(), "assistant_tokenizer": Vocabulary()}


# ---- arguments that are dropped in silence


def both(target: Any, given: dict[str, Any], draft: Any, **speculation: Any) -> tuple[Any, Any]:
    return target.generate(**given), target.generate(**given, speculative={**DRAFT, **speculation}, assistant_model=draft)


CHOICE = {"do_sample": True, "top_k": 1, "max_new_tokens": 20}
# A value of each setting that changes what plain `generate` returns for these prompts.
HONOURED: dict[str, dict[str, Any]] = {
    "bad_words_ids": {"bad_words_ids": [[3], [5], [9], [31]]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [31, 5, 4, 12, 6]},
    "do_sample": {"do_sample": True, "top_k": 1, "repetition_penalty": 1.6},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "eos_token_id": {"eos_token_id": [5, 31, 12]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.4)},
    "forced_bos_token_id": {"forced_bos_token_id": 6},
    "forced_eos_token_id": {"forced_eos_token_id": 6},
    "guidance_scale": {"guidance_scale": 1.8},
    "max_length": {"max_new_tokens": None, "max_length": 21},
    "max_new_tokens": {"max_new_tokens": 7},
    "max_time": {"max_time": 0.0},
    "min_length": {"min_length": 18, "eos_token_id": [2, 31, 8]},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [2, 31, 8]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "num_return_sequences": {**CHOICE, "num_return_sequences": 3},
    "pad_token_id": {"pad_token_id": 3, "eos_token_id": [5, 31, 12]},
    "prefill_chunk_size": {"prefill_chunk_size": 3},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "sequence_bias": {"sequence_bias": [[[7], 2.0], [[5, 9], -4.0]]},
    "stop_strings": {"stop_strings": ["f"], "tokenizer": letters()},
    "suppress_tokens": {"suppress_tokens": [31, 5, 4]},
    "use_cache": {"use_cache": False},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=3.0)},
}
SAME_TEXT = {"prefill_chunk_size", "remove_invalid_values", "renormalize_logits", "use_cache"}
# Their laws, or what they return, are compared elsewhere.
COMPARED_ELSEWHERE = {
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
}
REFUSED: dict[str, dict[str, Any]] = {
    "assistant_early_exit": {"assistant_early_exit": 1},
    "cache_implementation": {"cache_implementation": "static"},
    "constraints": {"constraints": [object()], "num_beams": 2},
    "dola_layers": {"dola_layers": "low"},
    "force_words_ids": {"force_words_ids": [[5]], "num_beams": 2},
    "num_beams": {"num_beams": 2},
    "penalty_alpha": {"penalty_alpha": 0.5, "top_k": 4},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "token_healing": {"token_healing": True},
    "use_mtp": {"use_mtp": True},
}
# Settings of transformers' own assisted generation: to take them and draft in another way is what was reported.
OF_ASSISTED_GENERATION: dict[str, dict[str, Any]] = {
    "assistant_confidence_threshold": {"assistant_confidence_threshold": 0.9},
    "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.5},
    "assistant_lookbehind": {"assistant_lookbehind": 3},
    "max_matching_ngram_size": {"max_matching_ngram_size": 2},
    "num_assistant_tokens": {"num_assistant_tokens": 3},
    "num_assistant_tokens_schedule": {"num_assistant_tokens_schedule": "heuristic"},
    "target_lookbehind": {"target_lookbehind": 3},
}
# Plain greedy decoding and sampling do without them too: beams, compilation, serving, and what a file says of itself.
WITHOUT_EFFECT = {
    *("early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups", "low_memory", "bos_token_id"),
    *("decoder_start_token_id", "cache_config", "max_cache_len", "compile_config", "disable_compile"),
    *("continuous_batching_config", "is_assistant", "speculation_type", "transformers_version"),
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", HONOURED)
def test_a_setting_has_the_effect_it_has_on_plain_generate(name: str, batch: int, target: Any, draft: Any) -> None:
    family = "t5" if name == "forced_bos_token_id" else "llama"  # it is an encoder-decoder's
    if family == "t5":
        target = specheads.enable(tiny(family))
        draft = perturbed(target, 0.05)
    plain, ours = both(target, {**prompt(family, batch), **GREEDY, **HONOURED[name]}, draft)
    assert torch.equal(plain, ours)
    if batch > 1 and name not in SAME_TEXT:
        assert not torch.equal(plain, target.generate(**prompt(family, batch), **GREEDY)), "no effect to lose"


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_without_its_effect_is_refused(name: str, target: Any) -> None:
    if not hasattr(GenerationConfig(), name):
        pytest.skip("this version of transformers does not have it")
    with pytest.raises(ValueError, match=r"."):
        target.generate(**prompt("llama", 1), **{**GREEDY, **REFUSED[name]}, speculative=True)


@pytest.mark.parametrize("name", [name for name in OF_ASSISTED_GENERATION if hasattr(GenerationConfig(), name)])
def test_settings_of_assisted_generation_are_refused(name: str, target: Any, draft: Any) -> None:
    with pytest.raises(ValueError, match=name):
        target.generate(
            **prompt("llama", 1), **GREEDY, **OF_ASSISTED_GENERATION[name], speculative=DRAFT, assistant_model=draft
        )


def test_every_setting_of_generate_is_in_one_of_these_lists() -> None:
    """A setting that a new version brings must be looked at before it is passed over in silence."""
    lists = [HONOURED, COMPARED_ELSEWHERE, REFUSED, OF_ASSISTED_GENERATION, WITHOUT_EFFECT]
    names = [name for each in lists for name in each]
    assert len(names) == len(set(names))
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} <= set(names)


def test_the_models_own_generation_config_counts(target: Any, draft: Any) -> None:
    free = target.generate(**prompt("llama", 4), max_new_tokens=20)
    for name, value in {"max_new_tokens": 19, "repetition_penalty": 1.3, "eos_token_id": [5, 12]}.items():
        setattr(target.generation_config, name, value)
        plain, ours = both(target, prompt("llama", 4), draft)
        assert torch.equal(plain, ours)
        assert plain.shape != free.shape or not torch.equal(plain, free)
        free = plain


def test_a_loop_of_ones_own_is_refused_before_it_runs(target: Any) -> None:
    ran, streamer = [], Recorder()

    def loop(model: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
        ran.append(1)
        return input_ids

    with pytest.raises(ValueError, match=r"custom_generate|decoding loop"):
        target.generate(**prompt("llama", 1), **GREEDY, custom_generate=loop, streamer=streamer, speculative=True)
    assert not ran


@pytest.mark.filterwarnings("ignore:`(past_key_values|cache_params)` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_under_either_of_its_names(name: str, target: Any, draft: Any) -> None:
    """What broke a rival when transformers renamed the argument."""
    caches = [compat.new_cache(target), compat.new_cache(target)]
    inputs = prompt("llama", 4)
    if name != compat.CACHE == "past_key_values":
        pytest.skip("this version of transformers has one name only")
    plain = target.generate(**inputs, **GREEDY, **{name: caches[0]})
    assert torch.equal(target.generate(**inputs, **GREEDY, **{name: caches[1]}, speculative=TREE, assistant_model=draft), plain)
    assert_same_cache(caches[1], caches[0])


# ---- laws


def laws(speculative: Any, draft: Any, target: Any, batch: int = 1, tokens: int = 3, **given: Any) -> list[tuple[Any, Any]]:
    """Of each row: the law of the speculative and that of the plain `generate`."""
    ids, mask = (PROMPT, torch.ones_like(PROMPT)) if batch == 1 else (PADDED, PADDED_MASK)
    given = {"max_new_tokens": tokens, "top_k": 0, **given}
    own = {name: given.pop(name) for name in ("tokenizer", "assistant_tokenizer") if name in given}
    return [
        (
            speculative_law(
                target, ids, row, attention_mask=mask, speculative=speculative, assistant_model=draft, **given, **own
            )[0],
            plain_law(target, ids, row, mask, **given),
        )
        for row in range(batch)
    ]


@pytest.mark.parametrize("has_draft", [False, True])
def test_sampling_works_with_nothing_but_defaults(has_draft: bool) -> None:
    target, draft = target_and_draft()
    ((ours, plain),) = laws(True, draft if has_draft else None, target)
    assert total_variation(ours, plain) < 1e-9


# Vocabularies here are of three tokens: 0, 1 and 2.
LAWS: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.4},
    "typical_p": {"typical_p": 0.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.25},
    "eta_cutoff": {"eta_cutoff": 0.6},
    "top_h": {"top_h": 0.6},
    "min_p after a penalty": {"min_p": 0.3, "repetition_penalty": 1.6, "temperature": 1.3},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.7},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "sequence_bias": {"sequence_bias": [[[1], 1.5], [[0, 2], -3.0]]},
    "bad_words_ids": {"bad_words_ids": [[0, 1]]},
    "suppress_tokens": {"suppress_tokens": [1]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [1]},
    "min_new_tokens": {"min_new_tokens": 2, "eos_token_id": 2},
    "exponential_decay": {"exponential_decay_length_penalty": (1, 1.5), "eos_token_id": 2},
    "forced_eos": {"forced_eos_token_id": 2},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.0, greenlist_ratio=0.5)},
    "prefix function": {"prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) + row) % 3, (int(ids[-1]) + 1 + row) % 3]},
}


@pytest.mark.parametrize("settings", [SHORT_CHAIN, SHORT_TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", LAWS)
def test_a_processor_has_its_effect_on_every_draft(name: str, settings: dict[str, Any]) -> None:
    target, draft = target_and_draft()
    for row, (ours, plain) in enumerate(laws(settings, draft, target, batch=2, **LAWS[name])):
        assert total_variation(ours, plain) < 1e-9
        without = plain_law(target, PADDED, row, PADDED_MASK, max_new_tokens=3, top_k=0)
        assert row or total_variation(plain, without) > 1e-3, "no effect to lose"


class Swinging(LogitsProcessor):
    """Favours a token by how often it was called since it was made."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % scores.shape[1]] += 1.5
        return scores


# Made anew for each call: they keep a state.
WITH_A_STATE: dict[str, Callable[[], dict[str, Any]]] = {
    "SynthID": lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=2)},
    "own": lambda: {"logits_processor": LogitsProcessorList([Swinging()])},
}


@pytest.mark.parametrize("settings", [SHORT_CHAIN, SHORT_TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", WITH_A_STATE)
def test_a_processor_with_a_state_keeps_its_law(name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = target_and_draft()
    given = {"max_new_tokens": 3, "top_k": 0, "do_sample": True, "pad_token_id": 0}

    def stock(noise: ReplayNoise, marked: bool = True) -> tuple[int, ...]:
        def draw(weights: Tensor, num_samples: int) -> Tensor:
            return noise.draw(weights, range(len(weights)), [0] * len(weights))[:, None]

        with monkeypatch.context() as patch:
            patch.setattr(torch, "multinomial", draw)
            return tuple(target.generate(PROMPT, **given, **(WITH_A_STATE[name]() if marked else {}))[0, 3:].tolist())

    def ours(noise: ReplayNoise) -> tuple[int, ...]:
        with whole_loop.noise_of(noise):
            out = target.generate(PROMPT, **given, **WITH_A_STATE[name](), speculative=settings, assistant_model=draft)
        return tuple(out[0, 3:].tolist())

    plain = law_of(stock)[0]
    # The stock loop works in single precision.
    assert total_variation(law_of(ours)[0], plain) < 1e-6
    assert total_variation(law_of(lambda noise: stock(noise, marked=False))[0], plain) > 1e-2, "no effect to lose"


@pytest.mark.parametrize("mode", ["match", "token", "block", "traversal"])
def test_a_sampled_draft_that_does_not_give_its_law(mode: str) -> None:
    """It counts as certain, which no ratio is taken of: exact whatever it was drawn from."""

    def propose(context: DraftContext) -> DraftTree:
        assert context.noise is not None
        rows = context.rows
        law = torch.tensor([[0.7, 0.2, 0.1]]).expand(len(rows), -1)
        return DraftTree.chain(context.noise.draw(law, rows, [0] * len(rows))[:, None])

    target, _ = target_and_draft()
    specheads.enable(target, drafter=Own(propose))
    ((ours, plain),) = laws({**SHORT_CHAIN, "draft_tokens": 1, "verification": mode}, None, target)
    assert total_variation(ours, plain) < 1e-9


@pytest.mark.parametrize("settings", [SHORT_CHAIN, SHORT_TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("suppressed", [None, [0, 1]], ids=["free", "all of the draft's"])
def test_tokens_that_the_draft_does_not_have(
    suppressed: list[int] | None, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's law counts over the target's vocabulary; where nothing of it is allowed, it drafts some token or other."""
    original = ReplayNoise.draw

    def draw(self: ReplayNoise, weights: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        no_law = torch.eye(weights.shape[1], dtype=weights.dtype)[0]
        return original(self, torch.where(weights.isnan(), no_law, weights), rows, positions)

    monkeypatch.setattr(ReplayNoise, "draw", draw)
    target, _ = target_and_draft(4)
    _, small = target_and_draft(2)
    ((ours, plain),) = laws(settings, small, target, suppress_tokens=suppressed, **PADDED_ONLY)
    assert total_variation(ours, plain) < 1e-9
    assert any(set(text) & {2, 3} for text in ours)


@pytest.mark.parametrize("settings", [SHORT_CHAIN, SHORT_TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_draft_in_half_precision(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    """What is drawn from and what the ratio is taken of are the same numbers, in single precision."""
    target, draft = target_and_draft()
    ((ours, plain),) = laws(settings, draft.to(dtype), target)
    assert total_variation(ours, plain) < 1e-7


def test_a_draw_from_a_rounded_law_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = growth.draw
    monkeypatch.setattr(
        growth, "draw", lambda context, law, lines, depth: original(context, law.bfloat16().to(law.dtype), lines, depth)
    )
    target, draft = target_and_draft()
    ((ours, plain),) = laws(SHORT_CHAIN, draft.bfloat16(), target)
    assert total_variation(ours, plain) > 1e-5


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["match", "top-down", "carry"])
def test_the_most_probable_siblings_of_any_number(mode: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_verifier, "VOCAB", 5)
    for seed, kind in enumerate(["dirichlet", "zeros", "same"]):
        given = test_verifier.Laws(kind, seed)
        ours = test_verifier.round_law([0] * width, "deterministic", mode, given)
        assert total_variation(ours, test_verifier.target_law(width + 1, given)) < 1e-12


@pytest.mark.parametrize("mode", ["top-down", "carry"])
def test_all_or_nothing_is_accepted(mode: str) -> None:
    """Of a law that equals the target's everything, of one that it has nothing in common with nothing."""
    for topology, seed in (("chain3", 0), ("chain3", 1), ("siblings", 2), ("fork", 3)):
        parents = test_verifier.TOPOLOGIES[topology]
        nothing = test_verifier.expected_accepted(parents, "with", mode, test_verifier.Laws("disjoint", seed))
        assert nothing == 0
    everything = test_verifier.expected_accepted([0, 1, 2], "with", mode, test_verifier.Laws("same", 0))
    assert everything == pytest.approx(3)


# ---- rounds


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_rows_accept_what_they_are_made_to(family: str) -> None:
    """A hundred prompts; in every round each row accepts its own number of tokens, none and all among them."""
    target = specheads.enable(tiny(family, eos_token_id=None))
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 32, (100, 8), generator=generator)
    mask = (torch.arange(8) >= torch.randint(0, 6, (100, 1), generator=generator)).long()
    given = {"input_ids": ids * mask, "attention_mask": mask, "max_new_tokens": 18, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(**given)
    for most in range(1, 9):
        chosen, expected = random.Random(most), [[0] for _ in range(100)]

        def propose(context: DraftContext, most: int = most, chosen: Any = chosen, expected: Any = expected) -> DraftTree:
            lines = []
            for row in context.rows:
                said, right = len(context.sequences.continuations[row]), chosen.randint(0, most)
                truth = plain[row, 8 + said :][:most].tolist()
                truth += [0] * (most - len(truth))
                lines.append([*truth[:right], *((token + 1) % 32 for token in truth[right:])])
                expected[row].append(min(right, 18 - said - 1))
            return DraftTree.chain(torch.tensor(lines))

        specheads.enable(target, drafter=Own(propose))
        out = target.generate(
            **given, speculative={"draft_tokens": most, "adaptive": False, "per_step": True}, return_dict_in_generate=True
        )
        assert torch.equal(out.sequences, plain)
        for row, stats in enumerate(out.speculation.rows):
            rounds = len(stats.per_step_accepted)
            # With room for one token left nothing is drafted, and our drafter is not asked.
            assert stats.per_step_accepted[: len(expected[row])] == expected[row]
            assert rounds - len(expected[row]) in (0, 1)


PREFIX_RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "scores": {"suppress_tokens": [31]},
    "prefix": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 4, "min_new_tokens": 4},
    "batch": {"encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 4},
}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", PREFIX_RULES)
def test_trees_are_drafted_within_generate(name: str, do_sample: bool, target: Any, draft: Any) -> None:
    """Their results are compared elsewhere: here, that a round holds more nodes than a path has."""
    for batch in (1, 4):
        out = target.generate(
            **prompt("llama", batch), max_new_tokens=20, do_sample=do_sample, **PREFIX_RULES[name], assistant_model=draft,
            speculative={**TREE, "per_step": True}, return_dict_in_generate=True,
        )  # fmt: skip
        assert max(number for row in out.speculation.rows for number in row.per_step_drafted) == TREE["tree_nodes"]
        assert out.speculation.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral", "gpt2"])
def test_the_cache_after_ragged_rounds_is_that_of_one_pass(family: str) -> None:
    target = specheads.enable(tiny(family, eos_token_id=None))
    given = {**prompt(family, 4), "do_sample": False, "max_new_tokens": 22, "return_dict_in_generate": True, "pad_token_id": 0}
    settings = arguments("draft tree", 4, perturbed(target, 0.05), family)
    settings["speculative"]["per_step"] = True
    out = target.generate(**given, **settings)
    rounds = list(zip(*(row.per_step_accepted for row in out.speculation.rows), strict=False))
    assert sum(len(set(counts)) > 1 for counts in rounds) > 1, "rows kept one length"
    text = out.sequences[:, :-1]
    mask = torch.cat([given["attention_mask"], torch.ones(4, text.shape[1] - 11, dtype=torch.long)], dim=1)
    expected = compat.new_cache(target)
    target(text, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), **{compat.CACHE: expected})
    assert_same_cache(out[compat.CACHE], expected)


@pytest.mark.parametrize("drafter", ["auto", "suffix", "recycling", "draft model", "draft tree"])
def test_no_token_is_fed_that_has_no_place_in_the_text(drafter: str, target: Any, draft: Any) -> None:
    """With drafts longer than what is left."""
    positions: list[int] = []
    target.register_forward_pre_hook(
        lambda module, args, kwargs: positions.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    for batch in (1, 4):
        out = target.generate(**prompt("llama", batch), **GREEDY, eos_token_id=None, **arguments(drafter, 8, draft, "llama"))
        assert out.shape[1] == 31
        assert max(positions) == 29  # the last token is not fed, and its place is 30


class Alternating(LogitsProcessor):
    """A grammar: odd and even tokens take turns."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        is_wrong = (torch.arange(scores.shape[1]) + input_ids[:, -1:]) % 2 == 0
        return scores.masked_fill(is_wrong, -torch.inf)


GRAMMARS: dict[str, dict[str, Any]] = {
    "processor": {"logits_processor": LogitsProcessorList([Alternating()])},
    "function": {"prefix_allowed_tokens_fn": lambda row, ids: [t for t in range(32) if (t + int(ids[-1])) % 2]},
}


@pytest.mark.parametrize("drafter", ["lookup", "suffix", "recycling", "auto", "draft model", "draft tree"])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_grammar_is_kept(grammar: str, drafter: str, target: Any, draft: Any) -> None:
    for do_sample in (False, True):
        out = target.generate(
            **prompt("llama", 4), max_new_tokens=20, do_sample=do_sample, temperature=1.5, eos_token_id=None, pad_token_id=0,
            **GRAMMARS[grammar], **arguments(drafter, 4, draft, "llama"),
        )  # fmt: skip
        text = out[:, 10:]
        assert bool(((text[:, 1:] + text[:, :-1]) % 2 == 1).all())


@pytest.mark.parametrize(
    "name",
    ["encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "repetition_penalty", "guidance_scale", "stop_strings"],
)
def test_returned_sequences_have_the_settings_of_their_row(name: str, target: Any, draft: Any) -> None:
    given = {**prompt("llama", 2), **CHOICE, "num_return_sequences": 3, **HONOURED[name]}
    plain, ours = both(target, given, draft)
    assert torch.equal(plain, ours)
    assert not torch.equal(plain, target.generate(**prompt("llama", 2), **CHOICE, num_return_sequences=3))


# ---- the draft model


SAMPLED = {"do_sample": True, "max_new_tokens": 20}


def text_and_counts(target: Any, draft: Any, given: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    torch.manual_seed(7)
    target.generation_config.return_dict_in_generate = True
    out = target.generate(**prompt("llama", 4), **given, assistant_model=draft, speculative=TREE)
    return out.sequences.tolist(), out.speculation.acceptance_histogram


def test_the_drafts_own_settings_do_not_count(target: Any, draft: Any) -> None:
    other = copy.deepcopy(draft)
    own = {"temperature": 0.1, "top_k": 1, "repetition_penalty": 5.0, "eos_token_id": 9, "num_assistant_tokens": 1}
    for name, value in {**own, "max_new_tokens": 3, "assistant_confidence_threshold": 0.99}.items():
        setattr(other.generation_config, name, value)
    assert text_and_counts(target, draft, SAMPLED) == text_and_counts(target, other, SAMPLED)


def test_settings_reach_the_draft_whichever_way_they_come(target: Any, draft: Any) -> None:
    settings = {**SAMPLED, "temperature": 0.6, "top_k": 8}
    expected = text_and_counts(target, draft, settings)
    assert expected != text_and_counts(target, draft, SAMPLED)
    config = GenerationConfig(**settings, eos_token_id=2, pad_token_id=0, return_dict_in_generate=True)
    assert text_and_counts(target, draft, {"generation_config": config}) == expected
    for name, value in settings.items():
        setattr(target.generation_config, name, value)
    assert text_and_counts(target, draft, {}) == expected


def test_a_call_leaves_no_trace_on_the_draft(target: Any, draft: Any) -> None:
    """One seed, one result, however often; and the draft model is afterwards what it was."""
    modules, weights = dict(draft.named_modules()), copy.deepcopy(draft.state_dict())
    own, config = dict(vars(draft.generation_config)), copy.deepcopy(draft.config.to_dict())
    first = text_and_counts(target, draft, SAMPLED)
    assert text_and_counts(target, draft, SAMPLED) == first
    assert {name: id(module) for name, module in draft.named_modules()} == {name: id(m) for name, m in modules.items()}
    assert all(torch.equal(value, weights[name]) for name, value in draft.state_dict().items())
    assert vars(draft.generation_config) == own and draft.config.to_dict() == config


@pytest.mark.parametrize(("family", "table"), [("whisper", "max_target_positions"), ("mpt", "max_seq_len")])
def test_a_draft_whose_positions_end_early(family: str, table: str) -> None:
    """Like a draft with a `max_position_embeddings` of less: it stops drafting, and the text goes on."""
    target, short = specheads.enable(tiny(family)), tiny(family, **{table: 16})
    inputs = sound_inputs(4) if family == "whisper" else prompt(family, 4)
    plain, ours = both(target, {**inputs, **GREEDY, "eos_token_id": None, "pad_token_id": 0}, short)
    assert torch.equal(plain, ours)


def test_the_same_tokens_in_another_order_keep_the_law() -> None:
    """Elsewhere the draft's law was permuted, and its output layer replaced for good."""
    target, draft = target_and_draft()
    tokenizers = {"tokenizer": spelling("abc"), "assistant_tokenizer": spelling("cab")}
    weights = draft.get_output_embeddings().weight.clone()
    for ours, plain in laws(SHORT_CHAIN, draft, target, **tokenizers):
        assert total_variation(ours, plain) < 1e-9
    assert torch.equal(draft.get_output_embeddings().weight, weights)


# ---- what cannot be is refused


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_that_takes_no_mask_is_refused(attention: str) -> None:
    model = tiny()
    model.config._attn_implementation = attention
    with pytest.raises(ValueError, match=attention):
        specheads.enable(model)


def test_models_of_another_kind_are_refused() -> None:
    class ExportedModel:
        def generate(self, *args: Any, **kwargs: Any) -> None: ...

    for model in (ExportedModel(), torch.nn.Linear(2, 2), tiny().model):
        with pytest.raises(TypeError, match="takes a transformers model that can generate"):
            specheads.enable(model)  # type: ignore[type-var]


def test_ranks_that_keep_step_are_refused(target: Any) -> None:
    passes: list[int] = []
    target.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match="synced_gpus"):
        target.generate(**prompt("llama", 1), **GREEDY, synced_gpus=True, speculative=True)
    assert not passes


# ---- devices, weights, pipelines


@pytest.mark.parametrize("family", ["falcon", "gpt_neox"])
def test_four_bits(family: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float)
    base = tiny(family, **{"hidden_size": 64, **({"intermediate_size": 128} if family == "gpt_neox" else {})}).float()
    model = specheads.enable(loaded(tmp_path, base, quantization_config=four, device_map="cpu"))
    assert_same(model)
    assert_same(model, assistant_model=perturbed(base, 0.05))


def test_a_speech_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = mixin.run
    monkeypatch.setattr(mixin, "run", lambda call: (calls.append(call), run(call))[1])
    ears = WhisperFeatureExtractor(feature_size=8, sampling_rate=16000, hop_length=250, chunk_length=1)
    sound = np.sin(np.arange(9000, dtype=np.float32) / 7)
    model = specheads.enable(tiny("whisper").float())
    model.generation_config.no_timestamps_token_id = 31
    draft = perturbed(model, 0.05)

    tokenizer = letters()
    # What Whisper's own tokenizer has for this pipeline, without its marks of time.
    tokenizer._decode_asr = lambda outputs, **_: (tokenizer.decode(outputs[0]["tokens"][0]), {})

    def hear(**settings: Any) -> Any:
        hears = pipeline("automatic-speech-recognition", model=model, tokenizer=tokenizer, feature_extractor=ears)
        # This pipeline searches with beams if it is not told otherwise.
        plain = {"max_new_tokens": 15, "do_sample": False, "num_beams": 1}
        return hears(sound.copy(), generate_kwargs={**plain, **settings})

    expected = hear()
    assert not calls and len(expected["text"]) > 8
    assert hear(speculative=DRAFT) == expected
    assert hear(speculative=DRAFT, assistant_model=draft) == expected
    assert len(calls) == 2 and isinstance(calls[1].drafter, DraftModelDrafter)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_drafts_that_do_not_pay_are_given_up(batch: int, target: Any) -> None:
    """It goes on as plain decoding does, with a try now and then."""
    ids = prompt("llama", 1)["input_ids"].expand(batch, -1)
    out = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=120, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, speculative={"drafter": "wrong", "per_step": True},
    )  # fmt: skip
    for row in out.speculation.rows:
        assert batch > 1 or any(row.per_step_drafted), "nothing was tried"
        assert sum(map(bool, row.per_step_drafted[60:])) <= 6


# ---- the page

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reported_faults.md"
NODE = re.compile(r"tests/[\w/]+\.py::\w+")


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def missing(names: Sequence[str]) -> list[str]:
    files = {name.split("::")[0] for name in names}
    known = {file: names_in(ROOT / file) if (ROOT / file).is_file() else set() for file in files}
    return [name for name in names if name.split("::")[1] not in known[name.split("::")[0]]]


def test_the_page_names_tests_that_exist() -> None:
    names = NODE.findall(PAGE.read_text())
    assert len(names) > 60
    assert not missing(names)
    assert missing([f"{names[0]}_renamed", "tests/nowhere.py::test_it"]) == [f"{names[0]}_renamed", "tests/nowhere.py::test_it"]


def test_every_row_of_the_page_has_a_test_or_a_reason() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 3 and all(cells), row
        assert NODE.search(cells[2]) or cells[2].startswith("none: ") or cells[2] == "test", row


def test_every_test_here_is_on_the_page() -> None:
    own = {name for name in names_in(Path(__file__)) if "_page" not in name}
    listed = {
        name.split("::")[1] for name in NODE.findall(PAGE.read_text()) if Path(name.split("::")[0]).name == Path(__file__).name
    }
    assert own == listed
