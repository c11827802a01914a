"""What a drafter proposes: a tree of tokens below each row's last committed token.

Shapes: B rows, N draft nodes, V vocabulary. Node 0 is the root, the last committed token; node n (1..N) is column n - 1 of
`tokens` and `parents`. A node comes after its parent, and siblings stand in the order in which they were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

NO_TOKEN = -1
# Stands for the target's own token where its law is not one: all scores are -inf, or some are NaN.
NO_LAW = -2


@dataclass
class Probes:
    """Tokens that the target runs on beside a draft, for what it says after them; none of them is ever accepted.

    Each attends to what is committed, to the root, and to those among them that it names.

    Args:
        tokens: `[B, E]`.
        depths: `[B, E]` distance of each from the root.
        visible: `[B, E, E]` bool: whether probe j is attended to by probe i; each attends to itself.
    """

    tokens: Tensor
    depths: Tensor
    visible: Tensor

    def beside(self, tokens: Tensor, depths: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A pass (`ModelRunner.extend`) with the probes behind its tokens.

        Args:
            tokens: `[B, n]`, the root first.
            depths: `[B, n]`.
            visible: `[B, n, n]`.
        """
        batch_size, size, count = *tokens.shape, self.tokens.shape[1]
        joined = visible.new_zeros(batch_size, size + count, size + count)
        joined[:, :size, :size] = visible
        joined[:, size:, 0] = True
        joined[:, size:, size:] = self.visible
        return torch.cat([tokens, self.tokens], dim=1), torch.cat([depths, self.depths], dim=1), joined


