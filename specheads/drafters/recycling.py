"""Drafts the target's own second thoughts: what it held probable after a token the last time.

Shapes: B lines, N draft nodes, V vocabulary, W candidates kept for a token, M observations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice, pairwise, zip_longest

import torch
from torch import Tensor

from ..blocks import best_tokens
from ..tree import NO_TOKEN, DraftTree
from .base import Accepted, Budget, DraftContext
from .best_first import Candidate, Draft, grow, is_single_path
from .known_text import known_segments

# How often a token is followed by its first, second, ... candidate, as measured on greedy answers of a small chat model.
RANK_PROBABILITIES = (0.5, 0.16, 0.06, 0.04, 0.02, 0.015, 0.01, 0.01)


class RecyclingDrafter:
    """Token Recycling (Luo et al. 2024, arXiv 2408.08696): draft trees of candidates that the target gave before.

    The rows of a call share one matrix, on the target's device. A tree has a fixed shape, which is filled by looking up each
    node's candidates, without a wait for the device. All nodes are point masses.
    """

    step_cost = 0.0
    weighs_nodes = False

    def begin(self, context: DraftContext) -> None:
        """Starts with the pairs of tokens in what the rows know."""
        self.matrix = AdjacencyMatrix.of_known_text(context, context.device)
        self.shapes: dict[tuple[int, int, bool], TreeShape] = {}

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """The nodes that are most probable by their ranks, or the path of first candidates; `NO_TOKEN` where none are known."""
        shape = self._shape(budget.nodes, budget.depth, is_single_path(context, budget), context.device)
        if not shape.levels:
            return DraftTree.empty(len(context.rows), context.device)
        last = [context.tokens(line, context.length(line) - 1)[0] for line in range(len(context.rows))]
        given = torch.tensor([last, budget.depths]).to(context.device, non_blocking=True)  # [2, B]
        tokens = shape.fill(self.matrix, roots=given[0]).masked_fill(shape.depths > given[1][:, None], NO_TOKEN)
        return filled_tree(tokens, shape)

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Takes the target's candidates into the matrix."""
        tokens, candidates = observed(context, accepted)
        order = torch.tensor(in_turn(accepted)).to(tokens.device, non_blocking=True)
        self.matrix.learn(tokens[order], candidates[order])

    def keep_rows(self, lines: Sequence[int]) -> None:
        """The matrix belongs to all rows."""

    def _shape(self, nodes: int, depth: int, single_path: bool, device: torch.device) -> TreeShape:
        key = (nodes, depth, single_path)
        if key not in self.shapes:
            self.shapes[key] = TreeShape.on(device, *static_tree(self.matrix.width, *key))
        return self.shapes[key]


