"""Growing a draft, level by level, from anything that gives logits for a node: a draft model or a head.

In a sampled tree a node has one sampled child, verified first against the law without its siblings, and then its most probable
tokens as point masses (Hu et al. 2025, arXiv 2502.18779): cheap, exact, and close to what any verifier could accept.

Shapes: B lines, F frontier nodes, W nodes of a level, V vocabulary, T the part of it that the source knows, m tokens of the
round that the source has run on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..tree import NO_TOKEN, DraftTree
from .base import DraftContext
from .prospects import Prospects


class DraftSource(Protocol):
    """Gives the law of the next token at a node.

    Attributes:
        own_ids: `[T]` the target's ids of what its scores are over; `None` if they are over all of the target's tokens.
    """

    own_ids: Tensor | None

    def scores(self, context: DraftContext, lines: Sequence[int], drafted: Tensor, logits: Tensor) -> Tensor:
        """Processed scores `[R, T]` from raw logits `[R, V']` at nodes whose paths bear the tokens `drafted` `[R, D]`."""
        ...

    def follow(self, tokens: Tensor, depth: int) -> Tensor:
        """Raw logits `[B, V']` after one more node per line, `[B]` at a depth, that attends to all of the round's tokens."""
        ...

    def extend(self, tokens: Tensor, depths: Tensor, visible: Tensor) -> Tensor:
        """Raw logits `[B, F, V']` after new nodes `[B, F]`, each attending to some of the round's tokens `[B, F, m]`."""
        ...


@dataclass
class Grown:
    """A draft and where its source holds its nodes.

    Args:
        tree: The draft.
        slot_of: `[B, N]` for each node, which of the round's tokens it is to the source; -1 if the source has not run on it.
    """

    tree: DraftTree
    slot_of: Tensor


def grow_chain(
    source: DraftSource, context: DraftContext, logits: Tensor, seen: int, depth: int, prospects: Prospects | None = None
) -> Grown:
    """One path per line, sampled or most probable.

    Args:
        source: What drafts.
        context: The call.
        logits: `[B, V']` at the root.
        seen: m, how many of the round's tokens the source has run on.
        depth: The path's length, at most.
        prospects: Says where it ends; `None` for no sooner than at its full length.
    """
    lines = range(len(context.rows))
    drafted = torch.empty(len(lines), 0, dtype=torch.long, device=context.device)
    laws: list[Tensor] = []
    for level in range(depth):
        if level:
            if prospects is not None and not prospects.goes_deeper():
                break
            logits = source.follow(drafted[:, -1], seen + level - 1)
        scores = source.scores(context, lines, drafted, logits)
        if prospects is not None and not prospects.take(scores):
            break
        if samples(context):
            laws.append(scores.softmax(dim=-1))
            column = draw(context, laws[-1], lines, level)
        else:
            column = scores.argmax(dim=-1)
        drafted = torch.cat([drafted, named(source, column)[:, None]], dim=1)
    slots = torch.arange(seen, seen + drafted.shape[1], device=context.device)
    slots[-1:] = -1
    keeps_laws = laws and context.weighs_proposals
    proposals = over_all_tokens(source, torch.stack(laws, dim=1), context.vocab_size) if keeps_laws else None
    tree = DraftTree.chain(drafted, proposals)
    tree.expected = None if prospects is None else prospects.expected
    return Grown(tree, slots.expand(len(lines), -1))


def named(source: DraftSource, columns: Tensor) -> Tensor:
    """The target's ids of columns of the source's scores."""
    return columns if source.own_ids is None else source.own_ids[columns]


def over_all_tokens(source: DraftSource, laws: Tensor, vocab_size: int) -> Tensor:
    """Laws `[..., T]` over what the source knows as laws `[..., V]`; what it does not know has no probability."""
    if source.own_ids is None:
        return laws
    return laws.new_zeros(*laws.shape[:-1], vocab_size).index_copy_(-1, source.own_ids, laws)


