"""Lookahead, retrieval, and draft models with another tokenizer: the target's law, and greedy text as of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specheads
from specheads.drafters import growth, retrieval
from specheads.drafters.lookahead import LookaheadDrafter
from specheads.drafters.retrieval import RetrievalDrafter
from specheads.drafters.retrieval_store import build_store
from specheads.tree import DraftTree, Probes

from ..drafters.vocabularies import LETTERS, reworded, spelling
from ..tiny import tiny
from .replay import branches, total_variation
from .test_greedy import CORE, NEW_TOKENS, other_target, prompt
from .whole_loop import PADDED, PADDED_MASK, PROMPT, SETTINGS, SMALL, noise_of, plain_law, speculative_law

Prepared = tuple[PreTrainedModel, dict[str, Any]]


def with_lookahead(target: PreTrainedModel, folder: Path) -> Prepared:
    return specheads.enable(target, drafter=LookaheadDrafter(window=3, ngram=3)), {}


def with_retrieval(target: PreTrainedModel, folder: Path) -> Prepared:
    generator = torch.Generator().manual_seed(1)
    size = target.config.get_text_config().vocab_size
    documents = [torch.randint(size, (40,), generator=generator).tolist() for _ in range(6)]
    build_store(folder, documents)
    return specheads.enable(target, drafter=f"retrieval:{folder}"), {}


def with_other_vocabulary(target: PreTrainedModel, folder: Path) -> Prepared:
    """The draft has the target's letters but the last in another order, one that the target lacks, and a pair."""
    size = target.config.get_text_config().vocab_size
    letters = LETTERS[:size]
    theirs = ["?", *reversed(letters[:-1]), "ab"]
    places = [theirs.index(letter) if letter in theirs else -1 for letter in letters]
    return specheads.enable(target), {
        "assistant_model": reworded(target, places, len(theirs)),
        "tokenizer": spelling(letters),
        "assistant_tokenizer": spelling(theirs, [("a", "b")]),
    }


DRAFTERS: dict[str, Callable[[PreTrainedModel, Path], Prepared]] = {
    "lookahead": with_lookahead,
    "retrieval": with_retrieval,
    "other vocabulary": with_other_vocabulary,
}
# name: drafter, settings
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "lookahead match": ("lookahead", {"tree_nodes": 3, "verification": "match"}),
    "lookahead traversal": ("lookahead", {"tree_nodes": 3, "verification": "traversal"}),
    "retrieval match": ("retrieval", {"tree_nodes": 3, "verification": "match"}),
    "retrieval token": ("retrieval", {"verification": "token"}),
    "other vocabulary token": ("other vocabulary", {"verification": "token"}),
    "other vocabulary block": ("other vocabulary", {"verification": "block"}),
    "other vocabulary tree": ("other vocabulary", {"tree_nodes": 4, "verification": "traversal"}),
}


def distance(scheme: str, setting: str, batch: int, tokens: int, folder: Path, vocab_size: int = 3) -> float:
    """Total variation between speculative and plain sampling, the worst over the rows."""
    name, settings = SCHEMES[scheme]
    target, more = DRAFTERS[name](tiny("llama", vocab_size, spread=0.9, **SMALL, eos_token_id=None), folder)
    ids, mask = (PROMPT, torch.ones_like(PROMPT)) if batch == 1 else (PADDED, PADDED_MASK)
    arguments = {"max_new_tokens": tokens, "top_k": 0, **SETTINGS[setting]}
    settings = {"adaptive": False, "draft_tokens": 2, **settings}
    worst = 0.0
    for row in range(batch):
        law, _ = speculative_law(target, ids, row, attention_mask=mask, speculative=settings, **arguments, **more)
        worst = max(worst, total_variation(law, plain_law(target, ids, row, mask, **arguments)))
    return worst


