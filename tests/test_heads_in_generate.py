"""Heads under everything else that `generate` takes: the text is that of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteriaList

import specheads
from specheads import compat

from .exactness.head_loop import random_head
from .exactness.test_greedy import other_prompt, other_target, prompt
from .exactness.whole_loop import StopAfterPair
from .heads import perfect
from .tiny import tiny

HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "medusa": ({"num_heads": 3}, {"draft_tokens": 3, "tree_nodes": 14}),
    "eagle 3": ({"draft_tokens": range(3, 20)}, {"draft_tokens": 3, "tree_nodes": 12}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "a stop rule of the user's": {"stopping_criteria": StoppingCriteriaList([StopAfterPair(31, 31)])},
    "constraints": {"prefix_allowed_tokens_fn": lambda row, ids: [3, 5, 8, 31, 2] if len(ids) % 2 else [1, 4, 7, 9, 12]},
    "penalties": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
    "one token": {"max_new_tokens": 1},
    "a prompt in chunks": {"prefill_chunk_size": 4},
}
OTHER_FAMILIES = ["qwen3_5_text", "mamba2", "gemma3", "llama4_text", "gemma2", "marian"]


def enabled(target: PreTrainedModel, kind: str) -> dict[str, Any]:
    """Lets a target draft with a random head; the settings to draft with."""
    fields, settings = HEADS[kind]
    specheads.enable(target, drafter=random_head(target, kind, seed=5, **fields))
    return {"adaptive": False, **settings}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, kind: str) -> None:
    target = other_target("llama")
    arguments = {**prompt("llama", 3), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **SETTINGS[name]}
    settings = enabled(target, kind)
    assert torch.equal(target.generate(**arguments, speculative=settings), target.generate(**arguments))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_families_of_other_kinds(family: str) -> None:
    """With states, with pictures, with chains only."""
    target = other_target(family)
    arguments = {**other_prompt(family, 3, target), "max_new_tokens": 8, "do_sample": False}
    plain = target.generate(**arguments)
    for kind in HEADS:
        settings = enabled(target, kind)
        assert torch.equal(target.generate(**arguments, speculative=settings), plain)


@pytest.mark.parametrize("known", [7, 10])
@pytest.mark.parametrize("kind", HEADS)
def test_a_cache_that_comes_with_the_call(kind: str, known: int) -> None:
    target = tiny("llama")
    ids = prompt("llama", 1)["input_ids"]
    settings = enabled(target, kind)

    def says(**arguments: Any) -> list[int]:
        cache = DynamicCache(config=target.config)
        with torch.no_grad():
            target(ids[:, :known], **{compat.CACHE: cache})
        mask = torch.ones_like(ids)
        given = {compat.CACHE: cache, "attention_mask": mask, **arguments}
        return target.generate(ids, max_new_tokens=12, do_sample=False, **given)[0].tolist()

    assert says(speculative=settings) == says()


@pytest.mark.parametrize("kind", HEADS)
def test_embeddings_in_place_of_ids(kind: str) -> None:
    target = tiny("llama")
    embeddings = target.get_input_embeddings()(prompt("llama", 1)["input_ids"]).detach()
    arguments = {"inputs_embeds": embeddings, "max_new_tokens": 12, "do_sample": False}
    settings = enabled(target, kind)
    assert torch.equal(target.generate(**arguments, speculative=settings), target.generate(**arguments))


@pytest.mark.parametrize("kind", HEADS)
def test_keyed_noise_does_not_depend_on_the_head(kind: str) -> None:
    target = tiny("llama")
    keyed = {"sampling_noise": "keyed", "seed": 4}
    arguments = {**prompt("llama", 4), "do_sample": True, "top_k": 0, "max_new_tokens": 20, "pad_token_id": 0}
    settings = enabled(target, kind)
    drafted = target.generate(**arguments, speculative={**settings, **keyed})
    assert torch.equal(drafted, target.generate(**arguments, speculative={"drafter": "none", **keyed}))


@pytest.mark.parametrize("head_precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*HEADS, "eagle 1"])
def test_precisions_of_head_and_target_may_differ(kind: str, precision: torch.dtype, head_precision: torch.dtype) -> None:
    target = tiny("llama")
    head = random_head(target, kind).to(head_precision)
    specheads.enable(target.to(precision), drafter=head)
    for samples in (False, True):
        out = target.generate(
            **prompt("llama", 2),
            do_sample=samples,
            max_new_tokens=6,
            speculative={"tree_nodes": 9, "adaptive": False},
            return_dict_in_generate=True,
        )
        assert out.speculation.num_draft_tokens


@pytest.mark.parametrize("kind", ["medusa", "eagle 3"])
def test_a_head_that_is_always_wrong_is_given_up(kind: str) -> None:
    target = perfect.cyclic_target()
    wrong = perfect.perfect_medusa(target, late=1) if kind == "medusa" else perfect.perfect_eagle(target, late=1)
    specheads.enable(target, drafter=wrong)
    out = target.generate(
        torch.tensor([[3, 17]]), max_new_tokens=60, do_sample=False, return_dict_in_generate=True,
        speculative={"draft_tokens": 4},
    )  # fmt: skip
    assert out.speculation.num_draft_tokens < 80  # of 236 that would fit; the clock has a say in it