@dataclass
class Frontier:
    """Nodes to be given children.

    Args:
        nodes: `[B, F]` their indices.
        value: `[B, F]` log probabilities of their paths.
        paths: `[B, F, level]` their paths' tokens.
        visible: `[B, F, m]` what they attend to.
        logits: `[B, F, V']` their raw logits.
    """

    nodes: Tensor
    value: Tensor
    paths: Tensor
    visible: Tensor
    logits: Tensor

    @classmethod
    def at_root(cls, context: DraftContext, logits: Tensor, seen: int) -> Frontier:
        """The root alone.

        Args:
            context: The call.
            logits: `[B, V']` at the root.
            seen: m.
        """
        root = torch.zeros(len(context.rows), 1, dtype=torch.long, device=context.device)
        attends = torch.ones(len(context.rows), 1, seen, dtype=torch.bool, device=context.device)
        return cls(root, torch.zeros_like(root, dtype=torch.float), root[:, :, None][:, :, :0], attends, logits[:, None])


@dataclass
class Level:
    """The children made at one depth.

    Args:
        tokens: `[B, W]`.
        parents: `[B, W]` places in the frontier.
        value: `[B, W]` log probabilities of their paths.
        laws: `[B, F, T]` what the first F of them were drawn from, or `None`.
    """

    tokens: Tensor
    parents: Tensor
    value: Tensor
    laws: Tensor | None


def grow_tree(source: DraftSource, context: DraftContext, logits: Tensor, seen: int, depth: int, nodes: int) -> Grown:
    """A tree per line: some paths side by side, as many as the nodes allow, branching where the draft's law is widest.

    Whether a node is expanded depends on the draft's law and on tokens already in the tree, and a token that was drawn is never
    left out, so the laws of sampled nodes stay true.

    Args:
        source: What drafts.
        context: The call.
        logits: `[B, V']` at the root.
        seen: m, how many of the round's tokens the source has run on.
        depth: The number of levels.
        nodes: The number of nodes, at least `depth`.
    """
    frontier = Frontier.at_root(context, logits, seen)
    levels, parents, slots, made = [], [], [], 0
    widths = _level_widths(nodes, depth)
    for index, width in enumerate(widths):
        level = children_of(source, context, frontier, width, index, samples(context))
        levels.append(level)
        parents.append(frontier.nodes.gather(1, level.parents))
        slots.append(torch.full_like(level.tokens, -1))
        if index + 1 < depth:
            frontier, chosen = descend(source, frontier, level, widths[index + 1], made, seen + index)
            held = frontier.visible.shape[2] - chosen.shape[1]
            order = torch.arange(held, held + chosen.shape[1], device=chosen.device)
            slots[-1].scatter_(1, chosen, order.expand_as(chosen))
        made += level.tokens.shape[1]
    laws, law_of = _collect_laws(levels) if context.weighs_proposals else (None, None)
    laws = None if laws is None else over_all_tokens(source, laws, context.vocab_size)
    tokens = torch.cat([level.tokens for level in levels], dim=1)
    return Grown(DraftTree(tokens, torch.cat(parents, dim=1), depth, laws, law_of), torch.cat(slots, dim=1))


def children_of(
    source: DraftSource, context: DraftContext, frontier: Frontier, width: int, depth: int, is_mixed: bool
) -> Level:
    """Gives the frontier's nodes `width` children in all: if they are mixed, one sampled child each, and the most probable."""
    batch_size, count = frontier.nodes.shape
    lines = [line for line in range(batch_size) for _ in range(count)]
    scores = source.scores(context, lines, frontier.paths.flatten(0, 1), frontier.logits.flatten(0, 1))
    points = width - count if is_mixed else width
    # Of one node's children no more than that many can be among the best, and few are quicker to compare than all.
    best = scores.log_softmax(dim=-1).topk(min(points, scores.shape[-1]), dim=-1)
    reach = best.values.view(batch_size, count, -1)
    reach = (reach + frontier.value.to(reach.dtype)[:, :, None]).flatten(1)
    value, place = reach.topk(min(points, reach.shape[1]), dim=1)
    columns = best.indices.view(batch_size, -1).gather(1, place)
    parents = place // max(1, best.indices.shape[1])
    law = scores.softmax(dim=-1).view(batch_size, count, -1) if is_mixed else None
    rest, rest_mass = (None, None) if law is None else _without(law, parents, columns)
    # What cannot be said is no candidate: there were fewer tokens than places.
    tokens = named(source, columns).masked_fill(value == -torch.inf, NO_TOKEN)
    if rest is None or rest_mass is None:
        return Level(tokens, parents, value, None)
    drawn = named(source, draw(context, rest.flatten(0, 1), lines, depth)).view(batch_size, count)
    # Where draft and target agree, a sampled child is accepted as often as the target says none of its siblings: what it
    # is worth depends on the law and not on the token.
    drawn_value = frontier.value.to(rest_mass.dtype) + rest_mass.log()
    # Below a node that does not exist there is none either.
    drawn = drawn.masked_fill(frontier.value == -torch.inf, NO_TOKEN)
    everyone = torch.arange(count, device=drawn.device).expand_as(drawn)
    # Sampled children come first among their siblings: the verifier asks in this order.
    return Level(
        torch.cat([drawn, tokens], dim=1), torch.cat([everyone, parents], dim=1), torch.cat([drawn_value, value], dim=1), rest
    )


