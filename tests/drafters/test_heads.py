"""What drafts with heads hold, against the head's laws worked out anew; and mistakes that the comparison must see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads import EagleHead, MedusaHeads
from specheads.drafters import head as head_module
from specheads.drafters import pairs
from specheads.drafters.best_first import LEAST_VALUE
from specheads.drafters.eagle import EagleDrafter
from specheads.drafters.head_runner import HeadRunner
from specheads.drafters.medusa import MedusaDrafter, sparse_tree
from specheads.heads import DraftHead

from ..tiny import tiny, with_head
from .reference import Seen, drafted_paths, law_after, watched

VOCAB = 8
KNOWN = [0, 2, 3, 5, 7]
END = 2
LENGTHS = [6, 2, 5, 1, 3, 6, 4, 2]
HEADS: dict[str, dict[str, Any]] = {
    "eagle 1": {},
    "eagle 1, normalised pairs": {"add_para_norm": True},
    "eagle 3": {},
    "eagle 3, own vocabulary": {"draft_tokens": KNOWN, "fc_norm": True, "norm_output": True},
    "eagle 3, two layers": {"transformer_layer_config": {"num_hidden_layers": 2}, "norm_before_residual": True},
    "medusa": {},
    "medusa, own vocabulary": {"draft_tokens": KNOWN, "original_lm_head": True},
    "medusa, markov, one output layer": {"dependence": "markov", "markov_rank": 3, "original_lm_head": True},
    "medusa, hydra": {"dependence": "hydra"},
    "medusa, markov": {"dependence": "markov", "markov_rank": 3},
}


def random_head(target: PreTrainedModel, name: str) -> DraftHead:
    fields = HEADS[name]
    if name.startswith("medusa"):
        head: DraftHead = MedusaHeads.from_target(target, **{"num_heads": 3, **fields})
    else:
        head = EagleHead.from_target(target, version=int(name[6]), **fields)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15, generator=generator)
    return head


def setting(name: str, family: str = "llama") -> tuple[PreTrainedModel, DraftHead, type]:
    target = tiny(family, VOCAB, spread=0.15, eos_token_id=END)
    head = random_head(target, name)
    return with_head(target, head), head, MedusaDrafter if name.startswith("medusa") else EagleDrafter


def drafts(target: PreTrainedModel, drafter: type, speculative: dict[str, Any], samples: bool = True) -> tuple[Seen, Any]:
    """The drafts of a call with rows of several lengths, some of which end early."""
    ids = torch.randint(3, VOCAB, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        mask[row, -length:] = 1
    with watched(drafter) as seen:
        out = target.generate(
            ids * mask, attention_mask=mask, do_sample=samples, top_k=0, max_new_tokens=14, pad_token_id=0,
            speculative={"adaptive": False, "draft_tokens": 3, "seed": 0, **speculative}, return_dict_in_generate=True,
        )  # fmt: skip
    assert len({len(texts) for texts, _ in seen}) > 1  # rows have left
    return seen, out.speculation


def went_on_after_drafts(seen: Seen) -> int:
    """How often a row drafts again after drafts of its own were accepted."""
    rounds = [texts for texts, _ in seen]
    return sum(
        any(len(later) > len(text) + 1 and later[: len(text)] == text for later in after)
        for before, after in pairwise(rounds)
        for text in before
    )


def differences(name: str, speculative: dict[str, Any], family: str = "llama") -> list[float]:
    """How far the laws that nodes were drawn from are from the head's, for every sampled node."""
    target, head, drafter = setting(name, family)
    seen, stats = drafts(target, drafter, speculative)
    assert stats.acceptance_histogram[0] > 5
    assert went_on_after_drafts(seen) > 3
    found = []
    for texts, tree in seen:
        for line, text in enumerate(texts):
            paths = drafted_paths(tree, line)
            for node, path in enumerate(paths):
                index = -1 if tree.proposal_of is None else int(tree.proposal_of[line, node])
                if index >= 0:
                    law = law_after(head, target, text, path[:-1])
                    siblings = {
                        own[-1]
                        for other, own in enumerate(paths)
                        if own[:-1] == path[:-1] and int(tree.proposal_of[line, other]) < 0
                    }
                    law[list(siblings)] = 0
                    found.append(float((tree.proposals[line, index] - law / law.sum()).abs().max()))
    return found


