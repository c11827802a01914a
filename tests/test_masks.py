"""Any mask and any positions that plain `generate` takes: the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import specheads

from .exactness.test_greedy import arguments, prompt
from .tiny import perturbed, tiny

KINDS = ["none", "ones", "right", "hole", "both sides", "twos"]


def mask_of(kind: str, ids: Tensor) -> Tensor | None:
    """An attention mask for four rows of eleven tokens."""
    mask = torch.ones_like(ids)
    if kind == "right":
        mask[0, -2:] = mask[2, -5:] = 0
    elif kind == "hole":
        mask[0, 3:5] = mask[3, 0:6:2] = 0
    elif kind == "both sides":
        mask[1, :3] = mask[1, -1:] = 0
    elif kind == "twos":
        mask[0] = 2
    return None if kind == "none" else mask


@pytest.mark.parametrize("drafter", ["auto", "draft tree"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "mistral"])
def test_masks(family: str, kind: str, drafter: str) -> None:
    target = specheads.enable(tiny(family))
    ids = prompt(family, 4)["input_ids"]
    given: dict[str, Any] = {"attention_mask": mask_of(kind, ids), "max_new_tokens": 20, "do_sample": False}
    plain = target.generate(ids, **given)
    settings = arguments(drafter, 3, perturbed(target, 0.05), family)
    out = target.generate(ids, **given, **settings, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    assert out.speculation.num_accepted_draft_tokens > 0


def test_positions_of_ones_own() -> None:
    target = specheads.enable(tiny())
    ids = prompt("llama", 2)["input_ids"]
    positions = torch.stack([torch.arange(11) * 2, torch.arange(11) + 40])
    given: dict[str, Any] = {"position_ids": positions, "max_new_tokens": 20, "do_sample": False}
    plain = target.generate(ids, **given)
    assert not torch.equal(plain, target.generate(ids, max_new_tokens=20, do_sample=False))
    draft = perturbed(target, 0.05)
    assert torch.equal(target.generate(ids, **given, **arguments("draft tree", 3, draft, "llama")), plain)


def test_positions_end_where_the_table_does() -> None:
    target = specheads.enable(tiny("gpt2", max_position_embeddings=32))
    ids = prompt("gpt2", 2)["input_ids"]
    positions = torch.arange(14, 25).expand(2, -1)
    given: dict[str, Any] = {"position_ids": positions, "max_new_tokens": 8, "do_sample": False}
    plain = target.generate(ids, **given)
    out = target.generate(ids, **given, speculative={"draft_tokens": 8, "adaptive": False, "drafter": "recycling"})
    assert torch.equal(out, plain)
