"""Medusa heads as the drafter: one hidden state of the target gives all levels of a draft (Cai et al. 2024).

A level's law is the head's, so a sampled chain has a law that is known and ratios can be verified. A tree of point masses has a
fixed, sparse shape, chosen from how often each head's first, second, ... token is right.

Shapes: B lines, F nodes that are given children, N draft nodes, n heads, h the hidden size, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..heads import MedusaHeads, MedusaOutput
from ..tree import NO_TOKEN, DraftTree, path_to
from .base import Accepted, Budget, DraftContext
from .best_first import Candidate, grow, is_single_path
from .growth import grow_tree, named, within_depths
from .head import HeadDrafter, NodeValues, count_of
from .recycling import TreeShape, filled_tree, level_order

# How often a head's first, second, ... token is right, for heads of which that is not known: about what Cai et al. 2024 show
# for the first head. Each further head is right less often by this factor.
RANK_ACCURACIES = (0.6, 0.15, 0.06, 0.04, 0.025, 0.02, 0.015, 0.01, 0.01, 0.01)
DECAY = 0.8

Accuracies = tuple[tuple[float, ...], ...]


class MedusaDrafter(HeadDrafter[MedusaHeads]):
    """Drafts with Medusa heads (see `HeadDrafter`)."""

    def step_weights(self, target: PreTrainedModel) -> int:
        """A head's residual blocks and its output layer."""
        heads, config = self.head, self.head.config
        outputs = count_of(heads.lm_head.parameters()) if config.original_lm_head else count_of(heads.lm_heads.parameters())
        shared = config.num_heads if config.original_lm_head else 1
        conditions = count_of(heads.markov_head.markov_w2.parameters()) if config.dependence == "markov" else 0
        return (count_of(heads.blocks.parameters()) + shared * outputs) // config.num_heads + conditions

    def begin(self, context: DraftContext) -> None:
        """Nothing is known yet: what the heads read comes with the first token."""
        super().begin(context)
        self.hidden: Tensor | None = None

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A sampled or most probable chain; or a tree, mixed where the verification goes by its laws, else static."""
        depth = min(budget.depth, self.head.config.num_heads)
        if self.hidden is None or depth == 0 or self.is_waiting():
            return self.nothing(context)
        self._open(context)
        root = self._logits(self.root[:, None])[:, 0]
        if is_single_path(context, budget):
            tree = self.chain(context, budget, root, depth)
        elif self.is_mixed(context):
            tree = grow_tree(self, context, root, 0, depth, max(depth, budget.nodes)).tree
        else:
            return self._static_tree(context, budget, depth)
        return within_depths(tree, budget.depths)

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Keeps the hidden state at which the target said each row's last token."""
        assert accepted.features is not None
        nodes = [[0, *path][len(kept) - 1] for path, kept in zip(accepted.paths, accepted.tokens, strict=True)]
        index = torch.tensor(nodes, device=accepted.features.device)
        self.hidden = accepted.features[torch.arange(len(nodes), device=index.device), index].to(self.device)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Keeps the hidden states of the lines that go on."""
        if self.hidden is not None:
            self.hidden = self.hidden[torch.tensor(lines, device=self.hidden.device)]

    def follow(self, tokens: Tensor, depth: int) -> Tensor:
        """The next head's logits `[B, V']` after a chain's next node (`DraftSource.follow`)."""
        self.level += 1
        path = self.paths.last().clone()
        path[:, :, self.level] = self._known(tokens)[:, None]
        self.paths.add(path)
        return self._logits(path[:, :, : self.level + 1])[:, 0]

    def extend(self, tokens: Tensor, depths: Tensor, visible: Tensor) -> Tensor:
        """The next head's logits `[B, F, V']` after nodes of one level (`DraftSource.extend`)."""
        self.level += 1
        paths = self.paths.of_parents(visible)
        paths[:, :, self.level] = self._known(tokens)
        self.paths.add(paths)
        return self._logits(paths[:, :, : self.level + 1])

    def _open(self, context: DraftContext) -> None:
        """Begins a round's draft at each row's last token."""
        last = [context.tokens(line, context.length(line) - 1) for line in range(len(context.rows))]
        self.root = self._known(torch.tensor(last))  # [B, 1]
        self.level = 0
        self.levels: MedusaOutput | None = None  # of all heads, where they are run together
        self.paths = NodeValues(torch.nn.functional.pad(self.root, (0, self.head.config.num_heads - 1)))

    def _logits(self, paths: Tensor) -> Tensor:
        """The logits `[B, F, V']` after paths `[B, F, l + 1]`, each row's last token first: those of head l."""
        logits, self.confidence = self._outputs(paths)
        return logits

    def _outputs(self, paths: Tensor) -> tuple[Tensor, Tensor | None]:
        """The same, and head l's confidence `[B, F or 1]`."""
        assert self.hidden is not None
        config, hidden, level = self.head.config, self.hidden[:, None], paths.shape[2] - 1
        if self.goes_together() and self.levels is None:
            self.levels = self.head.without_markov(hidden)
        if self.levels is not None:
            confidence = self.levels.confidence
            logits = cast(Tensor, self.levels.logits)[:, :, level]
            confidence = None if confidence is None else confidence[:, :, level]
        elif config.dependence == "none":
            logits, confidence = self.head.head(level, hidden)
        else:
            return self.head.head(level, hidden.expand(-1, paths.shape[1], -1), paths)
        if config.dependence == "markov":
            return logits + self.head.markov_head(paths[:, :, -1]), confidence
        return logits.expand(-1, paths.shape[1], -1), confidence

    def goes_together(self) -> bool:
        """Whether all heads are run at once: the output layer that they share is then read once."""
        return self.head.config.original_lm_head and self.head.config.dependence != "hydra"

    def level_cost(self) -> float:
        """What one more level of a chain costs, in plain passes."""
        return 0.0 if self.goes_together() else self.step_cost

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens as the heads can read them, where they are: there may be padding that the target cannot say."""
        return tokens.to(self.device).clamp(0, self.head.config.vocab_size - 1)

    def _static_tree(self, context: DraftContext, budget: Budget, depth: int) -> DraftTree:
        """The most probable nodes by the heads' accuracies, filled level by level."""
        shape = sparse_tree(_accuracies(self.head), budget.nodes, depth, self.head.config.own_vocab_size)
        tokens = self.root
        for level in shape.levels:
            candidates = self._candidates(context, tokens, level)
            places = torch.tensor(level.places, device=tokens.device)
            ranks = torch.tensor(level.ranks, device=tokens.device)
            parents = tokens[:, torch.tensor(level.parents, device=tokens.device)]
            own = candidates[:, places if candidates.shape[1] > 1 else 0 * places, ranks]
            tokens = torch.cat([tokens, own.masked_fill(parents == NO_TOKEN, NO_TOKEN)], dim=1)
        tree = TreeShape.on(context.device, [rank for level in shape.levels for rank in level.ranks], shape.parents)
        limits = torch.tensor(budget.depths, device=context.device)[:, None]
        return filled_tree(tokens[:, 1:].to(context.device).masked_fill(tree.depths > limits, NO_TOKEN), tree)

    def _candidates(self, context: DraftContext, tokens: Tensor, level: StaticLevel) -> Tensor:
        """The most probable tokens `[B, F or 1, R]` after the nodes that a level's nodes hang below."""
        batch_size, count = len(tokens), len(level.inner)
        if self.head.config.dependence == "none" and context.processors.is_pointwise:
            count = 1  # all of them have one law
        paths = tokens[:, torch.tensor(level.inner[:count], device=tokens.device)].clamp(min=0)  # [B, F, l + 1]
        lines = [line for line in range(batch_size) for _ in range(count)]
        drafted = paths[:, :, 1:].flatten(0, 1).to(context.device)
        scores = self.scores(context, lines, drafted, self._logits(paths).flatten(0, 1))
        best = scores.topk(max(level.ranks) + 1, dim=-1)
        best_tokens = named(self, best.indices).masked_fill(best.values == -torch.inf, NO_TOKEN)
        return best_tokens.view(batch_size, count, -1).to(tokens.device)


@dataclass(frozen=True)
class StaticLevel:
    """The nodes of one level of a static tree.

    Args:
        parents: Per node, its parent.
        ranks: Per node, its rank among the tokens that may follow its parent.
        inner: The parents once each, as paths of nodes, the root first.
        places: Per node, its parent's place among these.
    """

    parents: list[int]
    ranks: list[int]
    inner: list[list[int]]
    places: list[int]


@dataclass(frozen=True)
class StaticTree:
    """A static tree's parents, and its levels."""

    parents: list[int]
    levels: list[StaticLevel]


@lru_cache(maxsize=64)
def sparse_tree(accuracies: Accuracies, nodes: int, depth: int, vocab_size: int) -> StaticTree:
    """The tree whose nodes are most often right, if heads are so independently of each other.

    Args:
        accuracies: For each head, how often its first, second, ... token is right.
        nodes: The most nodes.
        depth: The most levels.
        vocab_size: V.
    """

    def children(after: Candidate) -> list[Candidate]:
        shares = accuracies[after.state][:vocab_size]  # the state counts levels
        return [Candidate(share, rank, after.state + 1) for rank, share in enumerate(shares)]

    ranks, parents = level_order(grow(Candidate(1.0, 0), children, nodes, depth, set(), single_path=False))
    paths = [[0, *path_to(node, parents)] for node in range(len(parents) + 1)]
    levels = []
    for level in range(1, max(map(len, paths))):
        own = [node for node, path in enumerate(paths) if len(path) == level + 1]
        above = [parents[node - 1] for node in own]
        inner = sorted(set(above))
        places = [inner.index(parent) for parent in above]
        levels.append(StaticLevel(above, [ranks[node - 1] for node in own], [paths[node] for node in inner], places))
    return StaticTree(parents, levels)


def _accuracies(heads: MedusaHeads) -> Accuracies:
    """What is known of the heads' accuracies, or assumed."""
    measured = heads.config.head_accuracies
    if measured is not None:
        return tuple(tuple(head) for head in measured)
    return tuple(tuple(share * DECAY**index for share in RANK_ACCURACIES) for index in range(heads.config.num_heads))
