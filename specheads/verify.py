"""The verifier: which drafted tokens stay, and which token the target adds.

One lemma covers every scheme. A node v of the draft tree carries (a, P): the probability with which the part of the tree below
v must end up accepted, and the law that the next token must then have. Its children are taken in the order they were drawn. A
child with token c, drawn from Q, is accepted with probability min(1, a P(c) / Q(c)); if it is not, what is still owed is
R = max(a P - Q, 0) with sum S, so P becomes R / S and a becomes S / (S + 1 - a). With no child left, v itself is accepted with
probability a and a token drawn from P. Started at the root with a = 1, the emitted tokens have exactly the target's law.

Flipping each child's coin at once gives token verification (Leviathan et al. 2023) on a chain and recursive rejection
(SpecInfer, EAGLE, Sequoia) on a tree. Leaving the decision to the descendants gives block verification (Sun et al. 2025,
arXiv 2403.10444) on a chain and traversal verification (arXiv 2505.12398) on a tree. A point mass is the case Q(c) = 1.
Point masses can as well be matched: draw the target's token, go on while a child bears it. That draws no more than plain
decoding does, so it is also the way for noise that depends on the position, and for processors with a state.

Shapes: B rows, N draft nodes, V vocabulary; node 0 is the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .blocks import best_token
from .randomness import Noise
from .tree import NO_LAW, NO_TOKEN, DraftTree, path_to


class NodeLaws(Protocol):
    """The target's processed scores at the nodes of one round, each with its own prefix.

    Attributes:
        needs_prefixes: Whether they depend on the tokens before a node, which are then looked at on the host.
    """

    needs_prefixes: bool

    def at(self, lines: Sequence[int], nodes: Tensor, drafted: Tensor) -> Tensor:
        """Scores `[R, V]` for line `lines[i]` at node `nodes[i]`, whose path bears the tokens `drafted[i]` (`[R, depth]`)."""
        ...

    def everywhere(self, tree: DraftTree) -> Tensor:
        """Scores `[B, N + 1, V]` at every node."""
        ...

    def best(self, tree: DraftTree) -> Tensor:
        """The most probable token `[B, N + 1]` at every node."""
        ...


@dataclass
class Verdict:
    """What a round yields, per row.

    Args:
        paths: The accepted nodes, from the root's child downwards.
        emitted: Their tokens and, last, the one that the target adds.
        sizes: How many nodes were drafted.
        depths: The longest path drafted.
    """

    paths: list[list[int]]
    emitted: list[list[int]]
    sizes: list[int]
    depths: list[int]


AfterLevel = Callable[[list[int]], bool]


def match(
    tree: DraftTree,
    laws: NodeLaws,
    noise: Noise | None,
    rows: Sequence[int],
    positions: Sequence[int],
    after_level: AfterLevel | None = None,
) -> Verdict:
    """Walks down the tree while the target's own token is among the current node's children.

    Exact for every drafter: the output is a stream of the target's tokens. Where they are drawn or depend on prefixes, laws are
    computed along the walk only. Rows leave the walk where their token was not drafted; on an accelerator they stay to the
    tree's depth, since to ask would be to wait for the device, unless the processors wait for it anyway.

    Args:
        tree: The draft.
        laws: The target's scores at its nodes.
        noise: Draws the target's tokens; `None` takes the most probable one.
        rows: For each line of the tree, its row in the batch.
        positions: For each line, the index within its continuation of the next token.
        after_level: Called with one token per line after each level, when the rows must go in step; says whether to go on.
            The walk then also ends at the first level where some line's token was not drafted.
    """
    if noise is None and after_level is None and not laws.needs_prefixes:
        return _match_at_once(tree, laws)
    batch_size, device = tree.tokens.shape[0], tree.tokens.device
    asks = device.type == "cpu" or laws.needs_prefixes
    node = torch.zeros(batch_size, dtype=torch.long, device=device)
    is_open = torch.ones(batch_size, dtype=torch.bool, device=device)
    walked: list[Tensor] = []
    nodes: list[Tensor] = []
    lines = list(range(batch_size))
    for level in range(tree.depth + 1):
        some: slice | list[int] = slice(None)
        if level and asks and not bool(is_open.all()):
            some = lines = is_open.nonzero().flatten().tolist()
        drafted = torch.stack(walked, dim=1)[some] if walked else node.new_empty(batch_size, 0)
        scores = laws.at(lines, node[some], drafted)
        token = torch.full_like(node, NO_TOKEN)
        token[some] = choose(scores, noise, [rows[i] for i in lines], [positions[i] + level for i in lines])
        child = (tree.parents == node[:, None]) & (tree.tokens == token[:, None]) & is_open[:, None]
        walked.append(token)
        if tree.size:
            is_open = child.any(dim=1)
            node = torch.where(is_open, child.int().argmax(dim=1) + 1, node)
            nodes.append(torch.where(is_open, node, 0))
        if after_level is not None:
            if not after_level(token.tolist()) or not bool(is_open.all()):
                break
        elif asks and not bool(is_open.any()):
            break
    return _read_walk(tree, walked, nodes)


def _match_at_once(tree: DraftTree, laws: NodeLaws) -> Verdict:
    """`match` where each node's token follows from its scores alone: all of them are looked up, and the walk is the host's."""
    said = laws.best(tree)
    table = torch.cat([tree.shape_per_line, said, tree.parents, tree.tokens], dim=1).tolist()  # the round's one wait
    verdict, size = Verdict([], [], [], []), tree.size
    for drafted, depth, *row in table:
        following, parents, tokens = row[: size + 1], row[size + 1 : 2 * size + 1], row[2 * size + 1 :]
        children: dict[tuple[int, int], int] = {}
        for index, place in enumerate(zip(parents, tokens, strict=True), 1):
            children.setdefault(place, index)
        path: list[int] = []
        emitted = [following[0]]
        while node := children.get((path[-1] if path else 0, emitted[-1])):
            path.append(node)
            emitted.append(following[node])
        verdict.paths.append(path)
        verdict.emitted.append(emitted)
        verdict.sizes.append(drafted)
        verdict.depths.append(depth)
    return verdict


def _read_walk(tree: DraftTree, walked: list[Tensor], nodes: list[Tensor]) -> Verdict:
    levels = len(walked)
    # The round's one wait for the device. Row by row: the draft's shape, the tokens of each level, the nodes they led to.
    table = torch.cat([tree.shape_per_line, torch.stack([*walked, *nodes[:levels]], dim=1)], dim=1).tolist()
    sizes, depths, walks = [line[0] for line in table], [line[1] for line in table], [line[2:] for line in table]
    paths = [[node for node in walk[levels:] if node][: levels - 1] for walk in walks]
    emitted = [walk[: len(path) + 1] for walk, path in zip(walks, paths, strict=True)]
    return Verdict(paths, emitted, sizes, depths)


def choose(scores: Tensor, noise: Noise | None, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
    """The target's token: the most probable one without noise, a draw from the law with it.

    Args:
        scores: `[R, V]` processed logits.
    """
    if noise is None:
        return best_token(scores)
    return _draw(scores.softmax(dim=-1), noise, rows, positions)


def _draw(weights: Tensor, noise: Noise, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
    """A token per line, `NO_LAW` where the weights `[R, V]` are none. Only a row that goes on to it is in error."""
    hopeless = weights[:, 0].isnan()
    return noise.draw(weights.nan_to_num_(nan=1.0), rows, positions).masked_fill(hopeless, NO_LAW)


def settle(
    tree: DraftTree, laws: NodeLaws, noise: Noise, rows: Sequence[int], positions: Sequence[int], carry: bool
) -> Verdict:
    """Verifies by ratios of probabilities; exact if sampled nodes carry the law they were drawn from.

    Which path the lemma accepts is one draw among the nodes: their probabilities follow from the acceptances, which do not
    depend on chance. It takes two waits for the device, whatever the tree.

    Args:
        tree: The draft.
        laws: The target's scores at its nodes.
        noise: Draws the accepted node and the added token.
        rows: For each line of the tree, its row in the batch.
        positions: For each line, the index within its continuation of the next token.
        carry: Whether a child's coin is left to its descendants (block, traversal) or flipped at once (token).
    """
    owed = laws.everywhere(tree).softmax(dim=-1)
    acceptance = _acceptances(tree, owed, carry)
    parts = [tree.shape_per_line, tree.parents, tree.tokens]
    table = torch.cat([acceptance, *(part.double() for part in parts)], dim=1).cpu().numpy()
    probability, shape, parents, tokens = np.split(table, np.cumsum([tree.size + 1, 2, tree.size]), axis=1)
    shape, parents, tokens = shape.astype(int), parents.astype(int), tokens.astype(int)
    ends = _end_law(probability, parents, carry)
    end = noise.draw(torch.from_numpy(ends), rows, positions)
    lines = torch.arange(end.shape[0], device=owed.device)
    added = _draw(owed[lines, end.to(owed.device)], noise, rows, positions)
    paths = [path_to(node, parents[i].tolist()) for i, node in enumerate(end.tolist())]
    emitted = [
        [*(int(tokens[i, node - 1]) for node in path), token]
        for i, (path, token) in enumerate(zip(paths, added.tolist(), strict=True))
    ]
    return Verdict(paths, emitted, shape[:, 0].tolist(), shape[:, 1].tolist())


def _acceptances(tree: DraftTree, owed: Tensor, carry: bool) -> Tensor:
    """The lemma's a for every node, and in place of each node's law what it still owes after its children.

    Args:
        tree: The draft.
        owed: `[B, N + 1, V]` the target's laws; overwritten with weights in proportion to the final P of each node.
        carry: As in `settle`.

    Returns:
        `[B, N + 1]` in double precision. With `carry`, the probability with which a node that is left without children is
        accepted; else that with which it is accepted by its parent.
    """
    if not tree.size:
        return torch.ones(owed.shape[:2], dtype=torch.double, device=owed.device)
    return (_chain_acceptances if tree.is_chain else _tree_acceptances)(tree, owed, carry)


def _chain_acceptances(tree: DraftTree, owed: Tensor, carry: bool) -> Tensor:
    """`_acceptances` on a chain, where what a node owes does not wait for what the others do."""
    size, exists, token = tree.size, tree.tokens != NO_TOKEN, tree.tokens.clamp(min=0)
    proposal, is_point = _proposals(tree)
    ratio = _log_ratio(owed[:, :size], token, proposal, is_point)
    share = torch.ones(owed.shape[:2], dtype=torch.double, device=owed.device)
    accepted = torch.ones_like(share)
    for node in range(1, size + 1):
        accepted[:, node] = _accept(share[:, node - 1], ratio[:, node - 1], exists[:, node - 1])
        if carry:
            share[:, node] = accepted[:, node]
    total = torch.ones_like(share)
    _strike(owed[:, :size], total[:, :size], share[:, :size], token, proposal, is_point, exists)
    return share if carry else accepted


def _tree_acceptances(tree: DraftTree, owed: Tensor, carry: bool) -> Tensor:
    """`_acceptances` on any tree, one node after another."""
    lines = torch.arange(owed.shape[0], device=owed.device)
    share = torch.ones(owed.shape[:2], dtype=torch.double, device=owed.device)  # a
    total = torch.ones_like(share)  # the sum of `owed`, by which it is to be divided to give P
    accepted = torch.ones_like(share)
    proposals, are_points = _proposals(tree)
    for node in range(1, tree.size + 1):
        parent, token = tree.parents[:, node - 1], tree.tokens[:, node - 1]
        exists, token, is_point = token != NO_TOKEN, token.clamp(min=0), are_points[:, node - 1]
        proposal = None if proposals is None else proposals[:, node - 1]
        law, before, a = owed[lines, parent], total[lines, parent], share[lines, parent]
        accept = _accept(a, _log_ratio(law, token, proposal, is_point) - before.log(), exists)
        accepted[:, node] = accept
        if carry:
            share[:, node] = accept
        _strike(law, before, a, token, proposal, is_point, exists)
        for again, repeats in _repeats(tree, node):
            # A sibling's token, rejected with it: nothing of it is left to accept, but one more chance of it is spent.
            _strike(law, before, a, token, again, torch.zeros_like(exists), exists & repeats)
        owed[lines, parent], total[lines, parent], share[lines, parent] = law, before, a
    return share if carry else accepted


def _repeats(tree: DraftTree, node: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The laws `[B, V]` that tokens of siblings were drawn from again after a node, and in which lines they were `[B]`."""
    if tree.repeats is None or tree.proposals is None:
        return
    lines = torch.arange(len(tree.tokens), device=tree.tokens.device)
    for index in tree.repeats[:, node - 1].unbind(dim=1):
        yield tree.proposals[lines, index.clamp(min=0)], index >= 0


