"""One tree of tokens from several draft models, or from several draws of one (SpecInfer, Miao et al. 2024, arXiv 2305.09781).

A node's children are drawn one after another, each from the law of one of the models: the first from that of the model that
drew the node, the next from that of the next model, and so on. Each child keeps the law that it was drawn from, which is what
the verification needs. Drawn with replacement, a token may come again: its draws become one node, below which what was planned
for each of them is drawn; that it was drawn again, and from which law, is kept too (`DraftTree.repeats`), or its siblings would
be accepted too often. Drawn without replacement, laws leave out the siblings drawn before, which accepts more.

Shapes: B lines, W places of a level, U of the level above, K models, N nodes, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..families import family_of
from ..tree import NO_TOKEN, DraftTree
from .base import Accepted, Budget, DraftContext
from .draft_model import DraftModelDrafter
from .growth import DraftSource, Grown, draw, samples, within_depths
from .tree_shape import MeasuredShape, Place, Shape, branching_shape


class TokenTreeDrafter:
    """Drafts trees with one or more models, which all run on every node that is to have children.

    Args:
        models: The draft models, of the target's tokenizer.
        target: The model they draft for.
        tokenizer: The target's tokenizer (see `DraftModelDrafter`).
        assistant_tokenizer: That of the draft models.
        branches: How many children the root has, each of its children has, and so on; `None` for the shape that promises most
            by what was accepted so far.
        replacement: Whether a node's children are drawn independently of one another.

    Raises:
        TypeError: if a model is none.
        ValueError: if a model does not fit the target, one of the two takes no trees, or `branches` are no counts.
    """

    weighs_nodes = False
    needs_tree_nodes = True

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        target: PreTrainedModel,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        branches: Sequence[int] | None = None,
        replacement: bool = False,
    ):
        _check_branches(branches)
        _check_models(models, target)
        self.models = [DraftModelDrafter(model, target, tokenizer, assistant_tokenizer) for model in models]
        self.step_cost = sum(model.step_cost for model in self.models)
        self.branches = branches
        self.replacement = replacement

    def begin(self, context: DraftContext) -> None:
        """Sees what room the prompts leave the draft models."""
        self.models = [copy.copy(model) for model in self.models]
        for model in self.models:
            model.begin(context)
        self.measured = MeasuredShape()

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A tree with the nodes that the budget allows."""
        reaches = [model.depth_within_limit(context, budget) for model in self.models]
        active = [model for model, reach in zip(self.models, reaches, strict=True) if reach]
        if not active:
            return DraftTree.empty(len(context.rows), context.device)
        depth = min(reach for reach in reaches if reach)
        if self.branches is None:
            shape = self.measured.of(budget.nodes, depth)
        else:
            shape = branching_shape(self.branches, budget.nodes, depth)
        logits = [model.start(context) for model in active]
        grown = grow_shape(active, context, logits, shape, self.replacement)
        for model in active:
            model.slot_of = torch.where(grown.slot_of < 0, grown.slot_of, grown.slot_of + model.pending)
        return within_depths(grown.tree, budget.depths)

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Keeps the accepted nodes, and learns which children they were."""
        if self.branches is None and accepted.tree.size:
            tokens, parents = accepted.tree.tokens.tolist(), accepted.tree.parents.tolist()
            for line, path in enumerate(accepted.paths):
                self.measured.observe(tokens[line], parents[line], path)
            self.measured.end_round()
        for model in self.models:
            model.commit(context, accepted)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Drops the other rows."""
        for model in self.models:
            model.keep_rows(lines)


class TreeSource(DraftSource, Protocol):
    """A source that knows how many of the round's tokens it ran on before the tree."""

    pending: int


@dataclass
class _Level:
    """The draws of a level.

    Args:
        tokens: `[B, W]` what was drawn; `NO_TOKEN` where nothing could be.
        parents: `[B, W]` the places above that they stand at.
        owners: `[B, W]` the models that drew them.
        nodes: `[B, W]` the places whose nodes they are: their own, or that of an earlier sibling with the same token.
        laws: `[B, W, V]` what they were drawn from.
    """

    tokens: Tensor
    parents: Tensor
    owners: Tensor
    nodes: Tensor
    laws: Tensor

    @property
    def are_nodes(self) -> Tensor:
        """`[B, W]` whether a draw is a node of its own."""
        order = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (self.tokens != NO_TOKEN) & (self.nodes == order)