@pytest.mark.parametrize("name", HEADS)
def test_a_chain_is_drawn_from_the_heads_law(name: str) -> None:
    found = differences(name, {})
    assert len(found) >= 30
    assert max(found) < 1e-9


@pytest.mark.parametrize("name", ["eagle 1", "eagle 3, own vocabulary", "medusa", "medusa, hydra"])
def test_the_sampled_nodes_of_a_mixed_tree_are_drawn_from_the_heads_law(name: str) -> None:
    found = differences(name, {"tree_nodes": 8})
    assert len(found) >= 30
    assert max(found) < 1e-9


def best_paths(law: Callable[[Sequence[int]], Tensor], depth: int, nodes: int) -> set[tuple[int, ...]]:
    """A dynamic tree, in plain words."""
    frontier: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    candidates: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(depth):
        level = [(value * p, (*path, token)) for value, path in frontier for token, p in enumerate(law(path).tolist())]
        level = sorted(level, reverse=True)[:nodes]
        candidates += level
        frontier = level[: -(-nodes // depth)]
    return {path for value, path in sorted(candidates, reverse=True)[:nodes] if value >= LEAST_VALUE}


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("name", ["eagle 1", "eagle 3, own vocabulary"])
def test_a_dynamic_tree_has_the_most_probable_nodes(name: str, samples: bool) -> None:
    target, head, drafter = setting(name)
    seen, stats = drafts(target, drafter, {"tree_nodes": 7, "verification": "match"}, samples)
    assert stats.num_accepted_draft_tokens > 5
    for (texts, tree), budget in zip(seen, seen.budgets, strict=True):
        for line, text in enumerate(texts[:3] if budget.depth else []):
            best = best_paths(lambda path, text=text: law_after(head, target, text, path), budget.depth, budget.nodes)
            assert set(drafted_paths(tree, line)) == {path for path in best if len(path) <= budget.depths[line]}


@pytest.mark.parametrize("name", ["medusa", "medusa, hydra", "medusa, own vocabulary"])
def test_a_static_tree_has_the_tokens_of_its_ranks(name: str) -> None:
    target, head, drafter = setting(name)
    head.config.head_accuracies = [[0.6, 0.2, 0.1], [0.6, 0.2], [0.6, 0.1]]
    shape = sparse_tree(tuple(map(tuple, head.config.head_accuracies)), 7, 3, VOCAB)
    ranks = [rank for level in shape.levels for rank in level.ranks]
    seen, _ = drafts(target, drafter, {"tree_nodes": 7}, samples=False)
    checked = 0
    for texts, tree in seen:
        for line, text in enumerate(texts):
            if tree.size != 7 or tree.depth != 3:
                continue
            for node, path in enumerate(drafted_paths(tree, line)):
                order = law_after(head, target, text, path[:-1]).argsort(descending=True).tolist()
                assert order.index(path[-1]) == ranks[node]
                checked += 1
    assert checked > 50


def test_the_shape_of_a_static_tree_follows_the_accuracies() -> None:
    sure = sparse_tree(((0.9, 0.05), (0.9, 0.05), (0.9, 0.05)), 3, 3, VOCAB)
    unsure = sparse_tree(((0.4, 0.3, 0.2), (0.2, 0.1), (0.1, 0.1)), 3, 3, VOCAB)
    assert sure.parents == [0, 1, 2]
    assert unsure.parents == [0, 0, 0]


def test_an_encoder_decoders_features_are_the_decoders() -> None:
    target = tiny("t5", VOCAB, spread=0.3, eos_token_id=None)
    for head in (
        random_head(target, "medusa"),
        EagleHead.from_target(target, transformer_layer_config={"num_attention_heads": 2, "num_key_value_heads": 2}),
    ):
        with_head(target, head)
        read = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
        with watched(type(head_module.drafter_for(head, target))) as seen:
            settings = {"adaptive": False, "draft_tokens": 2, "seed": 1}
            target.generate(**read, do_sample=True, top_k=0, max_new_tokens=9, speculative=settings)
        for texts, tree in seen:
            for node, path in enumerate(drafted_paths(tree, 0)):
                law = law_after(head, target, texts[0], path[:-1], **read)
                assert float((tree.proposals[0, node] - law).abs().max()) < 1e-9


Patch = Callable[[pytest.MonkeyPatch], None]


def features_of_the_node_before(patch: pytest.MonkeyPatch) -> None:
    original = pairs.PendingPairs.add

    def add(self: Any, accepted: Any) -> None:
        before = self.width
        original(self, accepted)
        self.places = [[place if place < before else max(place - 1, before) for place in row] for row in self.places]

    patch.setattr(pairs.PendingPairs, "add", add)


def features_of_the_column_after(patch: pytest.MonkeyPatch) -> None:
    original = pairs.Pairs.of_prompt

    def of_prompt(known: Any) -> Any:
        known.features = known.features.roll(-1, dims=1)
        return original(known)

    patch.setattr(pairs.Pairs, "of_prompt", of_prompt)


def forgotten_rollback(patch: pytest.MonkeyPatch) -> None:
    original = HeadRunner.commit
    patch.setattr(
        HeadRunner, "commit", lambda self, counts: original(self, counts or [self.written] * len(self.cache.layout.lengths))
    )


def positions_not_counted(patch: pytest.MonkeyPatch) -> None:
    original = HeadRunner._open
    patch.setattr(HeadRunner, "_open", lambda self, depths, size: original(self, depths * 0, size))


def states_of_the_root(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        head_module.NodeValues, "of_parents", lambda self, visible: self.values[:, :1].expand(-1, visible.shape[1], -1).clone()
    )
    patch.setattr(head_module.NodeValues, "last", lambda self: self.values[:, :1])


def rows_that_left_in_the_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pairs.PendingPairs, "keep_rows", lambda self, lines: None)
    patch.setattr(MedusaDrafter, "keep_rows", lambda self, lines: None)


def hidden_state_of_the_root(patch: pytest.MonkeyPatch) -> None:
    original = MedusaDrafter.commit

    def commit(self: Any, context: Any, accepted: Any) -> None:
        original(self, context, accepted)
        self.hidden = accepted.features[:, 0]

    patch.setattr(MedusaDrafter, "commit", commit)


MUTANTS: dict[str, tuple[Patch, str]] = {
    "features of the node before": (features_of_the_node_before, "eagle 3"),
    "features of the column after": (features_of_the_column_after, "eagle 1"),
    "forgotten rollback": (forgotten_rollback, "eagle 3"),
    "positions not counted": (positions_not_counted, "eagle 3"),
    "states of the root": (states_of_the_root, "eagle 1"),
    "paths of the root": (states_of_the_root, "medusa, hydra"),
    "hidden state of the root": (hidden_state_of_the_root, "medusa"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_comparison_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, head = MUTANTS[name]
    mutate(monkeypatch)
    assert max(differences(head, {} if name != "paths of the root" else {"tree_nodes": 8})) > 1e-4


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (test_a_static_tree_has_the_tokens_of_its_ranks, "medusa"),
        (test_a_dynamic_tree_has_the_most_probable_nodes, "eagle 3, own vocabulary"),
    ],
)
def test_the_comparison_of_trees_sees(check: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "medusa":
        hidden_state_of_the_root(monkeypatch)
        arguments: tuple[Any, ...] = (name,)
    else:
        states_of_the_root(monkeypatch)
        arguments = (name, False)
    with pytest.raises((AssertionError, ValueError)):
        check(*arguments)


@pytest.mark.parametrize("name", ["eagle 3", "medusa"])
def test_the_comparison_sees_rows_that_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_that_left_in_the_way(monkeypatch)
    with pytest.raises((ValueError, RuntimeError, IndexError, AssertionError)):
        assert max(differences(name, {})) < 1e-4