def _proposals(tree: DraftTree) -> tuple[Tensor | None, Tensor]:
    """The law `[B, N, V]` that each node was drawn from, any where it is a point mass; and where it is one `[B, N]`."""
    if tree.proposals is None or tree.proposal_of is None:
        return None, torch.ones_like(tree.tokens, dtype=torch.bool)
    laws, index = tree.proposals, tree.proposal_of
    if index is not tree.parents:  # else law n is node n's, as `DraftTree.chain` has them
        laws = laws.gather(1, index.clamp(min=0)[:, :, None].expand(-1, -1, laws.shape[2]))
    # A draft model whose law overflowed to NaN has not drawn at all: its token is one like any other.
    overflowed = laws[:, :, 0].isnan()
    if laws.device.type != "cpu" or bool(overflowed.any()):  # to look costs nothing on a CPU
        laws = laws.nan_to_num(nan=0.0)
    return laws, (index < 0) | overflowed


def _log_ratio(law: Tensor, token: Tensor, proposal: Tensor | None, is_point: Tensor) -> Tensor:
    """The logarithm `[...]` of P(c) / Q(c) in double precision.

    Args:
        law: `[..., V]` the laws P of the tokens' parents.
        token: `[...]` the tokens c.
        proposal: `[..., V]` what they were drawn from, `None` if all are point masses.
        is_point: `[...]` whether they are.
    """
    place = token[..., None]
    ratio = law.gather(-1, place)[..., 0].double().log()
    if proposal is None:
        return ratio
    return ratio - proposal.gather(-1, place)[..., 0].double().log().masked_fill(is_point, 0.0)


