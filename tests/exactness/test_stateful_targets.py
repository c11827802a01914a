"""Targets with layers whose state cannot be shortened, and every drafter: it drafts chains for them, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import specheads
from specheads.drafters.retrieval_store import build_store
from specheads.replay import Snapshot

from ..drafters.vocabularies import LETTERS, reworded, spelling
from ..tiny import perturbed, tiny
from .head_loop import random_head
from .test_greedy import prompt

FAMILIES = ["mamba2", "lfm2", "qwen3_next", "falcon_h1"]
NEW_TOKENS = 14


def named(name: str) -> Callable[[PreTrainedModel, Path], dict[str, Any]]:
    return lambda target, folder: {"drafter": name}


def retrieval(target: PreTrainedModel, folder: Path) -> dict[str, Any]:
    plain = target.generate(**prompt("llama", 2), max_new_tokens=NEW_TOKENS, do_sample=False)
    build_store(folder, plain.tolist())
    return {"drafter": f"retrieval:{folder}"}


def other_tokenizer(target: PreTrainedModel, folder: Path) -> dict[str, Any]:
    theirs = ["?", *reversed(LETTERS), "!"]
    draft = reworded(tiny("llama"), [theirs.index(letter) for letter in LETTERS], len(theirs))
    return {"drafter": draft, "tokenizer": spelling(LETTERS), "assistant_tokenizer": spelling(theirs)}


def head(kind: str) -> Callable[[PreTrainedModel, Path], dict[str, Any]]:
    return lambda target, folder: {"drafter": random_head(target, kind)}


# drafter: how it is asked for, and what is said if it is refused
TABLE: dict[str, tuple[Callable[[PreTrainedModel, Path], dict[str, Any]], str | None]] = {
    "auto": (named("auto"), None),
    "suffix": (named("suffix"), None),
    "recycling": (named("recycling"), None),
    "lookup": (named("lookup"), None),
    "retrieval": (retrieval, None),
    "draft model": (lambda target, folder: {"drafter": perturbed(target, 0.05)}, None),
    "draft model without a state": (lambda target, folder: {"drafter": tiny("llama")}, None),
    "draft model with another tokenizer": (other_tokenizer, None),
    "draft model, itself sped up": (lambda target, folder: {"drafter": {"draft": tiny("llama"), "inner": "suffix"}}, None),
    "Medusa heads": (head("medusa"), None),
    "EAGLE head": (head("eagle 1"), None),
    "EAGLE-3 head": (head("eagle 3"), None),
    "lookahead": (named("lookahead"), "takes chains only"),
    "several models": (lambda target, folder: {"drafter": [tiny("llama")], "tree_nodes": 4}, "takes chains and no trees"),
    "early exit": (named("early-exit:1"), "state that a draft would change"),
    "prediction layers": (named("mtp"), "multi-token-prediction"),
}
# What they draft holds, for they are like the target, or know its text.
ACCEPTED = {"retrieval", "draft model"}


def differences(family: str, drafter: str, folder: Path) -> tuple[bool, int]:
    """Whether greedy text is plain's, alone and in a padded batch, and how many drafted tokens were accepted."""
    target = tiny(family)
    if hasattr(target, "set_experts_implementation"):
        target.set_experts_implementation("eager")
    specheads.enable(target, **TABLE[drafter][0](target, folder))
    accepted, same = 0, True
    for batch in (1, 2):
        inputs = prompt(family, batch)
        plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        out = target.generate(
            **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True,
            speculative={"draft_tokens": 3, "adaptive": False},
        )  # fmt: skip
        same = same and torch.equal(out.sequences, plain)
        accepted += out.speculation.num_accepted_draft_tokens
    return same, accepted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("drafter", [name for name, (_, refusal) in TABLE.items() if refusal is None])
@pytest.mark.parametrize("family", FAMILIES)
def test_chains_leave_the_text_as_it_is(family: str, drafter: str, tmp_path: Path) -> None:
    same, accepted = differences(family, drafter, tmp_path)
    assert same
    assert accepted > 0 or drafter not in ACCEPTED


@pytest.mark.parametrize("drafter", [name for name, (_, refusal) in TABLE.items() if refusal is not None])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_cannot_draft_for_them_says_so_before_anything_is_computed(family: str, drafter: str, tmp_path: Path) -> None:
    make, refusal = TABLE[drafter]
    target = tiny(family)
    target.register_forward_pre_hook(lambda *_: pytest.fail("It should be refused before anything is computed."))
    with pytest.raises(ValueError, match=refusal):
        specheads.enable(target, **make(target, tmp_path))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_that_is_not_put_back_is_seen(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Snapshot, "restore", lambda self, cache: None)
    assert not differences(family, "recycling", tmp_path)[0]
