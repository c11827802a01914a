"""Drafting with heads keeps the law, to rounding: every branch of the real `generate`, and mistakes that it must see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.drafters import eagle, growth, medusa
from specheads.drafters import head as head_drafters
from specheads.drafters.head import HeadDrafter
from specheads.processors import ScoreProcessors
from specheads.tree import DraftTree

from ..drafters.test_heads import features_of_the_node_before, forgotten_rollback, hidden_state_of_the_root
from .head_loop import BATCH, BATCH_MASK, KNOWN, SCHEMES, head_distance, target_with_head
from .replay import total_variation
from .whole_loop import PROMPT, plain_law, speculative_law

ALL_AT_ONCE = {"temperature": 0.7, "top_k": 2, "repetition_penalty": 1.7}


@pytest.mark.parametrize("setting", ["plain", "warped"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_row(scheme: str, setting: str) -> None:
    distance, branches = head_distance(scheme, setting)
    assert distance < 1e-9
    assert branches > 3


@pytest.mark.parametrize("scheme", ["medusa mixed tree", "eagle 1 mixed tree"])
def test_a_tree_with_more_nodes_than_there_are_tokens(scheme: str) -> None:
    """Where warpers leave fewer tokens than a level has places, nothing hangs below the empty ones."""
    kind, fields, _ = SCHEMES[scheme]
    target = target_with_head(kind, **fields)
    mask, speculative = torch.ones_like(PROMPT), {"adaptive": False, "draft_tokens": 2, "tree_nodes": 6}
    arguments = {"max_new_tokens": 6, "top_k": 1, "repetition_penalty": 1.7}  # one text, so that there is one branch
    law, _ = speculative_law(target, PROMPT, 0, attention_mask=mask, speculative=speculative, **arguments)
    assert total_variation(law, plain_law(target, PROMPT, 0, mask, **arguments)) < 1e-9


@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_three_rows(scheme: str, row: int) -> None:
    kind, fields, speculative = SCHEMES[scheme]
    target = target_with_head(kind, **fields)
    arguments = {"max_new_tokens": 4, **ALL_AT_ONCE}
    law, branches = speculative_law(
        target, BATCH, row, stream=1, attention_mask=BATCH_MASK, speculative={"adaptive": False, **speculative}, **arguments
    )
    assert total_variation(law, plain_law(target, BATCH, row, BATCH_MASK, **arguments)) < 1e-9
    assert branches > 3


@pytest.mark.parametrize("mode", ["token", "match"])
@pytest.mark.parametrize("scheme", ["eagle 3 chain", "medusa mixed tree"])
def test_other_verifications(scheme: str, mode: str) -> None:
    assert head_distance(scheme, "warped", verification=mode)[0] < 1e-9


@pytest.mark.parametrize("speculative", [{"draft_tokens": 2}, {"draft_tokens": 2, "tree_nodes": 3}])
def test_a_token_that_the_head_does_not_know_is_said_as_often_as_it_should(speculative: dict[str, Any]) -> None:
    (unknown,) = set(range(3)) - set(KNOWN)
    target = target_with_head("eagle 3", draft_tokens=KNOWN)
    arguments = {"max_new_tokens": 3, "top_k": 0}
    law, _ = speculative_law(
        target, PROMPT, 0, attention_mask=torch.ones_like(PROMPT), speculative={"adaptive": False, **speculative}, **arguments
    )
    expected = plain_law(target, PROMPT, 0, torch.ones_like(PROMPT), **arguments)
    for position in range(3):
        own, theirs = (sum(p for tokens, p in one.items() if tokens[position] == unknown) for one in (law, expected))
        assert own == pytest.approx(theirs, abs=1e-9)
        assert own > 0.01


@pytest.mark.parametrize("scheme", SCHEMES)
def test_some_drafts_are_accepted_and_some_are_not(scheme: str) -> None:
    """Else the laws above would hold for want of anything to verify."""
    kind, fields, speculative = SCHEMES[scheme]
    target = target_with_head(kind, **fields)
    ids = PROMPT.expand(200, -1)
    stats = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=8, pad_token_id=0,
        speculative={"adaptive": False, "seed": 1, **speculative}, return_dict_in_generate=True,
    ).speculation  # fmt: skip
    assert 20 < stats.acceptance_histogram[2] < 0.9 * sum(stats.acceptance_histogram)
    assert stats.acceptance_histogram[1] > 20


Patch = Callable[[pytest.MonkeyPatch], None]


def _changed(patch: pytest.MonkeyPatch, module: Any, grower: str, change: Callable[[DraftTree], DraftTree]) -> None:
    original = getattr(module, grower)

    def grow(*arguments: Any) -> Any:
        grown = original(*arguments)
        return change(grown) if isinstance(grown, DraftTree) else replace(grown, tree=change(grown.tree))

    patch.setattr(module, grower, grow)


def own_ids_for_the_targets(patch: pytest.MonkeyPatch) -> None:
    """The map from the draft vocabulary applied to the law and not to the token."""
    patch.setattr(growth, "named", lambda source, columns: columns)


def argmax_draft(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(growth, "draw", lambda context, law, lines, depth: law.argmax(dim=-1))


def laws_of_the_position_before(patch: pytest.MonkeyPatch) -> None:
    def shifted(tree: DraftTree) -> DraftTree:
        return tree if tree.proposals is None else replace(tree, proposals=tree.proposals.roll(1, dims=1))

    _changed(patch, head_drafters, "grow_chain", shifted)


def laws_before_the_processors(patch: pytest.MonkeyPatch) -> None:
    def raw(tree: DraftTree) -> DraftTree:
        if tree.proposals is None:
            return tree
        return replace(tree, proposals=(tree.proposals + 0.2) / (tree.proposals + 0.2).sum(dim=-1, keepdim=True))

    _changed(patch, head_drafters, "grow_chain", raw)


def ratios_for_point_masses(module: Any, grower: str) -> Patch:
    """The paper's acceptance rule on nodes that were not drawn."""

    def with_laws(tree: DraftTree) -> DraftTree:
        laws = torch.full((1, max(tree.size, 1), 3), 1 / 3, dtype=torch.double)
        return replace(tree, proposals=laws, proposal_of=torch.arange(tree.size)[None])

    return lambda patch: _changed(patch, module, grower, with_laws)


