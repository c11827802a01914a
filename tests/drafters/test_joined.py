"""Copies and another drafter's nodes in one tree: nothing is lost, nothing stands twice, and what each adds is learnt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.drafters import joined as module
from specheads.drafters.best_first import Draft
from specheads.drafters.joined import Additions, joined, openings
from specheads.tree import NO_TOKEN, DraftTree, path_to

VOCABULARY = 4


@st.composite
def rows(draw: Any) -> list[tuple[list[int], list[int]]]:
    """Trees in which no two siblings bear one token, of two rows."""
    made = []
    for _line in range(2):
        tokens: list[int] = []
        parents: list[int] = []
        for _ in range(draw(st.integers(0, 6))):
            parent, token = draw(st.integers(0, len(tokens))), draw(st.integers(0, VOCABULARY - 1))
            if (parent, token) not in zip(parents, tokens, strict=True):
                tokens.append(token)
                parents.append(parent)
        made.append((tokens, parents))
    return made


def paths(tree: DraftTree, line: int) -> list[tuple[int, ...]]:
    """The tokens down to every node of a row."""
    tokens, parents = tree.tokens[line].tolist(), tree.parents[line].tolist()
    return [
        tuple(tokens[node - 1] for node in path_to(place + 1, parents))
        for place, token in enumerate(tokens)
        if token != NO_TOKEN
    ]


def check_joined(first: list[tuple[list[int], list[int]]], second: list[tuple[list[int], list[int]]]) -> None:
    trees = [DraftTree.from_rows(each, torch.device("cpu")) for each in (first, second)]
    both = joined(*trees)
    both.check(2, VOCABULARY, takes_trees=True)
    for line in range(2):
        found = paths(both, line)
        assert len(set(found)) == len(found)
        assert set(found) == {path for tree in trees for path in paths(tree, line)}
    if trees[0].size:
        assert torch.equal(both.tokens[:, : trees[0].size], trees[0].tokens)


@given(rows(), rows())
@settings(max_examples=60, deadline=None)
def test_what_either_holds_stands_once(first: Any, second: Any) -> None:
    check_joined(first, second)


def test_nodes_that_are_not_looked_for_below_copies_stand_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without the levels below the first: what is common to two long paths is not found."""
    whole = module.joined

    def shallow(copies: DraftTree, other: DraftTree) -> DraftTree:
        depth, other.depth = other.depth, 1
        tree = whole(copies, other)
        tree.depth = max(copies.depth, depth)
        return tree

    monkeypatch.setitem(globals(), "joined", shallow)
    path = ([1, 2, 3], [0, 1, 2])
    with pytest.raises((AssertionError, ValueError)):
        check_joined([path, path], [path, path])


def test_how_likely_copies_leave_a_depth_open() -> None:
    draft = Draft([1, 2, 3], [0, 0, 1], [0.5, 0.25, 0.125])
    assert openings(draft, 3) == [0.25, 0.875, 1.0]
    assert openings(draft, 1) == [0.25]
    assert openings(Draft([], [], []), 2) == [1.0, 1.0]


def test_what_is_added_is_learnt_by_depth_and_row() -> None:
    additions = Additions(2)
    before = additions.expected(0, [1.0, 1.0])
    assert before[0] > before[1] > 0
    assert additions.expected(0, [0.5, 0.0]) == [before[0] / 2, 0.0]
    for _ in range(30):
        additions.observe([0, 1], [[1.0, 1.0], [1.0, 1.0]], [[True, False], []])
    first, second = additions.expected(0, [1.0, 1.0]), additions.expected(1, [1.0, 1.0])
    assert first[0] > 0.8
    assert first[1] < 0.1
    assert second[0] < 0.3
    for _ in range(60):  # nothing drafted, nothing learnt, and the recent past is forgotten
        additions.observe([0, 1], [[], []], [[], []])
    assert additions.expected(0, [1.0])[0] < first[0]
