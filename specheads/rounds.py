"""What was drafted for a row in a round, and what came of it: kept, or shown as it happens, only where that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .tree import NO_TOKEN

if TYPE_CHECKING:
    from .drafters.base import Accepted


@dataclass(frozen=True)
class DraftRound:
    """One round of one row.

    Args:
        tokens: The drafted tokens. Node n is the n-th of them, counted from 1; a node comes after its parent.
        parents: The parent of each node; 0 is the root, the last token before the round.
        accepted: The accepted nodes, from the root's child downwards.
        emitted: What the row got: the tokens of the accepted nodes and, unless the text ended before, one of the target's own.
    """

    tokens: list[int]
    parents: list[int]
    accepted: list[int]
    emitted: list[int]


def rounds_of(accepted: Accepted, lines: Sequence[int]) -> list[DraftRound]:
    """The rounds of some lines; it waits for the device.

    Args:
        accepted: What a round kept.
        lines: The lines of its tree.
    """
    tokens, parents = accepted.tree.tokens.tolist(), accepted.tree.parents.tolist()
    return [_round(tokens[line], parents[line], accepted.paths[line], accepted.tokens[line]) for line in lines]


def _round(tokens: list[int], parents: list[int], path: Sequence[int], emitted: Sequence[int]) -> DraftRound:
    nodes = [node for node, token in enumerate(tokens, start=1) if token != NO_TOKEN]
    number = {0: 0, **{node: place for place, node in enumerate(nodes, start=1)}}
    return DraftRound(
        tokens=[tokens[node - 1] for node in nodes],
        parents=[number[parents[node - 1]] for node in nodes],
        accepted=[number[node] for node in path],
        emitted=list(emitted),
    )
