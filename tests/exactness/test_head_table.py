"""The combinations of head, draft, temperature, batch and penalty: which are walked through branch by branch, which compared.

    T = 0           every scheme, batch 1 and 3, with and without repetition penalty: `test_greedy`
    T = 0.7 and 1   every scheme, batch 1 and 3, with and without repetition penalty, so that each two of these meet: `REPLAYED`
    T = 1, batch 1, no penalty; T = 0.7 with top-k; all at once in a batch of 3: `test_heads.py`
    T = 0.7 and 1, a vocabulary of 16, with top-p and penalty: `test_head_monte_carlo.py`

The batch of three is padded on the left, and its rows end at different times.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..tiny import tiny, with_head
from .head_loop import BATCH, BATCH_MASK, KNOWN, SCHEMES, head_law, random_head
from .replay import total_variation
from .whole_loop import plain_law

LISTED = [
    "medusa chain",
    "medusa static tree",
    "medusa mixed tree",
    "eagle 1 chain",
    "eagle 3 chain",  # with a vocabulary of its own
    "eagle 3 dynamic tree",
    "eagle 3 mixed tree",  # likewise
]
# temperature, batch, repetition penalty
REPLAYED = [(0.7, 1, None), (0.7, 3, 1.7), (1.0, 3, None), (1.0, 1, 1.7)]
PENALTIES = [None, 1.7]
END, STREAM = 0, 4


def arguments(temperature: float, batch: int, penalty: float | None) -> dict[str, Any]:
    changed = {"temperature": temperature, "repetition_penalty": penalty, "eos_token_id": END if batch == 3 else None}
    return {"max_new_tokens": 4, "top_k": 0, **{name: value for name, value in changed.items() if value not in (None, 1.0)}}


@pytest.mark.parametrize(("temperature", "batch", "penalty"), REPLAYED)
@pytest.mark.parametrize("scheme", LISTED)
def test_replay(scheme: str, temperature: float, batch: int, penalty: float | None) -> None:
    settings = arguments(temperature, batch, penalty)
    ids, mask, watched = (BATCH[:1], BATCH_MASK[:1], 0) if batch == 1 else (BATCH, BATCH_MASK, 1)
    law, target, ends = head_law(scheme, ids, mask, watched, STREAM, **settings)
    assert total_variation(law, plain_law(target, ids, watched, mask, **settings)) < 1e-9
    if batch == 3:
        assert any(len(set(lengths)) > 1 for lengths in ends)


def test_the_listed_schemes_are_what_their_names_say() -> None:
    assert all(SCHEMES[name][1] == {"draft_tokens": KNOWN} for name in ("eagle 3 chain", "eagle 3 mixed tree"))
    assert all("tree_nodes" in SCHEMES[name][2] for name in LISTED if name.endswith("tree"))


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy(batch: int, penalty: float | None) -> None:
    """Token for token what plain `generate` says, in a batch with an end token and padding."""
    for scheme in LISTED:
        kind, fields, speculative = SCHEMES[scheme]
        target = tiny("llama", 8, spread=0.3, eos_token_id=None)
        known = {"draft_tokens": [0, 2, 3, 5, 7]} if "draft_tokens" in fields else {}
        with_head(target, random_head(target, kind, **{**fields, **known}))
        ids = torch.tensor([[3, 4, 5, 6], [0, 0, 6, 3], [0, 7, 4, 4]])[:batch]
        accepted = 0
        for shift in range(4):
            inputs = {"input_ids": (ids + shift) % 8 * (ids > 0), "attention_mask": (ids > 0).long()}
            settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 0, "eos_token_id": END}
            if penalty is not None:
                settings["repetition_penalty"] = penalty
            out = target.generate(
                **inputs, **settings, speculative={"adaptive": False, **speculative}, return_dict_in_generate=True
            )
            assert torch.equal(out.sequences, target.generate(**inputs, **settings)), scheme
            accepted += out.speculation.num_accepted_draft_tokens
        assert accepted, scheme
