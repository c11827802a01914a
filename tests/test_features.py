"""The target's hidden states reach a drafter that asks for them, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import specheads
from specheads import compat
from specheads.drafters.base import Accepted, Budget, DraftContext
from specheads.drafters.recycling import RecyclingDrafter
from specheads.features import PromptFeatures
from specheads.tree import DraftTree

from .exactness.test_greedy import other_target, prompt
from .tiny import tiny

LAYERS = [0, 2]


class Watching(RecyclingDrafter):
    """Drafts like another, and keeps the features that it is given."""

    feature_layers: Sequence[int] = LAYERS

    def begin(self, context: DraftContext) -> None:
        super().begin(context)
        self.known = context.prompt_features
        self.given: dict[int, dict[tuple[int, ...], Tensor]] = {row: {} for row in context.rows}
        SEEN.append(self)

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        assert context.prompt_features is None  # it is not to stay
        return super().propose(context, budget)

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        super().commit(context, accepted)
        assert accepted.features is not None and accepted.features.shape[:2] == accepted.logits.shape[:2]
        for line, (path, kept) in enumerate(zip(accepted.paths, accepted.tokens, strict=True)):
            text = context.tokens(line)
            for node, end in zip([0, *path], range(len(text) - len(kept), len(text)), strict=False):
                self.given[context.rows[line]][tuple(text[:end])] = accepted.features[line, node]


SEEN: list[Watching] = []


def watched(target: PreTrainedModel, layers: Sequence[int] = LAYERS, **arguments: Any) -> tuple[Any, Watching]:
    SEEN.clear()
    drafter = Watching()
    drafter.feature_layers = list(layers)
    specheads.enable(target, drafter=drafter)
    settings = {"adaptive": False, "draft_tokens": 3, "tree_nodes": 7}
    out = target.generate(
        max_new_tokens=9, do_sample=False, return_dict_in_generate=True, speculative=settings, pad_token_id=0, **arguments
    )
    return out, SEEN[0]


@torch.no_grad()
def true_features(target: PreTrainedModel, text: Sequence[int], layers: Sequence[int], **inputs: Any) -> Tensor:
    """`[N, L H]` along a text."""
    is_pair = target.config.is_encoder_decoder
    ids = {"decoder_input_ids" if is_pair else "input_ids": torch.tensor([list(text)])}
    out = target(**ids, **inputs, output_hidden_states=True, use_cache=False)
    states = out.decoder_hidden_states if is_pair else out.hidden_states
    return torch.cat([states[layer] for layer in layers], dim=-1)[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "bloom", "qwen3_5_text", "qwen3_moe", "t5", "bart"])
def test_features_are_the_hidden_states_at_their_tokens(family: str) -> None:
    target = other_target(family)
    inputs = prompt(family, 3 if family != "bloom" else 1)  # stock Bloom's padded rows are NaN in double precision
    _, seen = watched(target, **inputs)
    for row, given in seen.given.items():
        own = {}
        if target.config.is_encoder_decoder:
            own = {name: value[row : row + 1] for name, value in inputs.items()}
        assert given
        for text, features in given.items():
            expected = true_features(target, text, LAYERS, **own)[-1]
            assert float((expected - features).abs().max()) < 1e-4  # some families work in single precision


def test_the_prompts_features_come_with_its_tokens() -> None:
    target = tiny("llama")
    inputs = prompt("llama", 3)
    known = watched(target, **inputs)[1].known
    assert known is not None and torch.equal(known.tokens, inputs["input_ids"])
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        assert known.hidden is not None and torch.equal(~known.hidden[row], mask)
        expected = true_features(target, inputs["input_ids"][row][mask].tolist(), LAYERS)
        assert float((known.features[row][mask] - expected).abs().max()) < 1e-9


def test_a_prompt_in_chunks_has_all_its_features() -> None:
    target = tiny("llama")
    inputs = prompt("llama", 3)
    whole, in_chunks = (watched(target, **inputs, prefill_chunk_size=size)[1].known for size in (None, 3))
    assert float((whole.features - in_chunks.features).abs().max()) < 1e-9


def test_what_a_cache_brings_has_no_features() -> None:
    target = tiny("llama")
    ids = prompt("llama", 1)["input_ids"]
    cache = DynamicCache(config=target.config)
    target(ids[:, :7], **{compat.CACHE: cache})
    known = watched(target, input_ids=ids, attention_mask=torch.ones_like(ids), **{compat.CACHE: cache})[1].known
    assert torch.equal(known.tokens, ids[:, 7:])
    assert float((known.features[0] - true_features(target, ids[0].tolist(), LAYERS)[7:]).abs().max()) < 1e-9


def test_embeddings_in_place_of_ids_have_no_tokens() -> None:
    target = tiny("llama")
    embeddings = target.get_input_embeddings()(prompt("llama", 1)["input_ids"])
    known = watched(target, inputs_embeds=embeddings)[1].known
    assert known.tokens.shape == (1, 0)


@pytest.mark.parametrize("asked", [None, True, [1], -1])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_hidden_states_that_the_user_asked_for_are_not_disturbed(family: str, asked: Any) -> None:
    if not compat.SELECTS_HIDDEN_STATES and asked is not None:
        asked = True
    target = tiny(family, attention="eager")
    arguments = {**prompt(family, 1), "output_hidden_states": asked, "output_attentions": True}
    out, _ = watched(target, **arguments)
    plain = copy.copy(specheads.disable(target)).generate(
        **arguments, max_new_tokens=9, do_sample=False, return_dict_in_generate=True, pad_token_id=0
    )
    name = "decoder_hidden_states" if family == "t5" else "hidden_states"
    assert (getattr(out, name) is None) == (getattr(plain, name) is None)
    assert len(next(value for key, value in out.items() if key.endswith("attentions"))) > 0
    for own, theirs in zip(getattr(out, name) or (), getattr(plain, name) or (), strict=True):
        assert [state is None for state in own] == [state is None for state in theirs]
        for state, expected in zip(own, theirs, strict=True):
            assert state is None or torch.allclose(state, expected, atol=1e-5)


@pytest.mark.parametrize("layers", [[0, 3], [-1]])
def test_layers_that_there_are_not_are_refused(layers: list[int]) -> None:
    with pytest.raises(ValueError, match=r"gives 3 of them, counted from 0"):
        watched(tiny("llama"), layers, **prompt("llama", 1))


def test_a_drafter_without_features_asks_for_none() -> None:
    target = tiny("llama")
    passes: list[Any] = []
    hook = target.register_forward_pre_hook(lambda module, args, kwargs: passes.append(kwargs), with_kwargs=True)
    specheads.enable(target, drafter="recycling").generate(**prompt("llama", 1), max_new_tokens=4, speculative=True)
    hook.remove()
    assert not any(kwargs.get("output_hidden_states") for kwargs in passes)


@pytest.mark.skipif(not compat.SELECTS_HIDDEN_STATES, reason="all or none, before 5.24")
def test_only_the_layers_asked_for_are_returned() -> None:
    target = tiny("llama")
    states: list[Any] = []
    hook = target.register_forward_hook(lambda module, args, output: states.append(output.hidden_states))
    watched(target, **prompt("llama", 1))
    hook.remove()
    assert len(states) > 2 and all([state is None for state in own] == [False, True, False] for own in states)


def test_pairs_of_a_padded_prompt() -> None:
    from specheads.drafters.pairs import Pairs

    tokens = torch.tensor([[5, 6, 7, 8], [0, 0, 3, 4]])
    features = torch.arange(8.0).view(2, 4, 1)
    hidden = torch.tensor([[False] * 4, [True, True, False, False]])
    pairs = Pairs.of_prompt(PromptFeatures(tokens, features, hidden))
    assert pairs.counts == [3, 1]
    assert pairs.tokens[0].tolist() == [6, 7, 8] and pairs.features[0, :, 0].tolist() == [0, 1, 2]
    assert int(pairs.tokens[1, 0]) == 4 and float(pairs.features[1, 0, 0]) == 6
    assert [piece.counts for piece in pairs.split(2)] == [[2, 1], [1, 0]]