@dataclass
class DraftTree:
    """A draft tree per row.

    Args:
        tokens: `[B, N]` drafted tokens; `NO_TOKEN` where a row has fewer nodes than the widest one.
        parents: `[B, N]` index of each node's parent, 0 for the root; 0 too where there is no node.
        depth: The length of the longest path, known on the host.
        proposals: `[B, M, V]` the laws that sampled nodes were drawn from, or `None` if every node is a point mass.
        proposal_of: `[B, N]` for each node the index of its law in `proposals`, -1 for a point mass: a token whose choice
            is a function of what is committed, or whose law is not known. `None` if every node is a point mass.
        is_chain: Whether node n's parent is node n - 1 in every row.
        expected: How many tokens the drafter thinks will be accepted, over all rows; `None` if it does not know.
        steps: How many levels of it took a step that costs (`Drafter.step_cost`); `None` for all of them.
        probes: What the target is to run on besides; `None` for nothing. Only where it takes trees.
        repeats: `[B, N, J]` indices in `proposals` of the laws that tokens of earlier siblings were drawn from again, after the
            node and before its next sibling; -1 for none. `None` if there are none at all.
    """

    tokens: Tensor
    parents: Tensor
    depth: int
    proposals: Tensor | None = None
    proposal_of: Tensor | None = None
    is_chain: bool = False
    expected: float | None = None
    steps: int | None = None
    probes: Probes | None = None
    repeats: Tensor | None = None

    @classmethod
    def empty(cls, batch_size: int, device: torch.device) -> DraftTree:
        """A tree without nodes: the round is a plain decoding step."""
        nothing = torch.empty(batch_size, 0, dtype=torch.long, device=device)
        return cls(nothing, nothing, depth=0, is_chain=True)

    @classmethod
    def chain(cls, tokens: Tensor, proposals: Tensor | None = None) -> DraftTree:
        """One path per row.

        Args:
            tokens: `[B, K]`.
            proposals: `[B, K, V]` the law of each token, or `None` for point masses.
        """
        parents = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return cls(tokens, parents, tokens.shape[1], proposals, None if proposals is None else parents, is_chain=True)

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device) -> DraftTree:
        """Point-mass trees built on the host, one `(tokens, parents)` per row."""
        size = max(len(tokens) for tokens, _ in rows)
        is_chain = all(list(parents) == list(range(len(parents))) for _, parents in rows)
        tokens = [[*tokens, *[NO_TOKEN] * (size - len(tokens))] for tokens, _ in rows]
        if is_chain:
            return cls.chain(torch.tensor(tokens, dtype=torch.long, device=device).view(len(rows), size))
        parents = [[*parents, *[0] * (size - len(parents))] for _, parents in rows]
        both = torch.tensor([tokens, parents], dtype=torch.long, device=device)
        return cls(both[0], both[1], depth=max(longest_path(parents) for _, parents in rows))

    def check(self, batch_size: int, vocab_size: int, takes_trees: bool) -> None:
        """Checks a tree from a drafter that is not this library's own; it waits for the device.

        Args:
            batch_size: The number of rows that it must have.
            vocab_size: V, which its tokens must be below.
            takes_trees: Whether it may be anything but a chain.

        Raises:
            ValueError: saying what is wrong with it.
        """
        order = torch.arange(self.tokens.shape[-1], device=self.tokens.device)
        faults = {
            f"`tokens` and `parents` must be integers of shape [{batch_size}, N]": lambda: (
                self.tokens.dtype != torch.long or self.parents.dtype != torch.long
                or self.tokens.shape != self.parents.shape or self.tokens.dim() != 2 or len(self.tokens) != batch_size
            ),
            f"tokens must be below {vocab_size}, or {NO_TOKEN} for no node": lambda: (
                (self.tokens < NO_TOKEN) | (self.tokens >= vocab_size)
            ).any(),
            "a parent must come before its child": lambda: ((self.parents < 0) | (self.parents > order)).any(),
            "`is_chain` says that each node's parent is the one before it": lambda: (
                self.is_chain and (self.parents != order).any()
            ),
            "the target takes chains only": lambda: not (takes_trees or self.is_chain),
            "`depth` must be the length of the longest path": lambda: (
                max(map(longest_path, self.parents.tolist())) > self.depth
            ),
            "`proposals` must be laws [B, M, V], and `proposal_of` say which of them a node was drawn from": lambda: (
                not self._has_laws(vocab_size)
            ),
            f"`probes` must be tokens below {vocab_size} with depths [B, E] and a mask [B, E, E], and take a tree": lambda: (
                not self._has_probes(vocab_size, takes_trees)
            ),
            "`repeats` must be indices [B, N, J] of `proposals`, in a tree that is no chain": lambda: not self._has_repeats(),
        }  # fmt: skip
        for rule, is_broken in faults.items():
            if is_broken():
                raise ValueError(f"The drafter's tree is not valid: {rule}.")

    def _has_laws(self, vocab_size: int) -> bool:
        if self.proposals is None or self.proposal_of is None:
            return self.proposals is None and self.proposal_of is None
        shape, laws = self.proposals.shape, self.proposals.double()
        return (
            len(shape) == 3
            and shape[0] == len(self.tokens)
            and shape[2] == vocab_size
            and self.proposal_of.shape == self.tokens.shape
            and bool((self.proposal_of < shape[1]).all())
            and bool((laws >= 0).all())
            and bool(((laws.sum(dim=-1) - 1).abs() < 1e-3).all())
        )

    def _has_probes(self, vocab_size: int, takes_trees: bool) -> bool:
        probes = self.probes
        if probes is None:
            return True
        shape = probes.tokens.shape
        return (
            takes_trees
            and probes.tokens.dtype == torch.long
            and len(shape) == 2
            and shape[0] == len(self.tokens)
            and probes.depths.shape == shape
            and probes.visible.shape == (*shape, shape[1])
            and bool(((probes.tokens >= 0) & (probes.tokens < vocab_size)).all())
        )

    def _has_repeats(self) -> bool:
        if self.repeats is None:
            return True
        known = 0 if self.proposals is None else self.proposals.shape[1]
        is_fit = self.repeats.dtype == torch.long and self.repeats.dim() == 3 and self.repeats.shape[:2] == self.tokens.shape
        return is_fit and not self.is_chain and bool((self.repeats < known).all())

    @property
    def size(self) -> int:
        """N, the number of nodes without the root."""
        return self.tokens.shape[1]

    @property
    def shape_per_line(self) -> Tensor:
        """`[B, 2]` each line's number of nodes and the length of its longest path."""
        return torch.stack([(self.tokens != NO_TOKEN).sum(dim=1), self.depths.amax(dim=1)], dim=1)

    def trimmed(self) -> DraftTree:
        """A tree of point masses without the columns that no row uses; to look for them is to wait for the device."""
        used = (self.tokens != NO_TOKEN).any(dim=0)
        if not bool(used.any()):
            return DraftTree.empty(len(self.tokens), self.tokens.device)
        places = torch.nn.functional.pad(used.cumsum(dim=0), (1, 0))  # [N + 1]
        tokens, parents = self.tokens[:, used], places[self.parents[:, used]]
        depth = max(map(longest_path, parents.tolist()))
        return DraftTree(tokens, parents, depth, expected=self.expected, steps=self.steps)

    @property
    def has_proposals(self) -> bool:
        """Whether some node was sampled from a law that is known."""
        return self.proposals is not None

    @cached_property
    def visible(self) -> Tensor:
        """`[B, N + 1, N + 1]` bool: whether node j is node i or an ancestor of it."""
        batch_size, size = self.tokens.shape[0], self.size + 1
        device = self.tokens.device
        if self.is_chain:
            return torch.ones(size, size, dtype=torch.bool, device=device).tril().expand(batch_size, size, size)
        parents = torch.cat([self.parents.new_zeros(batch_size, 1), self.parents], dim=1)
        hop = torch.nn.functional.one_hot(parents, size)
        reach = (hop + torch.eye(size, dtype=torch.long, device=device)).clamp(max=1).float()
        for _ in range(math.ceil(math.log2(max(self.depth, 1)))):
            reach = (reach @ reach).clamp(max=1)
        return reach > 0

    @cached_property
    def depths(self) -> Tensor:
        """`[B, N + 1]` distance of each node from the root; 0 where there is no node."""
        if self.is_chain:
            depths = torch.arange(self.size + 1, device=self.tokens.device).expand(self.tokens.shape[0], -1)
        else:
            depths = self.visible.sum(dim=-1) - 1
        absent = torch.nn.functional.pad(self.tokens == NO_TOKEN, (1, 0))
        return depths.masked_fill(absent, 0)


def longest_path(parents: Sequence[int]) -> int:
    """The length of the longest path of nodes with these parents."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return max(depths)


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from the root's child down to `node`; empty for the root.

    Args:
        node: A node index.
        parents: `[N]` one row of `DraftTree.parents`.
    """
    path: list[int] = []
    while node:
        path.append(node)
        node = parents[node - 1]
    return path[::-1]
