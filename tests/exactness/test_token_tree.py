"""Trees of several draws, from one draft model or two: the law is the target's, and as much is accepted as theory says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import specheads
from specheads import SpeculativeConfig, verify
from specheads.drafters import load_drafter, token_tree
from specheads.drafters.growth import Grown
from specheads.drafters.token_tree import grow_shape
from specheads.drafters.tree_shape import MeasuredShape, best_shape, branching_shape, expected_acceptance

from ..tiny import perturbed, tiny
from .replay import ReplayNoise, branches
from .test_greedy import NEW_TOKENS, prompt
from .test_monte_carlo import THRESHOLD, WARPED, expected_law, models, p_value, sample
from .whole_loop import distance, target_and_draft

# name: how many draft models, the drafter's options, the budget
SCHEMES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one model, replaced": (1, {"branches": (2, 2), "replacement": True}, {"draft_tokens": 2, "tree_nodes": 4}),
    "one model": (1, {"branches": (3, 1)}, {"draft_tokens": 2, "tree_nodes": 6}),
    "two models, replaced": (2, {"branches": (2, 2), "replacement": True}, {"draft_tokens": 2, "tree_nodes": 4}),
    "two models": (2, {"branches": (2, 2)}, {"draft_tokens": 2, "tree_nodes": 5}),
    "two models, measured": (2, {"replacement": True}, {"draft_tokens": 2, "tree_nodes": 4}),
}
FLAT: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    f"{name}{', replaced' if replacement else ''}": (
        count, {"branches": (2,), "replacement": replacement}, {"draft_tokens": 1, "tree_nodes": 2},
    )
    for name, count in (("one", 1), ("two", 2)) for replacement in (False, True)
}  # fmt: skip


def tree_distance(
    scheme: tuple[int, dict[str, Any], dict[str, Any]], setting: str, batch: int, tokens: int, mode: str = "traversal"
) -> float:
    count, options, budget = scheme
    target, draft = target_and_draft()
    drafts = [draft, perturbed(target, 0.6, seed=7)][:count]
    specheads.enable(target, drafter=load_drafter(drafts, target, **options))
    worst, branch_count = distance(target, None, {"adaptive": False, "verification": mode, **budget}, setting, batch, tokens)
    assert branch_count > 3
    return worst


@pytest.mark.parametrize("scheme", SCHEMES)
def test_replay(scheme: str) -> None:
    mode = "token" if scheme == "two models" else "traversal"
    assert tree_distance(SCHEMES[scheme], "warped", 1, 4, mode) < 1e-9


@pytest.mark.parametrize("scheme", FLAT)
def test_replay_over_all_tokens(scheme: str) -> None:
    assert tree_distance(FLAT[scheme], "plain", 1, 3) < 1e-9


def test_replay_of_a_padded_batch() -> None:
    assert tree_distance(SCHEMES["two models, replaced"], "warped", 2, 3) < 1e-9


Change = Callable[[Grown], Grown]


def forgotten_proposal(grown: Grown) -> Grown:
    """All siblings are verified with the law of the first."""
    assert grown.tree.proposal_of is not None
    return replace(grown, tree=replace(grown.tree, proposal_of=torch.zeros_like(grown.tree.proposal_of)))


def siblings_out_of_order(grown: Grown) -> Grown:
    """The likelier one of two is verified first."""
    tree = grown.tree
    if tree.size < 2:
        return grown
    assert tree.proposals is not None and tree.proposal_of is not None
    first = float(tree.proposals[0, 0, tree.tokens[0, 0]])
    second = float(tree.proposals[0, 0, tree.tokens[0, 1].clamp(min=0)])
    order = torch.tensor([[0, 1] if first > second else [1, 0]])
    changed = replace(tree, tokens=tree.tokens.gather(1, order), proposal_of=tree.proposal_of.gather(1, order))
    return replace(grown, tree=changed)


def dropped_duplicates(grown: Grown) -> Grown:
    return replace(grown, tree=replace(grown.tree, repeats=None))


@pytest.mark.parametrize(
    ("change", "scheme"),
    [
        (forgotten_proposal, "one"),
        (forgotten_proposal, "two, replaced"),
        (siblings_out_of_order, "one"),
        (siblings_out_of_order, "two"),
        (dropped_duplicates, "one, replaced"),
        (dropped_duplicates, "two, replaced"),
    ],
)
def test_the_replay_sees(change: Change, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grow = token_tree.grow_shape
    monkeypatch.setattr(token_tree, "grow_shape", lambda *arguments: change(grow(*arguments)))
    assert tree_distance(FLAT[scheme], "plain", 1, 3) > 1e-3


class KnownLaw:
    """A source with one law."""

    own_ids = None
    pending = 1

    def __init__(self, law: Tensor):
        self.law = law

    def scores(self, context: Any, lines: Any, drafted: Tensor, logits: Tensor) -> Tensor:
        return logits


def measured_acceptance(p: Tensor, laws: list[Tensor], count: int, replacement: bool) -> float:
    """The probability that one of some children is accepted, over all that can be drawn."""
    shape = branching_shape([count], count, 1)
    config = SpeculativeConfig(tree_nodes=count)

    def run(noise: ReplayNoise) -> float:
        context = SimpleNamespace(
            rows=[0], device=p.device, noise=noise, config=config, weighs_proposals=True,
            sequences=SimpleNamespace(generated=lambda row: 0),
        )  # fmt: skip
        sources: Any = [KnownLaw(law) for law in laws]
        tree = grow_shape(sources, context, [law.log()[None] for law in laws], shape, replacement).tree  # type: ignore[arg-type]
        tree.check(1, len(p), takes_trees=True)
        probability = verify._acceptances(tree, p.expand(1, tree.size + 1, -1).clone(), carry=True)
        return 1.0 - float(verify._end_law(probability.numpy(), tree.parents.numpy(), carry=True)[0, 0])

    return sum(probability * float(accepted) for probability, accepted in branches(run))  # type: ignore[arg-type]


def enumerated_acceptance(p: Tensor, laws: list[Tensor], count: int, replacement: bool) -> float:
    """The same by the definition of multi-step speculative sampling, one child after another."""

    def step(owed: Tensor, laws: list[Tensor], left: int) -> float:
        q = laws[0] / laws[0].sum()
        if not left or not bool(laws[0].sum() > 0):
            return 0.0
        rest = (owed - q).clamp(min=0)
        total = 0.0
        for token in q.nonzero().flatten().tolist():
            accepted = min(1.0, float(owed[token] / q[token]))
            total += float(q[token]) * accepted
            if accepted < 1.0:
                others = [law.clone() for law in (*laws[1:], laws[0])]
                for law in others:
                    law[token] = law[token] if replacement else 0.0
                total += float(q[token]) * (1 - accepted) * step(rest / rest.sum(), others, left - 1)
        return total

    return step(p, laws, count)


@pytest.mark.parametrize("how_many", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_acceptance_is_what_theory_says(count: int, how_many: int) -> None:
    generator = torch.Generator().manual_seed(3)
    p, *laws = torch.rand(1 + how_many, 4, generator=generator, dtype=torch.double).pow(2).clamp(min=1e-3)
    p, laws = p / p.sum(), [law / law.sum() for law in laws]
    reached = {}
    for replacement in (True, False):
        reached[replacement] = measured_acceptance(p, laws, count, replacement)
        assert reached[replacement] == pytest.approx(enumerated_acceptance(p, laws, count, replacement), abs=1e-12)
    assert reached[False] >= reached[True] - 1e-12
    assert reached[False] < 1 - 1e-3 or count == 4


@pytest.mark.parametrize("replacement", [False, True])
def test_monte_carlo(replacement: bool) -> None:
    arguments: dict[str, Any] = {"top_k": 0} if replacement else WARPED
    target, draft = models()
    drafter = load_drafter([draft, perturbed(target, 0.3, seed=7)], target, branches=(3, 2, 1), replacement=replacement)
    specheads.enable(target, drafter=drafter)
    drawn = sample(target, None, {"draft_tokens": 3, "tree_nodes": 10}, 5, 8000, **arguments)
    assert p_value(drawn, expected_law(target, 3, **arguments)) > THRESHOLD


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "opt"])
def test_greedy_text_is_plain(family: str) -> None:
    target = specheads.enable(tiny(family))
    drafts = [perturbed(target, 0.05), perturbed(target, 0.05, seed=3)]
    single = {name: value[:1] for name, value in prompt(family, 4).items()}
    accepted = 0
    for inputs in (single, prompt(family, 4)):
        plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        for options, adaptive in (({}, False), ({}, True), ({"branches": (2, 2, 1)}, False)):
            specheads.enable(target, drafter=load_drafter(drafts, target, **options))
            out = target.generate(
                **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True,
                speculative={"draft_tokens": 4, "tree_nodes": 9, "adaptive": adaptive},
            )  # fmt: skip
            assert torch.equal(out.sequences, plain), (options, adaptive)
            accepted += out.speculation.num_accepted_draft_tokens
    assert accepted


def test_the_best_shape() -> None:
    """Against every tree of four nodes in three levels, and where one rank only is ever accepted."""
    rates = [0.5, 0.3, 0.1]

    def values(nodes: int, depth: int, rank: int) -> list[float]:
        """What each forest of children from `rank` on is worth."""
        if not nodes or not depth or rank == len(rates):
            return [0.0]
        return [0.0] + [
            rates[rank] * (1 + below) + beside
            for size in range(1, nodes + 1)
            for below in values(size - 1, depth - 1, 0)
            for beside in values(nodes - size, depth, rank + 1)
        ]

    assert expected_acceptance(rates, 4, 3) == pytest.approx(max(values(4, 3, 0)))
    assert best_shape([0.9, 0.0], 3, 5) == branching_shape([1, 1, 1], 3, 3)
    assert best_shape([0.4, 0.39, 0.38], 3, 5) == branching_shape([3], 3, 1)
    assert [len(level) for level in branching_shape([2, 2], 5, 4)] == [2, 3]
    measured = MeasuredShape()
    for _ in range(50):
        measured.observe([3, 4, 5], [0, 0, 1], [2])  # the root's second child, always
    assert measured.rates[1] > 0.9 > 0.1 > measured.rates[0]


def test_what_is_wrong_is_said() -> None:
    target, draft = target_and_draft()
    with pytest.raises(ValueError, match="at least one, got an empty list"):
        load_drafter([], target)
    with pytest.raises(TypeError, match="has a str"):
        load_drafter(["suffix"], target)
    with pytest.raises(ValueError, match="`branches` must be counts"):
        load_drafter([draft], target, branches=(2, 0))
    with pytest.raises(ValueError, match=r"T5.* takes chains and no trees"):
        load_drafter([tiny("t5")], tiny("t5"))
    with pytest.raises(ValueError, match="`tree_nodes` is None"):
        specheads.enable(target, drafter=[draft])
    specheads.enable(target, drafter=load_drafter([draft], target))
    target.register_forward_pre_hook(lambda *_: pytest.fail("It should be refused before anything is computed."))
    with pytest.raises(ValueError, match="`tree_nodes` is None"):
        target.generate(torch.tensor([[1, 0]]), max_new_tokens=4, speculative=True)