class AdjacencyMatrix:
    """For every token, what the target held most probable next.

    The paper keeps the candidates of a token's last occurrence. Here they take turns with those already there, so that the
    first candidates of earlier occurrences stay: on greedy answers of a small chat model that gets a tenth more accepted.

    Args:
        vocab_size: V.
        end_tokens: Tokens after which nothing comes.
        device: Where it is kept.

    Attributes:
        rows: `[V + 1, W]` each token's candidates, the best first, then `NO_TOKEN`. The last row is that of `NO_TOKEN` itself,
            which index -1 reaches; nothing ever comes after it.
    """

    def __init__(self, vocab_size: int, end_tokens: Iterable[int], device: torch.device):
        self.width = min(len(RANK_PROBABILITIES), vocab_size)
        self.rows = torch.full((vocab_size + 1, self.width), NO_TOKEN, device=device)
        closed = [token for token in end_tokens if token < vocab_size]
        self.closed = torch.tensor([*closed, vocab_size], device=device)

    @classmethod
    def of_known_text(cls, context: DraftContext, device: torch.device) -> AdjacencyMatrix:
        """A matrix of the pairs of tokens in the prompts and the encoder's input."""
        matrix = cls(context.vocab_size, context.sequences.end_tokens, device)
        if pairs := known_bigrams(context):
            padding = [NO_TOKEN] * matrix.width
            rows = [(following + padding)[: matrix.width] for following in pairs.values()]
            matrix.rows[torch.tensor(list(pairs), device=device)] = torch.tensor(rows, device=device)
            matrix.rows[matrix.closed] = NO_TOKEN
        return matrix

    def learn(self, tokens: Tensor, candidates: Tensor) -> None:
        """Adds observations; where a token was observed more than once, the last one counts.

        Args:
            tokens: `[M]`, `NO_TOKEN` for no observation.
            candidates: `[M, W]` what the target held most probable after each, the best first.
        """
        mixed = torch.stack([candidates, self.rows[tokens]], dim=2).flatten(1)  # [M, 2W]
        repeated = (mixed[:, :, None] == mixed[:, None, :]).tril(-1).any(dim=2) | (mixed == NO_TOKEN)
        first = repeated.int().argsort(dim=1, stable=True)[:, : self.width]
        mixed = mixed.masked_fill(repeated, NO_TOKEN).gather(1, first)
        superseded = (tokens[:, None] == tokens).triu(1).any(dim=1)
        # Only the row of NO_TOKEN is written more than once, and it is emptied again: in what order does not matter.
        self.rows[tokens.masked_fill(superseded, NO_TOKEN)] = mixed
        self.rows[self.closed] = NO_TOKEN


class CandidateTable:
    """An `AdjacencyMatrix` on the host, for drafts that are grown there.

    Args:
        known: The candidates of tokens, the best first.
        end_tokens: Tokens after which nothing comes.
    """

    def __init__(self, known: Mapping[int, Sequence[int]], end_tokens: Iterable[int]):
        self.closed = {NO_TOKEN, *end_tokens}
        self.rows = {token: list(row[: len(RANK_PROBABILITIES)]) for token, row in known.items() if token not in self.closed}

    def after(self, token: int) -> Sequence[int]:
        """A token's candidates."""
        return self.rows.get(token, ())

    def learn(self, observations: Iterable[Sequence[int]]) -> None:
        """Adds observations, each a token and its candidates; of those of one token the last one counts."""
        for token, candidates in {token: candidates for token, *candidates in observations}.items():
            if token not in self.closed:
                taking_turns = (
                    each for pair in zip_longest(candidates, self.after(token)) for each in pair if each is not None
                )
                self.rows[token] = list(islice(dict.fromkeys(taking_turns), len(RANK_PROBABILITIES)))


def known_bigrams(context: DraftContext) -> dict[int, list[int]]:
    """For each token of the prompts and the encoder's input, the tokens that followed it, the most recent one first."""
    return bigrams(segment for line in range(len(context.rows)) for segment in known_segments(context, line))


def bigrams(texts: Iterable[Sequence[int]]) -> dict[int, list[int]]:
    """For each token, the tokens that followed it, the most recent one first."""
    followers: dict[int, dict[int, None]] = {}
    for text in texts:
        for token, following in pairwise(text):
            after = followers.setdefault(token, {})
            after.pop(following, None)
            after[following] = None
    return {token: list(reversed(after)) for token, after in followers.items()}


def observed(context: DraftContext, accepted: Accepted) -> tuple[Tensor, Tensor]:
    """What a round showed of the target, node by node, line by line.

    Returns:
        The tokens `[M]` that it continued, and its best candidates `[M, W]` after each.
    """
    logits, tree = accepted.logits, accepted.tree
    starts = [context.length(line) - len(tokens) - 1 for line, tokens in enumerate(accepted.tokens)]
    roots = [context.tokens(line, start)[0] for line, start in enumerate(starts)]
    roots = [root if root < context.vocab_size else NO_TOKEN for root in roots]  # a placeholder at a prompt's end
    tokens = torch.cat([torch.tensor(roots).to(logits.device, non_blocking=True)[:, None], tree.tokens], dim=1)  # [B, N + 1]
    candidates = best_tokens(logits, min(len(RANK_PROBABILITIES), logits.shape[-1]), accepted.maxima)  # [B, N + 1, W]
    return tokens.flatten(), candidates.flatten(0, 1)


