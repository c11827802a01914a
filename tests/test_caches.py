"""A warm cache in, a valid one out: the same as with plain `generate`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import specheads
from specheads import compat
from specheads.cache import SlotCache

from .exactness.test_greedy import arguments, prompt
from .test_outputs import early_end
from .tiny import perturbed, tiny

FAMILIES = ["llama", "gemma3_text", "mistral", "gpt2", "t5"]


def fresh(model: Any) -> Any:
    return compat.new_cache(model)


def assert_same_cache(own: Any, plain: Any) -> None:
    if isinstance(plain, EncoderDecoderCache):
        assert_same_cache(own.self_attention_cache, plain.self_attention_cache)
        assert_same_cache(own.cross_attention_cache, plain.cross_attention_cache)
        return
    assert own.get_seq_length() == plain.get_seq_length() and type(own) is type(plain)
    for ours, theirs in zip(own.layers, plain.layers, strict=True):
        assert type(ours) is type(theirs)
        assert vars(ours).keys() == vars(theirs).keys()
        for name in ("keys", "values"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
        assert getattr(ours, "cumulative_length", None) == getattr(theirs, "cumulative_length", None)


@pytest.mark.parametrize("ends_early", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_cache_out(family: str, batch: int, ends_early: bool) -> None:
    target = specheads.enable(tiny(family))
    end = early_end(family) if ends_early else 31
    given = {**prompt(family, batch), "do_sample": False, "max_new_tokens": 22, "return_dict_in_generate": True}
    given |= {"eos_token_id": end, "pad_token_id": 3}
    plain = target.generate(**given)
    out = target.generate(**given, **arguments("draft tree", 4, perturbed(target, 0.05), family))
    assert torch.equal(out.sequences, plain.sequences)
    assert_same_cache(out[compat.CACHE], plain[compat.CACHE])


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "t5"])
def test_a_second_turn(family: str, batch: int) -> None:
    """Two turns over one cache object, the first of them ragged; either turn plain or not."""
    target = specheads.enable(tiny(family))
    draft = perturbed(target, 0.05)
    inputs = prompt(family, batch)
    speculative = arguments("draft tree", 3, draft, family)
    texts, caches = [], []
    for first, second in (({}, {}), (speculative, {}), ({}, speculative), (speculative, speculative)):
        cache = fresh(target)
        settings = {"do_sample": False, compat.CACHE: cache, "eos_token_id": early_end(family), "pad_token_id": 3}
        said = target.generate(**inputs, **settings, max_new_tokens=12, **first)
        more = torch.randint(4, 30, (batch, 5), generator=torch.Generator().manual_seed(1))
        ids = torch.cat([said, more], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(batch, ids.shape[1] - 11, dtype=torch.long)], dim=1)
        mask[:, 11:][(said == 3)[:, 11:].nonzero(as_tuple=True)] = 0
        texts.append(target.generate(ids, attention_mask=mask, **settings, max_new_tokens=12, **second))
        caches.append(cache)
    for text, cache in zip(texts[1:], caches[1:], strict=True):
        assert torch.equal(text, texts[0])
        assert_same_cache(cache, caches[0])


def test_a_warm_cache_is_read() -> None:
    """What the cache holds counts, not the ids that stand for it."""
    target = specheads.enable(tiny())
    inputs = prompt("llama", 1)
    cache = fresh(target)
    target(inputs["input_ids"], **{compat.CACHE: cache})
    for layer in cache.layers:
        layer.values = layer.values * 1.5
    ids = torch.cat([inputs["input_ids"], torch.tensor([[5, 6]])], dim=1)
    plain_cache = fresh(target)
    for layer, own in zip(plain_cache.layers, cache.layers, strict=False):
        layer.update(own.keys.clone(), own.values.clone())
    while len(plain_cache.layers) < len(cache.layers):
        own = cache.layers[len(plain_cache.layers)]
        plain_cache.update(own.keys.clone(), own.values.clone(), len(plain_cache.layers))
    settings = {"do_sample": False, "max_new_tokens": 16}
    plain = target.generate(ids, **settings, **{compat.CACHE: plain_cache})
    out = target.generate(ids, **settings, **{compat.CACHE: cache}, speculative={"draft_tokens": 4, "adaptive": False})
    assert torch.equal(out, plain)
    assert not torch.equal(out, target.generate(ids, **settings))


def test_only_new_tokens_with_a_full_mask() -> None:
    target = specheads.enable(tiny())
    inputs = prompt("llama", 4)
    caches = [fresh(target), fresh(target)]
    for cache in caches:
        target(**inputs, **{compat.CACHE: cache})
    new = torch.tensor([[5, 6], [7, 8], [9, 4], [5, 5]])
    mask = torch.cat([inputs["attention_mask"], torch.ones(4, 2, dtype=torch.long)], dim=1)
    given: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 16}
    plain = target.generate(new, **given, **{compat.CACHE: caches[0]})
    out = target.generate(new, **given, **{compat.CACHE: caches[1]}, **arguments("recycling", 3, target, "llama"))
    assert torch.equal(out, plain)
    assert_same_cache(caches[1], caches[0])


def test_an_interrupted_call_leaves_what_was_committed() -> None:
    class Stop(Exception): ...

    class Breaking:
        def __init__(self) -> None:
            self.left = 9

        def put(self, value: Tensor) -> None:
            self.left -= 1
            if not self.left:
                raise Stop

        def end(self) -> None: ...

    target = specheads.enable(tiny())
    inputs = prompt("llama", 4)
    cache = fresh(target)
    with pytest.raises(Stop):
        target.generate(
            **inputs, do_sample=False, max_new_tokens=22, streamer=Breaking(), **{compat.CACHE: cache},
            **arguments("draft tree", 4, perturbed(target, 0.05), "llama"),
        )  # fmt: skip
    length = cache.get_seq_length()
    assert length > 11
    text = target.generate(**inputs, do_sample=False, max_new_tokens=22)[:, :length]
    mask = torch.cat([inputs["attention_mask"], torch.ones(4, length - 11, dtype=torch.long)], dim=1)
    expected = fresh(target)
    target(text, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), **{compat.CACHE: expected})
    assert_same_cache(cache, expected)


@pytest.mark.parametrize("kind", ["static", "offloaded", "static implementation", "quantized implementation"])
def test_other_caches_are_refused_before_any_pass(kind: str) -> None:
    target = specheads.enable(tiny())
    ids = prompt("llama", 1)["input_ids"]
    given: dict[str, Any] = {
        "static": {compat.CACHE: StaticCache(config=target.config, max_cache_len=64)},
        "offloaded": {compat.CACHE: DynamicCache(config=target.config)},
        "static implementation": {"cache_implementation": "static"},
        "quantized implementation": {"cache_implementation": "quantized"},
    }[kind]
    if kind == "offloaded":
        given[compat.CACHE].offloading = True
    passes = []
    target.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match=r"[Cc]ache"):
        target.generate(ids, max_new_tokens=4, speculative=True, **given)
    assert not passes


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_prompts_of_embeddings(family: str, batch: int) -> None:
    target = specheads.enable(tiny(family))
    draft = perturbed(target, 0.05)
    inputs = prompt(family, batch)
    ids = inputs.pop("input_ids")
    embeds = target.get_input_embeddings()(ids) * 1.1
    for more in ({}, {"input_ids": ids}):
        given = {**inputs, **more, "inputs_embeds": embeds, "do_sample": False, "max_new_tokens": 20}
        plain = target.generate(**given)
        for drafter in ("auto", "suffix", "lookup", "recycling", "draft tree"):
            assert torch.equal(target.generate(**given, **arguments(drafter, 3, draft, family)), plain), drafter


@pytest.mark.parametrize("size", [1, 4, 100])
def test_chunks_of_the_prompt(size: int) -> None:
    target = specheads.enable(tiny())
    given = {**prompt("llama", 4), "do_sample": False, "max_new_tokens": 20, "prefill_chunk_size": size}
    plain = target.generate(**given)
    assert torch.equal(target.generate(**given, **arguments("draft tree", 4, perturbed(target, 0.05), "llama")), plain)


def test_without_a_cache() -> None:
    target = specheads.enable(tiny())
    given = {**prompt("llama", 4), "do_sample": False, "max_new_tokens": 20, "return_dict_in_generate": True}
    plain = target.generate(**given, use_cache=False)
    out = target.generate(**given, use_cache=False, **arguments("recycling", 4, target, "llama"))
    assert torch.equal(out.sequences, plain.sequences)
    assert plain.get(compat.CACHE) is None and out.get(compat.CACHE) is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), lambda cache: cache])
def test_a_returned_cache_costs_nothing_until_it_is_looked_at(copied: Any) -> None:
    target = specheads.enable(tiny())
    passes = []
    target.register_forward_pre_hook(lambda *_: passes.append(1))
    given = {**prompt("llama", 4), "do_sample": False, "max_new_tokens": 22, "return_dict_in_generate": True}
    given |= {"eos_token_id": early_end("llama"), "pad_token_id": 3}
    plain = target.generate(**given)
    out = target.generate(**given, **arguments("recycling", 4, target, "llama"))
    cache, before = out[compat.CACHE], len(passes)
    assert isinstance(cache, DynamicCache)
    assert_same_cache(copied(cache), plain[compat.CACHE])
    assert len(passes) > before and type(cache) is DynamicCache


def test_the_comparison_sees_rows_out_of_place(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SlotCache.give_back

    def give_back(self: SlotCache, cache: Any, length: int) -> None:
        self.order = sorted(self.order)
        original(self, cache, length)

    monkeypatch.setattr(SlotCache, "give_back", give_back)
    with pytest.raises(AssertionError):
        test_cache_out("llama", 4, True)