def grow_shape(
    sources: Sequence[TreeSource], context: DraftContext, logits: Sequence[Tensor], shape: Shape, replacement: bool
) -> Grown:
    """Draws a tree of a given shape; where nothing is sampled, each draw takes the most probable token that is not there yet.

    How many draws a node has depends on the shape, and on whether its own token was drawn again: not on what is below it.

    Args:
        sources: What drafts; of all tokens of the target.
        context: The call.
        logits: `[B, V']` of each source at the root.
        shape: The draws of each level.
        replacement: Whether a node's sampled children are drawn independently of one another.

    Returns:
        The tree; and where the sources hold its nodes, counted from the first one.
    """
    batch_size, device = len(context.rows), context.device
    root = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
    above = _Level(root, root, root, root, torch.empty(0))
    paths = root[:, :, None][:, :, :0]
    visible = torch.ones(batch_size, 1, 0, dtype=torch.bool, device=device)
    given = [each[:, None] for each in logits]
    levels: list[_Level] = []
    slots: list[Tensor] = []
    for depth, places in enumerate(shape):
        laws = torch.stack([_laws(source, context, paths, own) for source, own in zip(sources, given, strict=True)])
        level = _drawn(context, laws, above, places, depth, replacement)
        levels.append(level)
        if depth + 1 == len(shape):
            slots.append(torch.full_like(level.tokens, -1))
            break
        tokens = level.tokens.clamp(min=0)
        own = torch.eye(len(places), dtype=torch.bool, device=device).expand(batch_size, -1, -1)
        visible = torch.cat([_pick(visible, level.parents), own], dim=2)
        paths = torch.cat([_pick(paths, level.parents), tokens[:, :, None]], dim=2)
        given = [_extended(source, tokens, depth, visible) for source in sources]
        slots.append(torch.arange(visible.shape[2] - len(places), visible.shape[2], device=device).expand_as(tokens))
        above = level
    return _joined(levels, torch.cat(slots, dim=1), keeps_laws=samples(context) and context.weighs_proposals)


def _laws(source: DraftSource, context: DraftContext, paths: Tensor, logits: Tensor) -> Tensor:
    """A source's laws `[B, U, V]` at the places of a level."""
    batch_size, count = paths.shape[:2]
    lines = [line for line in range(batch_size) for _ in range(count)]
    scores = source.scores(context, lines, paths.flatten(0, 1), logits.flatten(0, 1))
    return scores.softmax(dim=-1).view(batch_size, count, -1)


def _extended(source: TreeSource, tokens: Tensor, depth: int, visible: Tensor) -> Tensor:
    """Raw logits `[B, W, V']` of a source at a level."""
    seen = visible.new_ones(*visible.shape[:2], source.pending)
    return source.extend(tokens, torch.full_like(tokens, source.pending + depth), torch.cat([seen, visible], dim=2))


def _drawn(
    context: DraftContext, laws: Tensor, above: _Level, places: Sequence[Place], depth: int, replacement: bool
) -> _Level:
    """Draws a level.

    Args:
        context: The call.
        laws: `[K, B, U, V]` of the models; what is drawn without replacement is taken off them.
        above: The level above.
        places: What is to be drawn.
        depth: The number of levels above.
        replacement: Whether siblings are drawn independently of one another.
    """
    lines = torch.arange(laws.shape[1], device=laws.device)
    certain = torch.nn.functional.one_hot(torch.zeros_like(lines), laws.shape[-1]).to(laws.dtype)
    drawn: list[tuple[Tensor, ...]] = []
    for number, place in enumerate(places):
        parent = above.nodes[:, place.parent]
        owner = (above.owners[:, place.parent] + place.rank) % len(laws)
        weights = laws[owner, lines, parent]
        total = weights.sum(dim=-1, keepdim=True)
        exists = (total[:, 0] > 0) & (above.tokens[:, place.parent] != NO_TOKEN)
        law = torch.where(exists[:, None], weights / total, certain)  # what is not there needs no chance
        is_drawn = samples(context)
        token = draw(context, law, range(len(lines)), depth) if is_drawn else law.argmax(dim=-1)
        node = torch.full_like(token, number)
        if is_drawn and replacement:
            for earlier in reversed(drawn):
                node = torch.where((earlier[0] == token) & (earlier[1] == parent), earlier[3], node)
        else:
            laws[:, lines, parent, token] = 0
        drawn.append((token.masked_fill(~exists, NO_TOKEN), parent, owner, node, law))
    return _Level(*(torch.stack(part, dim=1) for part in zip(*drawn, strict=True)))