def laws_with_the_siblings(patch: pytest.MonkeyPatch) -> None:
    """A sampled node's law as it was before its siblings were taken out of it."""
    original = growth._without

    def without(law: Tensor, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return law, original(law, parents, tokens)[1]

    original_laws = growth._collect_laws

    def collect(levels: Any) -> Any:
        laws, index = original_laws(levels)
        rest = laws.clone()
        rest[..., 0] = 0
        return rest / rest.sum(dim=-1, keepdim=True), index

    patch.setattr(growth, "_without", without)
    patch.setattr(growth, "_collect_laws", collect)


def laws_before_the_map(patch: pytest.MonkeyPatch) -> None:
    """The draft vocabulary's law taken for one over the target's first tokens."""

    def over_all_tokens(source: Any, laws: Tensor, vocab_size: int) -> Tensor:
        return torch.nn.functional.pad(laws, (0, vocab_size - laws.shape[-1]))

    patch.setattr(growth, "over_all_tokens", over_all_tokens)


def draws_without_the_temperature(patch: pytest.MonkeyPatch) -> None:
    """Tokens drawn at the temperature of 1, laws noted at that of the call."""
    original = growth.draw
    patch.setattr(growth, "draw", lambda context, law, lines, depth: original(context, law**0.7, lines, depth))


def penalties_of_the_committed_text(patch: pytest.MonkeyPatch) -> None:
    """The target's penalties do not see the drafted tokens."""
    original = ScoreProcessors.__call__
    patch.setattr(ScoreProcessors, "__call__", lambda self, rows, drafted, scores: original(self, rows, drafted[:, :0], scores))


def ratios_for_the_point_masses_of_a_mixed_tree(patch: pytest.MonkeyPatch) -> None:
    original = growth._collect_laws
    patch.setattr(growth, "_collect_laws", lambda levels: (original(levels)[0], original(levels)[1].clamp(min=0)))


MUTANTS: dict[str, tuple[Patch, str, str]] = {
    "laws before the map": (laws_before_the_map, "eagle 3 chain", "plain"),
    "laws before the map, mixed tree": (laws_before_the_map, "eagle 3 mixed tree", "plain"),
    "draws without the temperature": (draws_without_the_temperature, "eagle 1 chain", "warped"),
    "draws without the temperature, Medusa": (draws_without_the_temperature, "medusa chain", "warped"),
    "penalties of the committed text": (penalties_of_the_committed_text, "eagle 3 chain", "repetition"),
    "ratios for point masses": (ratios_for_the_point_masses_of_a_mixed_tree, "medusa mixed tree", "plain"),
    "ratios for point masses, EAGLE": (ratios_for_the_point_masses_of_a_mixed_tree, "eagle 3 mixed tree", "plain"),
    "own ids for the target's": (own_ids_for_the_targets, "eagle 3 chain", "plain"),
    "own ids in a mixed tree": (own_ids_for_the_targets, "eagle 3 mixed tree", "plain"),
    "argmax draft, Medusa": (argmax_draft, "medusa chain", "plain"),
    "argmax draft, EAGLE-1": (argmax_draft, "eagle 1 chain", "plain"),
    "laws of the position before, Medusa": (laws_of_the_position_before, "medusa chain", "plain"),
    "laws of the position before, EAGLE": (laws_of_the_position_before, "eagle 1 chain", "plain"),
    "laws before the processors": (laws_before_the_processors, "eagle 3 chain", "warped"),
    "ratios in a static tree": (ratios_for_point_masses(medusa, "filled_tree"), "medusa static tree", "plain"),
    "ratios in a dynamic tree": (ratios_for_point_masses(eagle, "grow_dynamic"), "eagle 3 dynamic tree", "plain"),
    "laws with the siblings": (laws_with_the_siblings, "medusa mixed tree", "plain"),
    "laws with the siblings, EAGLE": (laws_with_the_siblings, "eagle 3 mixed tree", "plain"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_replay_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, scheme, setting = MUTANTS[name]
    mutate(monkeypatch)
    later = "position" in name or "penalties" in name  # two drafted tokens show them
    assert head_distance(scheme, setting, tokens=4 if later else 3)[0] > 1e-3


def penalties_missing_in_the_draft(patch: pytest.MonkeyPatch) -> None:
    """The draft's processors do not see the drafted tokens."""
    original = HeadDrafter.scores
    patch.setattr(
        HeadDrafter,
        "scores",
        lambda self, context, lines, drafted, logits: original(self, context, lines, drafted[:, :0], logits),
    )


@pytest.mark.parametrize(
    ("mistake", "scheme", "setting"),
    [
        (features_of_the_node_before, "eagle 3 chain", "warped"),
        (hidden_state_of_the_root, "medusa chain", "warped"),
        (forgotten_rollback, "eagle 1 chain", "warped"),
        (penalties_missing_in_the_draft, "eagle 3 chain", "repetition"),
    ],
)
def test_what_makes_drafts_worse_keeps_the_law(
    mistake: Patch, scheme: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stale features and the like change what is drafted with its law: `test_perfect_heads.py` sees them, not the replay."""
    mistake(monkeypatch)
    assert head_distance(scheme, setting)[0] < 1e-9
