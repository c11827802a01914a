"""The verifier alone, by enumeration: one round, continued by the target, has the target's law to rounding."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specheads import verify
from specheads.tree import DraftTree
from specheads.verify import Verdict, match, settle

from .replay import ReplayNoise, branches, law_of, total_variation

VOCAB = 3
TOPOLOGIES = {
    "chain1": [0],
    "chain2": [0, 1],
    "chain3": [0, 1, 2],
    "chain4": [0, 1, 2, 3],
    "siblings": [0, 0],
    "three": [0, 0, 0],
    "fork": [0, 0, 1],
    "deep fork": [0, 1, 1],
    "second grows": [0, 0, 2],
    "broad": [0, 0, 1, 1],
}
KINDS = ("same", "dirichlet", "zeros", "disjoint", "one-hot target", "one-hot draft")


class Laws:
    """Random laws for every prefix, made when asked for."""

    def __init__(self, kind: str, seed: int):
        self.kind, self.seed, self.known = kind, seed, {}

    def __call__(self, name: str, prefix: tuple[int, ...]) -> Tensor:
        if self.kind == "same":
            name = "target"
        key = (name, prefix)
        if key not in self.known:
            self.known[key] = self._make(name, sum((token + 1) * 7**i for i, token in enumerate(prefix)))
        return self.known[key]

    def _make(self, name: str, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + number * 2 + (name == "draft"))
        law = torch.rand(VOCAB, generator=generator, dtype=torch.double).log().neg()
        hole = int(torch.randint(VOCAB, (), generator=generator))
        one_hot = torch.eye(VOCAB, dtype=torch.double)[hole]
        if self.kind == "zeros":
            law[hole] = 0
        elif self.kind == "disjoint":
            law = law * (torch.arange(VOCAB) % 2 == (name == "draft"))
        elif self.kind == f"one-hot {name}":
            law = one_hot
        return law / law.sum()


class FixedLaws:
    """`NodeLaws` from laws by prefix."""

    needs_prefixes = True

    def __init__(self, laws: Laws, tree: DraftTree):
        self.laws, self.tree = laws, tree

    def at(self, lines: Sequence[int], nodes: Tensor, drafted: Tensor) -> Tensor:
        return torch.stack([self.laws("target", tuple(path)).log() for path in drafted.tolist()])

    def everywhere(self, tree: DraftTree) -> Tensor:
        parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
        prefixes: list[tuple[int, ...]] = [()]
        for parent, token in zip(parents, tokens, strict=True):
            prefixes.append((*prefixes[parent], token))
        return torch.stack([self.laws("target", prefix).log() for prefix in prefixes])[None]

    def best(self, tree: DraftTree) -> Tensor:
        return self.everywhere(tree).argmax(dim=-1)


def drawn_tree(noise: ReplayNoise, parents: list[int], scheme: str, laws: Laws) -> DraftTree:
    """A tree drawn with, or without replacement, the most probable tokens, or a sampled child followed by probable ones."""
    tokens: list[int] = []
    proposals, proposal_of = [], []
    prefixes: list[tuple[int, ...]] = [()]
    used: dict[int, list[int]] = {}
    for parent in parents:
        siblings = used.setdefault(parent, [])
        law = laws("draft", prefixes[parent])
        remaining = law.clone()
        remaining[siblings] = 0
        is_point = scheme == "deterministic" or (scheme == "mixed" and bool(siblings))
        if is_point:
            token = int(remaining.argmax())
        else:
            law = remaining / remaining.sum() if scheme == "without" and remaining.sum() > 0 else law
            token = int(noise.draw(law[None], [0], [0]))
        proposal_of.append(-1 if is_point else len(proposals))
        if not is_point:
            proposals.append(law)
        tokens.append(token)
        siblings.append(token)
        prefixes.append((*prefixes[parent], token))
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    chain = parents == list(range(len(parents)))
    return DraftTree(
        torch.tensor([tokens]),
        torch.tensor([parents]),
        max(depths),
        torch.stack(proposals)[None] if proposals else None,
        torch.tensor([proposal_of]) if proposals else None,
        is_chain=chain,
    )


def round_law(parents: list[int], scheme: str, mode: str, laws: Laws) -> dict:
    """The law of the first tokens: those of one round, continued by the target."""
    length = len(parents) + 1

    def run(noise: ReplayNoise) -> tuple[int, ...]:
        tree = drawn_tree(noise, parents, scheme, laws)
        source = FixedLaws(laws, tree)
        if mode == "match":
            verdict = match(tree, source, noise, [0], [0])
        else:
            verdict = settle(tree, source, noise, [0], [0], carry=mode == "carry")
        return tuple(verdict.emitted[0])

    law: dict[tuple[int, ...], float] = {}
    for probability, emitted in branches(run):
        for sequence, more in continued(tuple(emitted), length, laws):
            law[sequence] = law.get(sequence, 0.0) + probability * more
    return law


def continued(prefix: tuple[int, ...], length: int, laws: Laws):
    if len(prefix) >= length:
        yield prefix, 1.0
        return
    for token, probability in enumerate(laws("target", prefix).tolist()):
        if probability:
            for sequence, more in continued((*prefix, token), length, laws):
                yield sequence, probability * more


def target_law(length: int, laws: Laws) -> dict:
    return dict(continued((), length, laws))


@pytest.mark.parametrize("mode", ["match", "top-down", "carry"])
@pytest.mark.parametrize("scheme", ["with", "without", "deterministic", "mixed"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_round_has_the_targets_law(topology: str, scheme: str, mode: str) -> None:
    parents = TOPOLOGIES[topology]
    for seed, kind in enumerate(KINDS):
        laws = Laws(kind, seed)
        distance = total_variation(round_law(parents, scheme, mode, laws), target_law(len(parents) + 1, laws))
        assert distance < 1e-12, (kind, distance)


def expected_accepted(parents: list[int], scheme: str, mode: str, laws: Laws) -> float:
    def run(noise: ReplayNoise) -> int:
        tree = drawn_tree(noise, parents, scheme, laws)
        verdict = settle(tree, FixedLaws(laws, tree), noise, [0], [0], carry=mode == "carry")
        return len(verdict.paths[0])

    law, _ = law_of(run)
    return sum(count * probability for count, probability in law.items())


def test_block_verification_accepts_what_its_paper_says() -> None:
    class Toy(Laws):
        def _make(self, name: str, number: int) -> Tensor:
            return torch.tensor([1 / 3, 2 / 3, 0] if name == "target" else [2 / 3, 1 / 3, 0], dtype=torch.double)

    toy = Toy("toy", 0)
    assert expected_accepted([0, 1], "with", "top-down", toy) == pytest.approx(10 / 9)
    assert expected_accepted([0, 1], "with", "carry", toy) == pytest.approx(11 / 9)


def test_carrying_never_accepts_less() -> None:
    for topology in ("chain2", "chain3", "fork", "broad"):
        for seed in range(4):
            laws = Laws("dirichlet", seed)
            parents = TOPOLOGIES[topology]
            carried = expected_accepted(parents, "without", "carry", laws)
            assert carried >= expected_accepted(parents, "without", "top-down", laws) - 1e-12


def test_a_batch_settles_each_row_as_alone() -> None:
    laws = Laws("dirichlet", 3)
    trees = [DraftTree.chain(torch.tensor([[0, 1]]), torch.stack([laws("draft", ()), laws("draft", (0,))])[None]),
             DraftTree.chain(torch.tensor([[2, 0]]), torch.stack([laws("draft", ()), laws("draft", (2,))])[None])]  # fmt: skip
    owed = [FixedLaws(laws, tree).everywhere(tree).softmax(-1) for tree in trees]
    alone = [verify._acceptances(tree, one.clone(), carry=True) for tree, one in zip(trees, owed, strict=True)]
    both = DraftTree.chain(torch.cat([t.tokens for t in trees]), torch.cat([t.proposals for t in trees]))
    assert torch.equal(verify._acceptances(both, torch.cat(owed), carry=True), torch.cat(alone))


class ScoresOfNodes:
    """`NodeLaws` from a table of scores `[B, N + 1, V]`.

    Args:
        scores: The table.
        needs_prefixes: What it says of itself; it makes the verifier walk.
    """

    def __init__(self, scores: Tensor, needs_prefixes: bool):
        self.scores, self.needs_prefixes = scores, needs_prefixes

    def at(self, lines: Sequence[int], nodes: Tensor, drafted: Tensor) -> Tensor:
        return self.scores[torch.tensor(list(lines)), nodes]

    def everywhere(self, tree: DraftTree) -> Tensor:
        return self.scores

    def best(self, tree: DraftTree) -> Tensor:
        return self.scores.argmax(dim=-1)


def matched_both_ways(seed: int) -> tuple[Verdict, Verdict]:
    """The verdict on random trees, rows of different sizes among them, by looking up all nodes and by a walk."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(3):
        size = int(torch.randint(7, (), generator=generator))
        parents = [int(torch.randint(node + 1, (), generator=generator)) for node in range(size)]
        rows.append((torch.randint(VOCAB, (size,), generator=generator).tolist(), parents))
    tree = DraftTree.from_rows(rows, torch.device("cpu"))
    # Of few values: equal ones are among the greatest.
    scores = torch.randint(2, (3, tree.size + 1, VOCAB), generator=generator).float()
    at_once, walked = (match(tree, ScoresOfNodes(scores, way), None, [0, 1, 2], [0, 0, 0]) for way in (False, True))
    return at_once, walked


def test_a_greedy_match_is_the_walks() -> None:
    verdicts = [matched_both_ways(seed) for seed in range(200)]
    assert all(at_once == walked for at_once, walked in verdicts)
    assert max(len(path) for at_once, _ in verdicts for path in at_once.paths) >= 3


def test_a_greedy_match_that_takes_the_last_of_equal_scores_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(self: ScoresOfNodes, tree: DraftTree) -> Tensor:
        return VOCAB - 1 - self.scores.flip(-1).argmax(dim=-1)

    monkeypatch.setattr(ScoresOfNodes, "best", last)
    assert any(at_once != walked for at_once, walked in map(matched_both_ways, range(50)))