def descend(
    source: DraftSource, frontier: Frontier, level: Level, count: int, made: int, depth: int
) -> tuple[Frontier, Tensor]:
    """Runs the source on a level's `count` most probable nodes; gives the new frontier and its places `[B, F]`."""
    value, chosen = level.value.topk(min(count, level.tokens.shape[1]), dim=1)
    tokens = level.tokens.gather(1, chosen).clamp(min=0)
    origin = level.parents.gather(1, chosen)
    own = torch.eye(chosen.shape[1], dtype=torch.bool, device=chosen.device).expand(chosen.shape[0], -1, -1)
    visible = torch.cat([_pick(frontier.visible, origin), own], dim=2)
    paths = torch.cat([_pick(frontier.paths, origin), tokens[:, :, None]], dim=2)
    logits = source.extend(tokens, torch.full_like(tokens, depth), visible)
    return Frontier(made + 1 + chosen, value, paths, visible, logits), chosen


def _collect_laws(levels: Sequence[Level]) -> tuple[Tensor | None, Tensor | None]:
    """All laws `[B, M, T]` and each node's index among them `[B, N]`, -1 for point masses."""
    laws, indices, count = [], [], 0
    for level in levels:
        index = torch.full_like(level.tokens, -1)
        if level.laws is not None:
            own = level.laws.shape[1]
            index[:, :own] = torch.arange(count, count + own, device=index.device)
            laws.append(level.laws)
            count += own
        indices.append(index)
    return (torch.cat(laws, dim=1), torch.cat(indices, dim=1)) if laws else (None, None)


def _without(law: Tensor, parents: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The laws `[B, F, T]` without the columns of point masses, and the probability `[B, F]` of what is left.

    A law with nothing left stays as it was.
    """
    rest = law.clone()
    lines = torch.arange(law.shape[0], device=law.device)[:, None]
    rest[lines, parents, columns] = 0
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, rest / total, law), total[:, :, 0]


def _level_widths(nodes: int, depth: int) -> list[int]:
    """How many nodes each level gets: even shares, the first levels one more where they do not divide."""
    return [nodes // depth + (level < nodes % depth) for level in range(depth)]


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """Lines of `[B, F, ...]` by place `[B, G]`."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))


def samples(context: DraftContext) -> bool:
    """Whether drafts are drawn, not the most probable tokens."""
    return context.noise is not None and context.config.draft_temperature != 0


def draw(context: DraftContext, law: Tensor, lines: Sequence[int], depth: int) -> Tensor:
    """Draws a column per law `[R, T]`, for nodes one below `depth`."""
    assert context.noise is not None
    rows = [context.rows[line] for line in lines]
    positions = [context.sequences.generated(row) + depth for row in rows]
    return context.noise.draw(law, rows, positions)


def within_depths(tree: DraftTree, depths: Sequence[int]) -> DraftTree:
    """The tree without the nodes below each line's own depth `[B]`."""
    if min(depths) >= tree.depth:
        return tree
    limit = torch.tensor(depths, device=tree.tokens.device)[:, None]
    tokens = tree.tokens.masked_fill(tree.depths[:, 1:] > limit, NO_TOKEN)
    return replace(tree, tokens=tokens)