def _accept(a: Tensor, log_ratio: Tensor, exists: Tensor) -> Tensor:
    """The probability min(1, a P(c) / Q(c)) with which a child is accepted; none if it does not exist."""
    # -inf - -inf: the target cannot say this token, so it is refused whatever the draft's law.
    ratio = (a.log() + log_ratio).nan_to_num(nan=-torch.inf, posinf=0.0)
    return ratio.clamp(max=0.0).exp().masked_fill(~exists, 0.0)


def _strike(
    law: Tensor,
    total: Tensor,
    share: Tensor,
    token: Tensor,
    proposal: Tensor | None,
    is_point: Tensor,
    exists: Tensor,
) -> None:
    """What parents owe once a child of theirs is rejected: P becomes R / S and a becomes S / (S + 1 - a), all in place.

    Args:
        law: `[..., V]` weights of the parents' P.
        total: `[...]` their sums.
        share: `[...]` the parents' a.
        token: `[...]` the children's tokens.
        proposal: `[..., V]` what they were drawn from, `None` if all are point masses.
        is_point: `[...]` whether they are.
        exists: `[...]` whether there is a child.
    """
    place, is_struck = token[..., None], is_point & exists
    law.mul_(torch.where(exists, share / total, 1.0).to(law.dtype)[..., None])
    if proposal is not None:
        drawn = (exists & ~is_point)[..., None]
        law.addcmul_(proposal, drawn.to(law.dtype), value=-1).clamp_(min=0)
    law.scatter_(-1, place, law.gather(-1, place).masked_fill(is_struck[..., None], 0.0))
    left = law.sum(dim=-1).double()
    is_spent = exists & (left <= 0)
    if law.device.type != "cpu" or bool(is_spent.any()):
        # Nothing left and nothing to reject: P equals Q, and a rejection can only be rounding. P stays.
        if proposal is not None:
            law.addcmul_(proposal, (is_spent & ~is_point)[..., None].to(law.dtype))
        law.scatter_(-1, place, law.gather(-1, place).masked_fill((is_spent & is_point)[..., None], 1.0))
    total.copy_(torch.where(exists, torch.where(is_spent, 1.0, left), total))
    # A parent with a = 1 and nothing left is 0 / 0: it is never rejected.
    share.copy_(torch.where(exists, (left / (left + (1 - share))).nan_to_num(nan=1.0), share))


def _end_law(probability: np.ndarray, parents: np.ndarray, carry: bool) -> np.ndarray:
    """The probability of each node to be the last accepted one.

    Args:
        probability: `[B, N + 1]` what `_acceptances` returns.
        parents: `[B, N]`.
        carry: As in `settle`. If so, the nodes are asked leaves first, first-drawn branches first, and the first that accepts
            ends the round; else the walk goes down from the root.
    """
    batch_size, size = probability.shape
    lines = np.arange(batch_size)
    passing = probability.copy()
    if carry:
        missed = 1.0 - probability
        for node in range(size - 1, 0, -1):
            missed[lines, parents[:, node - 1]] *= missed[:, node]
        passing = 1.0 - missed
    reached = np.zeros_like(probability)
    reached[:, 0] = 1.0
    for node in range(1, size):
        parent = parents[:, node - 1]
        entering = reached[lines, parent]
        # `reached` of the parent becomes the probability of having left this child behind.
        reached[:, node] = entering if carry else entering * passing[:, node]
        reached[lines, parent] = entering * (1.0 - passing[:, node])
    return reached * probability if carry else reached
