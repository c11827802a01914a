"""What the loop allocates: nothing as large as the sequence times the vocabulary, and never a copy of the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import specheads
from specheads import loop
from specheads.cache import SlotLayer

from .tiny import perturbed, tiny

PROMPT, TOKENS, VOCAB, HEAD, HEADS = 150, 60, 64, 32, 2


class Largest(TorchDispatchMode):
    """Notes the most elements that an operation puts into new memory, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.on:
            given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
            for one in result if isinstance(result, tuple | list) else [result]:
                if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in given:
                    self.elements = max(self.elements, one.untyped_storage().nbytes() // one.element_size())
        return result


def largest_in_rounds(monkeypatch: pytest.MonkeyPatch, drafter: str, do_sample: bool) -> int:
    target = specheads.enable(
        tiny(vocab_size=VOCAB, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=HEAD, hidden_size=HEADS * HEAD)
    )
    draft = perturbed(target, 0.02) if drafter == "draft model" else None
    noted = Largest()
    original = loop.forward

    def forward(call: Any, tree: Any) -> Any:
        noted.on = True  # from the second round on: the cache has been laid out
        return original(call, tree)

    monkeypatch.setattr(loop, "forward", forward)
    ids = torch.randint(3, VOCAB, (2, PROMPT))
    settings = {"draft_tokens": 3, "tree_nodes": 5, "adaptive": False, **({} if draft else {"drafter": drafter})}
    with noted:
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=do_sample,
            eos_token_id=None,
            speculative=settings,
            assistant_model=draft,
        )
    return noted.elements


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("drafter", ["none", "suffix", "draft model"])
def test_rounds_stay_small(drafter: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = largest_in_rounds(monkeypatch, drafter, do_sample)
    assert largest < PROMPT * VOCAB  # one row's sequence times vocabulary
    assert largest < 2 * HEADS * PROMPT * HEAD  # one layer's keys


def test_the_test_sees_a_copied_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SlotLayer.update
    monkeypatch.setattr(SlotLayer, "update", lambda *args, **kwargs: tuple(one.clone() for one in original(*args, **kwargs)))
    assert largest_in_rounds(monkeypatch, "suffix", False) >= 2 * HEADS * PROMPT * HEAD
