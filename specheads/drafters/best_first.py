"""Grows a draft from a row's last token, the most promising node first.

A node is accepted with about the product of the probabilities along its path, so the N best products make the tree of N nodes
that gets the most accepted (algorithm of OPT-Tree, Wang et al. 2024, arXiv 2406.17276); as products fall along a path, the best
node not yet taken always hangs below one that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from ..pacing import shares
from ..tree import DraftTree
from .base import Budget, DraftContext

# How much of the past counts at each token for a row's reliance on its candidates, lately and on the whole.
RECENT, LASTING = 0.9, 0.98
DOUBT = 2.0  # promised hits that an expectation counts for
CERTAIN = 0.98  # no candidate is more probable than this

# A node that is accepted less often than this costs more than it brings on any machine.
LEAST_VALUE = 0.005


class Candidate(NamedTuple):
    """A token that may come next.

    Args:
        probability: How likely it follows its parent.
        token: The token.
        state: Where the suffix automaton of the row stands after it.
        length: How many tokens of context, this one included, that state stands for.
    """

    probability: float
    token: int
    state: int = 0
    length: int = 0


Children = Callable[[Candidate], Sequence[Candidate]]


class Reliance:
    """How far a row's candidates can be relied on, by where they come from; learnt from every token that is said.

    A candidate's probability stands for what its source gets right on the whole; on a given text it gets more or less right.
    What the candidates of a source promised is compared with how often one of them came, whether they were drafted or not.

    Args:
        sources: How many sources there are.
    """

    def __init__(self, sources: int):
        self.recent = [[0.0, 0.0] for _ in range(sources)]  # promised, came
        self.lasting = [[0.0, 0.0] for _ in range(sources)]
        self.factors = [1.0] * sources

    def observe(self, promised: Sequence[float], hit: int | None) -> None:
        """Learns from a token.

        Args:
            promised: The probability that each source gave to its candidates together, before what was learnt here.
            hit: The source of the candidate that came, `None` if none did.
        """
        for source, promise in enumerate(promised):
            if not promise:
                continue
            for sums, memory in ((self.recent[source], RECENT), (self.lasting[source], LASTING)):
                sums[0] = memory * sums[0] + promise
                sums[1] = memory * sums[1] + (source == hit)
            (promised_of_late, came_of_late), (ever_promised, ever_came) = self.recent[source], self.lasting[source]
            lasting = (ever_came + DOUBT) / (ever_promised + DOUBT)
            self.factors[source] = (came_of_late + DOUBT * lasting) / (promised_of_late + DOUBT)

    def applied(self, source: int, probability: float) -> float:
        """A candidate's probability in the light of what was learnt."""
        return min(CERTAIN, probability * self.factors[source])


def is_single_path(context: DraftContext, budget: Budget) -> bool:
    """Whether a draft is to be a chain: the target takes no trees, or there are no nodes for a second path."""
    return not context.takes_trees or budget.nodes <= budget.depth


class Draft(NamedTuple):
    """A row's draft.

    Args:
        tokens: The nodes' tokens, a parent's before its children's.
        parents: The nodes' parents, 0 for the root.
        values: How likely each node is to be accepted, never more than the one before it.
    """

    tokens: list[int]
    parents: list[int]
    values: list[float]

    def first(self, nodes: int) -> Draft:
        """The part with the most probable nodes."""
        return Draft(self.tokens[:nodes], self.parents[:nodes], self.values[:nodes])


def grow_paying(
    root: Candidate, children: Children, budget: Budget, depth: int, end_tokens: set[int], single_path: bool
) -> Draft:
    """A row's draft of the nodes that may pay for themselves.

    Args:
        root: The row's last token.
        children: What may follow a candidate.
        budget: The round's budget.
        depth: The row's depth within it.
        end_tokens: Tokens after which nothing is drafted.
        single_path: Follow the most probable child only.
    """
    # In a batch the rows pay for a column together, so a row's node may be worth less than its share.
    least = budget.node_cost if len(budget.depths) == 1 else 0.0
    return grow(root, children, budget.nodes, depth, end_tokens, single_path, max(LEAST_VALUE, least))


def tree_of(drafts: Sequence[Draft], budget: Budget, context: DraftContext) -> DraftTree:
    """The drafts of all rows as one tree, as wide as pays for the rows together; an empty one if no width does."""
    width = paying_width(drafts, budget, shares(context))
    if not width:
        return DraftTree.empty(len(drafts), context.device)
    kept = [draft.first(width) for draft in drafts]
    tree = DraftTree.from_rows([(draft.tokens, draft.parents) for draft in kept], context.device)
    tree.expected = sum(sum(draft.values) for draft in kept)
    return tree


def paying_width(drafts: Sequence[Draft], budget: Budget, shares: Sequence[float]) -> int:
    """How many nodes a row may have at most, so that what the rows are expected to gain exceeds what it costs by most.

    Args:
        drafts: The rows' drafts.
        budget: The round's budget.
        shares: What a token of each row counts for (`pacing.shares`).
    """
    best, best_gain, gain = 0, 0.0, -budget.entry_cost
    for node in range(max(len(draft.values) for draft in drafts)):
        gain -= budget.node_cost
        for share, draft in zip(shares, drafts, strict=True):
            gain += share * draft.values[node] if node < len(draft.values) else 0.0
        if gain > best_gain:
            best, best_gain = node + 1, gain
    return best


def grow(
    root: Candidate,
    children: Children,
    nodes: int,
    depth: int,
    end_tokens: set[int],
    single_path: bool,
    least_value: float = LEAST_VALUE,
) -> Draft:
    """A row's draft.

    Args:
        root: The row's last token.
        children: What may follow a candidate; of equally probable ones the first is taken first.
        nodes: The most nodes.
        depth: The most tokens along a path.
        end_tokens: Tokens after which nothing is drafted.
        single_path: Follow the most probable child only.
        least_value: The least probability of a node.
    """
    tokens: list[int] = []
    parents: list[int] = []
    values: list[float] = []
    serial = count()
    waiting = [(-1.0, next(serial), 0, 0, root)]
    while waiting and depth:
        value, _, level, parent, candidate = heappop(waiting)
        if level:
            tokens.append(candidate.token)
            parents.append(parent)
            values.append(-value)
        if len(tokens) >= nodes:
            break
        if level == depth or (level and candidate.token in end_tokens):
            continue
        following = children(candidate)
        if single_path and following:
            following = [max(following, key=lambda child: child.probability)]
        for child in following:
            if -value * child.probability >= least_value:
                heappush(waiting, (value * child.probability, next(serial), level + 1, len(tokens), child))
    return Draft(tokens, parents, values)