def in_turn(accepted: Accepted) -> list[int]:
    """The order in which what a round showed counts: the kept paths, whose context is what was said, come last."""
    size = accepted.tree.size + 1
    kept = [line * size + node for line, path in enumerate(accepted.paths) for node in (0, *path)]
    return [*sorted(set(range(size * len(accepted.paths))).difference(kept)), *kept]


@lru_cache(maxsize=64)
def static_tree(width: int, nodes: int, depth: int, single_path: bool) -> tuple[list[int], list[int]]:
    """The most probable nodes of a draft tree by their ranks among their siblings, level by level.

    Args:
        width: The most children of a node.
        nodes: The most nodes.
        depth: The most levels.
        single_path: First children only.

    Returns:
        The nodes' ranks and parents.
    """
    children = [Candidate(probability, rank) for rank, probability in enumerate(RANK_PROBABILITIES[:width])]
    return level_order(grow(Candidate(1.0, 0), lambda _: children, nodes, depth, set(), single_path))


def level_order(draft: Draft) -> tuple[list[int], list[int]]:
    """The tokens and parents of a draft's nodes, level by level."""
    ranks, parents = draft.tokens, draft.parents
    depths = node_depths(parents)
    by_level = sorted(range(len(ranks)), key=lambda node: depths[node])
    moved = {0: 0, **{node + 1: place + 1 for place, node in enumerate(by_level)}}
    return [ranks[node] for node in by_level], [moved[parents[node]] for node in by_level]


def node_depths(parents: Sequence[int]) -> list[int]:
    """The distance of each node from the root."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths[1:]


@dataclass(frozen=True)
class TreeShape:
    """A static tree on a device.

    Args:
        parents: `[N]` of the nodes, level by level.
        depths: `[N]` their distances from the root.
        levels: Per level, the parents and ranks of its nodes.
        is_chain: Whether each node's parent is the one before it.
    """

    parents: Tensor
    depths: Tensor
    levels: list[tuple[Tensor, Tensor]]
    is_chain: bool

    @classmethod
    def on(cls, device: torch.device, ranks: Sequence[int], parents: Sequence[int]) -> TreeShape:
        """Puts the tree of `static_tree` on a device."""
        depths = node_depths(parents)
        table = torch.tensor([list(parents), list(ranks), depths], dtype=torch.long, device=device)
        sizes = [len(list(level)) for _, level in groupby(depths)]
        levels = list(zip(table[0].split(sizes), table[1].split(sizes), strict=True))
        return cls(table[0], table[2], levels, is_chain=list(parents) == list(range(len(parents))))

    def fill(self, matrix: AdjacencyMatrix, roots: Tensor) -> Tensor:
        """The tokens `[B, N]` of the nodes below roots `[B]`; `NO_TOKEN` where none is known."""
        tokens = roots[:, None]
        for parents, ranks in self.levels:
            tokens = torch.cat([tokens, matrix.rows[tokens[:, parents], ranks]], dim=1)
        return tokens[:, 1:]


def filled_tree(tokens: Tensor, shape: TreeShape) -> DraftTree:
    """A draft of a shape's nodes; on a CPU, where it costs no wait to look, without those that no line has."""
    parents, depth = shape.parents, len(shape.levels)
    if tokens.device.type == "cpu":
        used = (tokens != NO_TOKEN).any(dim=0)
        place = torch.nn.functional.pad(used.cumsum(dim=0), (1, 0))  # [N + 1]
        tokens, parents = tokens[:, used], place[parents[used]]
        depth = int(shape.depths[used].max()) if tokens.numel() else 0
    if shape.is_chain:
        return DraftTree.chain(tokens)
    return DraftTree(tokens, parents.expand_as(tokens).masked_fill(tokens == NO_TOKEN, 0), depth)