@pytest.mark.parametrize("setting", ["plain", "repetition", "end_token"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_law_is_kept(scheme: str, setting: str, tmp_path: Path) -> None:
    assert distance(scheme, setting, 1, 4 if setting == "end_token" else 3, tmp_path) < 1e-9


@pytest.mark.parametrize("scheme", ["lookahead match", "retrieval match", "other vocabulary block"])
def test_the_law_is_kept_in_batches_and_larger_vocabularies(scheme: str, tmp_path: Path) -> None:
    assert distance(scheme, "warped", 2, 3, tmp_path) < 1e-9
    assert distance(scheme, "warped", 1, 4, tmp_path, vocab_size=5) < 1e-9


def drafts_that_see_the_window(patch: pytest.MonkeyPatch) -> None:
    original = Probes.beside

    def beside(self: Probes, tokens: Tensor, depths: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, depths, joined = original(self, tokens, depths, visible)
        joined[:, : visible.shape[1], visible.shape[1] :] = True
        return tokens, depths, joined

    patch.setattr(Probes, "beside", beside)


def frequencies_as_a_law(patch: pytest.MonkeyPatch) -> None:
    """The most frequent continuation, taken for one that was drawn."""
    original = RetrievalDrafter.propose

    def propose(self: RetrievalDrafter, context: Any, budget: Any) -> DraftTree:
        tree = original(self, context, budget)
        if not tree.size:
            return tree
        laws = torch.full((*tree.tokens.shape, context.vocab_size), 1 / context.vocab_size, dtype=torch.double)
        return DraftTree.chain(tree.tokens, laws)

    patch.setattr(retrieval.RetrievalDrafter, "propose", propose)


def shared_tokens_in_another_order(patch: pytest.MonkeyPatch) -> None:
    original = growth.over_all_tokens
    patch.setattr(growth, "over_all_tokens", lambda source, laws, size: original(source, laws.flip(-1), size))


def law_of_all_tokens(patch: pytest.MonkeyPatch) -> None:
    """Drawn from the shared tokens, verified as if from all."""
    original = growth.over_all_tokens
    patch.setattr(growth, "over_all_tokens", lambda source, laws, size: 0.8 * original(source, laws, size))


MUTANTS = {
    "drafts that see the window": (drafts_that_see_the_window, "lookahead match"),
    "frequencies as a law": (frequencies_as_a_law, "retrieval token"),
    "shared tokens in another order": (shared_tokens_in_another_order, "other vocabulary token"),
    "the law of all tokens": (law_of_all_tokens, "other vocabulary block"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_replay_sees(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mutate, scheme = MUTANTS[name]
    mutate(monkeypatch)
    assert distance(scheme, "plain", 1, 3, tmp_path) > 1e-3


def test_shared_tokens_are_accepted_as_often_as_the_laws_overlap(tmp_path: Path) -> None:
    """The sum of min(p, q), q restricted to the shared tokens and made to sum to 1: every branch, no sampling error."""
    target, more = with_other_vocabulary(tiny("llama", 4, spread=0.9, **SMALL, eos_token_id=None), tmp_path)
    draft, vocabulary = more["assistant_model"], more["assistant_tokenizer"].get_vocab()

    def accepted(noise: Any) -> int:
        with noise_of(noise):
            out = target.generate(
                PROMPT, attention_mask=torch.ones_like(PROMPT), do_sample=True, top_k=0, max_new_tokens=3, pad_token_id=0,
                return_dict_in_generate=True, **more,
                speculative={"draft_tokens": 1, "adaptive": False, "per_step": True, "verification": "token"},
            )  # fmt: skip
        return out.speculation.rows[0].per_step_accepted[1]

    rate = sum(probability * result for probability, result in branches(accepted))
    places = [vocabulary.get(letter, -1) for letter in LETTERS[:4]]
    ours, theirs = zip(*((i, place) for i, place in enumerate(places) if place >= 0), strict=True)
    expected = unrestricted = 0.0
    with torch.no_grad():
        first = target(PROMPT).logits[0, -1].softmax(-1)
        for token, probability in enumerate(first.tolist()):
            text = [*PROMPT[0].tolist(), token]
            law = target(torch.tensor([text])).logits[0, -1].softmax(-1)
            read = more["assistant_tokenizer"]("".join(LETTERS[i] for i in text)).input_ids
            own = draft(torch.tensor([read])).logits[0, -1].softmax(-1)[list(theirs)]
            expected += probability * float(torch.minimum(law[list(ours)], own / own.sum()).sum())
            unrestricted += probability * float(torch.minimum(law[list(ours)], own).sum())
    assert rate == pytest.approx(expected, abs=1e-9)
    assert abs(expected - unrestricted) > 1e-3


GREEDY = [
    *((family, "lookahead") for family in [*CORE, "gemma2"] if family != "t5"),
    *((family, "retrieval") for family in [*CORE, "bloom"]),
    *((family, "other vocabulary") for family in CORE if family != "t5"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "drafter"), GREEDY)
def test_greedy_text_is_plain(family: str, drafter: str, tmp_path: Path) -> None:
    target, more = DRAFTERS[drafter](other_target(family), tmp_path)
    accepted = 0
    for batch in (1, 4):
        inputs = prompt(family, batch)
        plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        if drafter == "retrieval":  # earlier outputs, from which it drafts
            build_store(tmp_path, plain.tolist())
            specheads.enable(target, drafter=f"retrieval:{tmp_path}")
        for settings in ({"draft_tokens": 2}, {"draft_tokens": 4, "tree_nodes": 9}, {"adaptive": True}):
            out = target.generate(
                **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True,
                speculative={"adaptive": False, **settings}, **more,
            )  # fmt: skip
            assert torch.equal(out.sequences, plain), (batch, settings)
            accepted += out.speculation.num_accepted_draft_tokens
    assert accepted > 0