def _joined(levels: Sequence[_Level], slots: Tensor, keeps_laws: bool) -> Grown:
    """The levels' nodes as one tree, and its nodes' slots.

    Args:
        levels: The levels.
        slots: `[B, N]` the slots of all draws.
        keeps_laws: Whether the laws that the nodes were drawn from matter.
    """
    starts = [0]
    for level in levels:
        starts.append(starts[-1] + level.tokens.shape[1])
    below_root = torch.zeros_like(levels[0].tokens)
    above = [below_root, *(start + 1 + level.parents for start, level in zip(starts, levels[1:], strict=False))]
    is_node = torch.cat([level.are_nodes for level in levels], dim=1)
    tokens = torch.cat([level.tokens for level in levels], dim=1).masked_fill(~is_node, NO_TOKEN)
    parents = torch.cat(above, dim=1)
    laws = torch.cat([level.laws for level in levels], dim=1) if keeps_laws else None
    law_of = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens) if keeps_laws else None
    repeats = _repeats(levels, starts, tokens) if keeps_laws else None
    tree = DraftTree(tokens, parents, len(levels), laws, law_of, repeats=repeats)
    return _without_gaps(tree, slots)


def _repeats(levels: Sequence[_Level], starts: Sequence[int], tokens: Tensor) -> Tensor | None:
    """`DraftTree.repeats` of draws whose tokens siblings bear; `None` if there are none."""
    lines = torch.arange(len(tokens), device=tokens.device)
    repeats = tokens.new_full((*tokens.shape, max(len(level.tokens[0]) for level in levels)), -1)
    filled = torch.zeros_like(tokens)
    for start, level in zip(starts, levels, strict=False):
        are_nodes = level.are_nodes
        for number in range(1, level.tokens.shape[1]):
            again = (level.tokens[:, number] != NO_TOKEN) & ~are_nodes[:, number]
            # The last sibling before it that is a node: the first draw at a node always is one.
            beside = are_nodes[:, :number] & (level.parents[:, :number] == level.parents[:, number, None])
            order = torch.arange(1, number + 1, device=tokens.device)
            node = start + (beside * order).argmax(dim=1)
            place = filled[lines, node]
            repeats[lines, node, place] = torch.where(again, start + number, repeats[lines, node, place])
            filled[lines, node] += again
    most = int(filled.max())
    return repeats[:, :, :most] if most else None


def _without_gaps(tree: DraftTree, slots: Tensor) -> Grown:
    """The tree without the nodes that no line has: the target is not to run on them."""
    held = (tree.tokens != NO_TOKEN).any(dim=0)
    if bool(held.all()):
        return Grown(tree, slots)
    index = torch.nn.functional.pad(held.cumsum(dim=0), (1, 0))
    law_of = None if tree.proposal_of is None else tree.proposal_of[:, held]
    repeats = None if tree.repeats is None else tree.repeats[:, held]
    # A line whose own node is not there has none below it either, wherever these are said to hang.
    parents = index[tree.parents[:, held]]
    kept = DraftTree(tree.tokens[:, held], parents, tree.depth, tree.proposals, law_of, repeats=repeats)
    return Grown(kept, slots[:, held])


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """Places of `[B, U, ...]` by index `[B, W]`."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))


def _check_branches(branches: Sequence[int] | None) -> None:
    if branches is None:
        return
    if isinstance(branches, str) or not branches or any(type(count) is not int or count < 1 for count in branches):
        raise ValueError(f"`branches` must be counts of at least 1, one for each level, got {branches!r}.")


def _check_models(models: Sequence[PreTrainedModel], target: PreTrainedModel) -> None:
    if not models:
        raise ValueError("A tree of draft models needs at least one, got an empty list.")
    for model in models:
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"A list of drafters must be one of draft models, and has a {type(model).__name__}.")
    for model in (target, *models):
        if not family_of(model).takes_trees:
            raise ValueError(
                f"{type(model).__name__} takes chains and no trees of drafts, so several draft models cannot be merged; "
                "name one."
            )
