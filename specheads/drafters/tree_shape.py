"""Which draws a tree of a fixed shape is made of: as asked for, or the best one for what was seen to be accepted.

The best shape is found by dynamic programming over node counts, levels and ranks (Sequoia, Chen et al. 2024, arXiv 2402.12374),
from how often a node's first, second, ... child is the one that is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MOST_BRANCHES = 8  # a node's children beyond these are hardly ever accepted
PRIOR = 0.6  # how often a first child is assumed to be accepted before anything is seen
PRIOR_RATIO = 0.4  # and by what factor less often each further one
PRIOR_NODES = 2.0  # for how many nodes that counts against what was seen
FIRST_RENEWAL = 4  # rounds after which the shape is found anew for the first time; then after twice as many, and so on


class Place(NamedTuple):
    """A draw of a level.

    Args:
        parent: The place in the level above that it is drawn at; 0 for the root.
        rank: How many draws come before it there.
    """

    parent: int
    rank: int


Shape = tuple[tuple[Place, ...], ...]  # by level; a level's places by their parents, then by rank


def branching_shape(branches: Sequence[int], nodes: int, depth: int) -> Shape:
    """Every node of a level with the same number of children, as far as nodes and levels go.

    Args:
        branches: How many children the root has, each of its children has, and so on.
        nodes: The most nodes.
        depth: The most levels.
    """
    levels: list[tuple[Place, ...]] = []
    width = 1
    for count in branches[:depth]:
        level = tuple(Place(parent, rank) for parent in range(width) for rank in range(count))[:nodes]
        if not level:
            break
        levels.append(level)
        nodes, width = nodes - len(level), len(level)
    return tuple(levels)


def best_shape(rates: Sequence[float], nodes: int, depth: int) -> Shape:
    """The shape with the most accepted tokens to be expected.

    Args:
        rates: How often a node's child of each rank is the one that is accepted.
        nodes: The most nodes.
        depth: The most levels.
    """
    _, sizes = _forests(rates, nodes, depth)
    levels: list[tuple[Place, ...]] = []
    waiting = [nodes]  # of each node of the level above, how many nodes are below it
    for left in range(depth, 0, -1):
        places, below = [], []
        for parent, count in enumerate(waiting):
            for rank in range(len(rates)):
                size = int(sizes[left, rank, count])
                if not size:
                    break
                places.append(Place(parent, rank))
                below.append(size - 1)
                count -= size
        if not places:
            break
        levels.append(tuple(places))
        waiting = below
    return tuple(levels)


def expected_acceptance(rates: Sequence[float], nodes: int, depth: int) -> float:
    """How many tokens of `best_shape` are expected to be accepted."""
    return float(_forests(rates, nodes, depth)[0][depth, 0, nodes])


def _forests(rates: Sequence[float], nodes: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """By levels left, lowest rank and number of nodes: the best value, and the size of the first child's subtree."""
    values = np.zeros((depth + 1, len(rates) + 1, nodes + 1))
    sizes = np.zeros(values.shape, dtype=int)
    for levels in range(1, depth + 1):
        for rank in reversed(range(len(rates))):
            subtree = rates[rank] * (1 + values[levels - 1, 0, :nodes])  # by its size less one
            for count in range(1, nodes + 1):
                totals = subtree[:count] + values[levels, rank + 1, count - 1 :: -1]
                best = int(totals.argmax())
                values[levels, rank, count], sizes[levels, rank, count] = totals[best], best + 1
    return values, sizes


class MeasuredShape:
    """The best shape for the rounds that a call has had.

    Earlier rounds only are looked at, so that a round's shape does not depend on what is drawn in it.
    """

    def __init__(self) -> None:
        self.judged = [0] * MOST_BRANCHES
        self.accepted = [0] * MOST_BRANCHES
        self.rounds, self.renewal = 0, FIRST_RENEWAL
        self.shapes: dict[tuple[int, int], Shape] = {}

    @property
    def rates(self) -> list[float]:
        """How often a node's child of each rank is the one that is accepted."""
        expected = [PRIOR * PRIOR_RATIO**rank for rank in range(MOST_BRANCHES)]
        counts = zip(self.accepted, self.judged, expected, strict=True)
        return [(accepted + PRIOR_NODES * prior) / (judged + PRIOR_NODES) for accepted, judged, prior in counts]

    def of(self, nodes: int, depth: int) -> Shape:
        """The shape for a budget."""
        if (nodes, depth) not in self.shapes:
            self.shapes[nodes, depth] = best_shape(self.rates, nodes, depth)
        return self.shapes[nodes, depth]

    def observe(self, tokens: Sequence[int], parents: Sequence[int], path: Sequence[int]) -> None:
        """Learns from a row's tree: which child was accepted at each node that was reached.

        Args:
            tokens: `[N]` its nodes' tokens, negative where there is none.
            parents: `[N]` their parents, 0 for the root.
            path: The accepted nodes.
        """
        for node, child in zip([0, *path], [*path, None], strict=True):
            children = [n + 1 for n, parent in enumerate(parents) if parent == node and tokens[n] >= 0]
            for rank, each in enumerate(children[:MOST_BRANCHES]):
                self.judged[rank] += 1
                self.accepted[rank] += each == child

    def end_round(self) -> None:
        """Lets what was learnt change the shape, now and then."""
        self.rounds += 1
        if self.rounds == self.renewal:
            self.renewal *= 2
            self.shapes.clear()
