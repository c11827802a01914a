"""What the training-free drafters draft, and that they keep to their contract."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import EosTokenCriteria, LogitsProcessorList, StoppingCriteriaList

from specheads.config import SpeculativeConfig
from specheads.drafters.base import Accepted, Budget, DraftContext, Drafter, drafter_by_name
from specheads.drafters.best_first import CERTAIN, Candidate, Draft, Reliance, grow, paying_width, tree_of
from specheads.drafters.known_text import known_segments
from specheads.drafters.recycling import (
    RANK_PROBABILITIES,
    AdjacencyMatrix,
    CandidateTable,
    bigrams,
    node_depths,
    static_tree,
)
from specheads.drafters.suffix import NOVELTY, continuations
from specheads.drafters.suffix_automaton import index_of
from specheads.processors import ScoreProcessors
from specheads.sequences import Sequences
from specheads.tree import NO_TOKEN, DraftTree

NAMES = ("lookup", "suffix", "recycling", "auto")
VOCAB, END, PAD = 12, 1, 0
CPU = torch.device("cpu")


def context_for(
    prompts: list[list[int]],
    takes_trees: bool = True,
    vocab_size: int = VOCAB,
    encoder: tuple[list[list[int]], list[list[int]]] | None = None,
) -> DraftContext:
    """A call about to draft, left padding included."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    sequences = Sequences(ids, StoppingCriteriaList([EosTokenCriteria(END)]), width + 200, torch.tensor(PAD))
    return DraftContext(
        rows=list(range(len(prompts))),
        sequences=sequences,
        prompts=[list(prompt) for prompt in prompts],
        encoder_ids=torch.tensor(encoder[0]) if encoder else None,
        encoder_mask=torch.tensor(encoder[1]) if encoder else None,
        processors=ScoreProcessors(LogitsProcessorList(), sequences),
        noise=None,
        config=SpeculativeConfig(),
        vocab_size=vocab_size,
        device=CPU,
        takes_trees=takes_trees,
        positions_left=None,
        weighs_proposals=False,
    )


def begun(name: str, context: DraftContext) -> Drafter:
    drafter = drafter_by_name(name)
    drafter.begin(context)
    return drafter


def settle(
    drafter: Drafter,
    context: DraftContext,
    tokens: list[list[int]],
    tree: DraftTree | None = None,
    paths: list[list[int]] | None = None,
    logits: Tensor | None = None,
) -> None:
    """Ends a round that kept these tokens."""
    tree = tree or DraftTree.empty(len(tokens), CPU)
    paths = paths or [[] for _ in tokens]
    if logits is None:
        logits = torch.rand(len(tokens), tree.size + 1, context.vocab_size, generator=torch.Generator().manual_seed(tree.size))
    context.sequences.append(context.rows, tokens, in_step=False)
    drafter.commit(context, Accepted(tree, paths, tokens, logits))


def paths_of(tree: DraftTree, line: int = 0) -> set[tuple[int, ...]]:
    """Each node as its path's tokens."""
    tokens, parents = tree.tokens[line].tolist(), tree.parents[line].tolist()
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    return {path for path, token in zip(paths[1:], tokens, strict=True) if token != NO_TOKEN}


def chain_of(tree: DraftTree, line: int = 0) -> list[int]:
    assert tree.is_chain
    return [token for token in tree.tokens[line].tolist() if token != NO_TOKEN]


def followed(tree: DraftTree, line: int, truth: list[int]) -> list[int]:
    """The nodes along the target's tokens."""
    path: list[int] = []
    tokens, parents = tree.tokens[line].tolist(), tree.parents[line].tolist()
    for wanted in truth:
        here = path[-1] if path else 0
        below = [node for node, parent in enumerate(parents, 1) if parent == here and tokens[node - 1] == wanted]
        if not below:
            break
        path += below
    return path


def play(drafter: Drafter, context: DraftContext, answers: list[list[int]], budget: Budget) -> list[DraftTree]:
    """Rounds of greedy decoding with a target that says these answers, until one of them is complete."""
    drafter.begin(context)
    rounds = []
    said = [0] * len(answers)
    tree, paths = DraftTree.empty(len(answers), CPU), [[] for _ in answers]
    while True:
        logits = torch.rand(len(answers), tree.size + 1, VOCAB, generator=torch.Generator().manual_seed(len(rounds)))
        tokens = []
        for line, answer in enumerate(answers):
            kept = answer[said[line] : said[line] + len(paths[line]) + 1]
            for node, token in zip([0, *paths[line]], kept, strict=True):
                logits[line, node, token] += 1
            tokens.append(kept)
            said[line] += len(kept)
        settle(drafter, context, tokens, tree, paths, logits)
        if any(done == len(answer) for done, answer in zip(said, answers, strict=True)):
            return rounds
        tree = drafter.propose(context, budget)
        rounds.append(tree)
        paths = [followed(tree, line, answer[said[line] : -1]) for line, answer in enumerate(answers)]


def check_contract(tree: DraftTree, budget: Budget, takes_trees: bool) -> None:
    assert not tree.has_proposals
    assert tree.is_chain or takes_trees
    assert tree.size <= budget.nodes
    assert tree.tokens.shape == tree.parents.shape == (len(budget.depths), tree.size)
    deepest = 0
    for line, most in enumerate(budget.depths):
        tokens, parents = tree.tokens[line].tolist(), tree.parents[line].tolist()
        depths = [0, *node_depths(parents)]
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
            assert 0 <= parent < node
            if token == NO_TOKEN:
                continue
            assert 0 <= token < VOCAB
            assert depths[node] <= most
            assert parent == 0 or tokens[parent - 1] not in (NO_TOKEN, END)
            deepest = max(deepest, depths[node])
        assert len(paths_of(tree, line)) == sum(token != NO_TOKEN for token in tokens), "siblings differ"
    assert tree.depth == deepest


TOKENS = st.integers(1, 5)  # the end token is among them
TEXTS = st.lists(st.lists(TOKENS, min_size=2, max_size=20), min_size=2, max_size=2)
BUDGETS = st.builds(Budget, st.lists(st.integers(0, 5), min_size=2, max_size=2), st.integers(1, 12))


def going_on(texts: list[list[int]]) -> list[list[int]]:
    """Answers, whose last token alone may end a row."""
    return [[token if token != END else 2 for token in text[:-1]] + text[-1:] for text in texts]


@pytest.mark.parametrize("takes_trees", [True, False])
@pytest.mark.parametrize("name", NAMES)
@given(prompts=TEXTS, texts=TEXTS, budget=BUDGETS)
def test_drafts_keep_to_the_contract(name, takes_trees, prompts, texts, budget):
    context = context_for(prompts, takes_trees)
    for tree in play(drafter_by_name(name), context, going_on(texts), budget):
        check_contract(tree, budget, takes_trees)


@pytest.mark.parametrize("name", NAMES)
@given(prompts=TEXTS, texts=TEXTS)
def test_an_earlier_call_leaves_no_trace(name, prompts, texts):
    drafter, budget, answers = drafter_by_name(name), Budget([4, 4], 8), going_on(texts)
    rounds = [play(drafter, context_for(prompts), answers, budget) for _ in range(2)]
    fresh = play(drafter_by_name(name), context_for(prompts), answers, budget)
    for one, other in zip(rounds[0] + rounds[1], fresh + fresh, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.parents, other.parents)


@pytest.mark.parametrize("name", ["lookup", "suffix"])
@given(prompts=TEXTS, nodes=st.sampled_from([4, 10]))
def test_lines_do_not_meet(name, prompts, nodes):
    """The recycling matrix is shared, but what a row has said is its own."""
    together = begun(name, context := context_for(prompts)).propose(context, Budget([4, 4], nodes))
    for line, prompt in enumerate(prompts):
        alone = begun(name, context := context_for([prompt])).propose(context, Budget([4], nodes))
        assert paths_of(together, line) == paths_of(alone)


@pytest.mark.parametrize("nodes", [4, 10])
@pytest.mark.parametrize("name", NAMES)
def test_lines_that_go_on(name, nodes):
    context = context_for([[2, 3, 4, 5, 2], [6, 7, 8, 9, 6, 7], [10, 11, 3, 10]])
    drafter = begun(name, context)
    settle(drafter, context, [[3], [8], [11]])
    before = drafter.propose(context, Budget([4, 4, 4], nodes))
    context.rows[:] = [2, 1]
    drafter.keep_rows([2, 1])
    after = drafter.propose(context, Budget([4, 4], nodes))
    assert paths_of(after, 0) == paths_of(before, 2) != set()
    assert paths_of(after, 1) == paths_of(before, 1) != set()
    settle(drafter, context, [[3, 10], [9, 6]])
    last = drafter.propose(context, Budget([1, 1], nodes))
    assert (11,) in paths_of(last, 0)
    assert (7,) in paths_of(last, 1)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_drafted_after_a_new_token(name):
    context = context_for([[2, 3, 2, 3, 9]])
    tree = begun(name, context).propose(context, Budget([4], 8))
    assert paths_of(tree) == set()
    assert tree.depth == 0


@pytest.mark.parametrize("takes_trees", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_end_is_drafted_and_nothing_after_it(name, takes_trees):
    context = context_for([[2, 3, END, 4, 2, 3, END, 4, 2]], takes_trees)
    tree = begun(name, context).propose(context, Budget([5], 9))
    assert (3, END) in paths_of(tree)
    assert all(END not in path[:-1] for path in paths_of(tree))


@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_the_target_cannot_say_are_borders(name):
    context = context_for([[2, VOCAB, 3, 4, VOCAB + 5, 3]])
    drafter = begun(name, context)
    assert paths_of(drafter.propose(context, Budget([4], 8))) >= {(4,)}
    assert all(path[0] == 4 for path in paths_of(drafter.propose(context, Budget([4], 8))))


def test_a_prompt_that_ends_in_a_token_of_its_own():
    for name in NAMES:
        context = context_for([[2, 3, 4, VOCAB + 1]])
        drafter = begun(name, context)
        settle(drafter, context, [[2]])
        assert (3, 4) in paths_of(drafter.propose(context, Budget([2], 8)))


ENCODER = ([[5, 6, 7, PAD, PAD], [8, 9, 8, 10, 11]], [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize("name", NAMES)
def test_the_encoder_input_is_copied_from(name):
    context = context_for([[PAD], [PAD]], takes_trees=False, encoder=ENCODER)
    drafter = begun(name, context)
    settle(drafter, context, [[5], [10]])
    tree = drafter.propose(context, Budget([4, 4], 4))
    assert chain_of(tree, 0) == [6, 7]
    assert chain_of(tree, 1) == [11]


def test_known_text_is_masked_and_cut():
    context = context_for([[2, VOCAB, 3], [4, 5]], encoder=ENCODER)
    assert known_segments(context, 0) == [[5, 6, 7], [2], [3]]
    assert known_segments(context, 1) == [[8, 9, 8, 10, 11], [4, 5]]
    context.rows[:] = [1]
    assert known_segments(context, 0) == [[8, 9, 8, 10, 11], [4, 5]]
    context = context_for([[2, VOCAB]])
    assert known_segments(context, 0) == [[2], []]


@pytest.mark.parametrize("name", ["lookup", "suffix"])
def test_no_match_reaches_across_a_border(name):
    """The encoder's input ends in 2, 3 and the prompt begins with 4: that 4 did not follow."""
    context = context_for([[4, 9, 3, 5, 2, 3]], takes_trees=False, encoder=([[2, 3]], [[1, 1]]))
    tree = begun(name, context).propose(context, Budget([1], 1))
    assert chain_of(tree) == [5]


@pytest.mark.parametrize("name", ["lookup", "suffix", "auto"])
def test_a_repetition_goes_on(name):
    context = context_for([[2, 3, 4, 2, 3, 4, 2]], takes_trees=False)
    assert chain_of(begun(name, context).propose(context, Budget([5], 5))) == [3, 4, 2, 3, 4]


@pytest.mark.parametrize("name", ["lookup", "suffix", "auto"])
def test_the_longer_match_counts(name):
    """After 3 came 5 most often and last, but after 2, 3 came 4."""
    context = context_for([[2, 3, 4, 8, 3, 5, 9, 3, 5, 2, 3]], takes_trees=False)
    assert chain_of(begun(name, context).propose(context, Budget([1], 1))) == [4]


@pytest.mark.parametrize(("text", "by_count", "by_time"), [([3, 4, 3, 4, 3, 5, 3], 4, 5), ([3, 5, 8, 3, 4, 9, 3], 4, 4)])
def test_frequent_then_recent(text, by_count, by_time):
    for name, expected in (("suffix", by_count), ("lookup", by_time)):
        context = context_for([[*text[:-1], 10, 3]], takes_trees=False)
        assert chain_of(begun(name, context).propose(context, Budget([1], 1))) == [expected]


def test_a_suffix_tree_branches_where_the_text_did():
    context = context_for([[2, 3, 4, 5, 8, 2, 3, 6, 7, 9, 2, 3]])
    tree = begun("suffix", context).propose(context, Budget([2], 4))
    assert paths_of(tree) == {(4,), (4, 5), (6,), (6, 7)}


def test_suffixes_share_out_probability():
    """The longest suffix, 2 3, was followed by 4 only; 3 alone twice by 4, and once by 6 and 7."""
    automaton = index_of([[2, 3, 4, 8, 3, 6, 9, 3, 7, 2, 3]])
    after = Candidate(1.0, 3, automaton.match, automaton.match_length)
    found, left = continuations(automaton, after)
    novel = NOVELTY * 1 / 2
    assert found[0][:2] == (pytest.approx(1 / (1 + novel)), 4)
    share = novel / (1 + novel)
    # What the longer one has told counts no more: two continuations are left to the shorter one, the more recent one first.
    assert found[1][:2] == (pytest.approx(share / (2 + NOVELTY * 2)), 7)
    assert found[2][:2] == (pytest.approx(share / (2 + NOVELTY * 2)), 6)
    assert left == pytest.approx(1 - sum(candidate.probability for candidate in found))
    assert [candidate.length for candidate in found] == [3, 2, 2]


def test_as_many_nodes_as_depth_are_a_chain():
    context = context_for([[2, 3, 4, 5, 8, 2, 3, 6, 7, 9, 2, 3]])
    assert chain_of(begun("suffix", context).propose(context, Budget([3], 3))) == [6, 7, 9]


def ranked(*best: int) -> Tensor:
    """Logits `[V]` whose most probable tokens are these."""
    logits = torch.zeros(VOCAB)
    logits[list(best)] = torch.arange(len(best), 0, -1).float()
    return logits


@pytest.mark.parametrize("name", ["recycling", "auto"])
def test_candidates_come_back(name):
    context = context_for([[2]])
    drafter = begun(name, context)
    settle(drafter, context, [[3]], logits=ranked(3, 4, 5).view(1, 1, -1))
    settle(drafter, context, [[2]], logits=ranked(2, 6, 7).view(1, 1, -1))
    tree = drafter.propose(context, Budget([2], 12))
    assert {(3,), (4,), (5,), (3, 2), (3, 6)} <= paths_of(tree)
    context.takes_trees = False
    assert chain_of(drafter.propose(context, Budget([3], 3))) == [3, 2, 3]


@pytest.mark.parametrize("name", ["recycling", "auto"])
def test_kept_nodes_have_the_last_word(name):
    """The root's token 3, and 4 on the kept path, are also on rejected nodes that come later in the tree."""
    context = context_for([[3]], takes_trees=False)
    drafter = begun(name, context)
    tree = DraftTree.from_rows([([4, 5, 4, 3], [0, 0, 2, 3])], CPU)
    logits = torch.stack([ranked(4), ranked(6, 8), ranked(7), ranked(9, 10), ranked(11)]).unsqueeze(0)
    settle(drafter, context, [[4, 6]], tree, [[1]], logits)
    settle(drafter, context, [[3]])
    assert chain_of(drafter.propose(context, Budget([1], 1))) == [4]
    settle(drafter, context, [[4]])
    assert chain_of(drafter.propose(context, Budget([1], 1))) == [6]
    settle(drafter, context, [[5]])
    assert chain_of(drafter.propose(context, Budget([1], 1))) == [7], "rejected nodes are learnt from, too"


def test_rows_share_candidates():
    context = context_for([[2], [3]], takes_trees=False)
    drafter = begun("recycling", context)
    settle(drafter, context, [[5], [2]], logits=torch.stack([ranked(6), ranked(7)]).unsqueeze(1))
    tree = drafter.propose(context, Budget([1, 1], 1))
    assert chain_of(tree, 0) == []
    assert chain_of(tree, 1) == [6]


def test_auto_drafts_copies_and_candidates():
    """A candidate gets its share of what a match of two tokens leaves open, which is less than the copy's."""
    context = context_for([[9, 2, 3, 4, 8, 5]])
    drafter = begun("auto", context)
    tree = DraftTree.from_rows([([3], [0])], CPU)
    settle(drafter, context, [[2]], tree, [[]], torch.stack([ranked(2), ranked(11, 10)]).unsqueeze(0))
    settle(drafter, context, [[3]])
    assert {(4,), (4, 8), (11,), (10,)} <= paths_of(drafter.propose(context, Budget([2], 12)))
    context.takes_trees = False
    assert chain_of(drafter.propose(context, Budget([2], 2))) == [4, 8]


@st.composite
def observations(draw):
    """Tokens and candidates, each list of them without repeats."""
    width = len(RANK_PROBABILITIES)
    tokens = draw(st.lists(st.integers(NO_TOKEN, VOCAB - 1), min_size=1, max_size=10))
    return tokens, [draw(st.permutations(range(VOCAB)))[:width] for _ in tokens]


@given(st.lists(observations(), min_size=1, max_size=4))
def test_the_matrix_and_the_table_mix_as_said(rounds):
    width = len(RANK_PROBABILITIES)
    matrix, table = AdjacencyMatrix(VOCAB, {END}, CPU), CandidateTable({}, {END})
    expected: dict[int, list[int]] = {}
    for tokens, candidates in rounds:
        matrix.learn(torch.tensor(tokens), torch.tensor(candidates))
        table.learn([[token, *own] for token, own in zip(tokens, candidates, strict=True)])
        for token, new in dict(zip(tokens, candidates, strict=True)).items():
            old = expected.get(token, [])
            mixed = [item for pair in zip(new, old, strict=False) for item in pair] + new[len(old) :]
            if token not in (END, NO_TOKEN):
                expected[token] = list(dict.fromkeys(mixed))[:width]
    in_matrix = [[candidate for candidate in row if candidate != NO_TOKEN] for row in matrix.rows.tolist()]
    assert {token: row for token, row in enumerate(in_matrix) if row} == expected
    assert {token: table.after(token) for token in range(NO_TOKEN, VOCAB) if table.after(token)} == expected


def test_bigrams_the_most_recent_first():
    assert bigrams([[1, 2, 1, 3, 1, 2], [4, 1, 5]]) == {1: [5, 2, 3], 2: [1], 3: [1], 4: [1]}


@given(st.integers(1, 8), st.integers(1, 30), st.integers(1, 6))
def test_a_static_tree_has_the_most_probable_nodes(width, nodes, depth):
    ranks, parents = static_tree(width, nodes, depth, single_path=False)
    depths = node_depths(parents)
    assert depths == sorted(depths)
    assert max(depths) <= depth
    values = [1.0]
    for rank, parent in zip(ranks, parents, strict=True):
        values.append(values[parent] * RANK_PROBABILITIES[rank])
    assert len({*zip(ranks, parents, strict=True)}) == len(ranks) <= nodes
    if len(ranks) == nodes:
        left_out = [
            value * probability
            for node, value in enumerate(values)
            for rank, probability in enumerate(RANK_PROBABILITIES[:width])
            if (rank, node) not in zip(ranks, parents, strict=True) and [0, *depths][node] < depth
        ]
        assert max(left_out, default=0.0) <= min(values) * (1 + 1e-12)


def test_growth_takes_the_best_products():
    laws = {0: [(0.6, 1), (0.3, 2)], 1: [(0.4, 3)], 2: [(0.9, 4)], 3: [], 4: []}

    def children(after: Candidate) -> list[Candidate]:
        return [Candidate(probability, token) for probability, token in laws[after.token]]

    root = Candidate(1.0, 0)
    # In order of 0.6, 0.3, 0.27, 0.24.
    assert grow(root, children, 4, 5, set(), single_path=False)[:2] == ([1, 2, 4, 3], [0, 0, 2, 1])
    assert grow(root, children, 3, 5, set(), single_path=False)[:2] == ([1, 2, 4], [0, 0, 2])
    assert grow(root, children, 4, 1, set(), single_path=False)[:2] == ([1, 2], [0, 0])
    assert grow(root, children, 4, 5, {2}, single_path=False)[:2] == ([1, 2, 3], [0, 0, 1])
    assert grow(root, children, 4, 5, {0}, single_path=True)[:2] == ([1, 3], [0, 1]), "a root may be an end token"


def test_a_draft_is_as_wide_as_pays_for_the_rows_together():
    drafts = [Draft([1, 2, 3], [0, 1, 2], [0.9, 0.8, 0.1]), Draft([4], [0], [0.5]), Draft([], [], [])]
    even = [1 / 3] * 3
    assert paying_width(drafts, Budget([3] * 3, 3, 0.0, 0.3), even) == 1
    assert paying_width(drafts, Budget([3] * 3, 3, 0.0, 0.2), even) == 2
    assert paying_width(drafts, Budget([3] * 3, 3, 0.0, 0.01), even) == 3
    assert paying_width(drafts, Budget([3] * 3, 3, 0.4, 0.2), even) == 0, "0.47 and 0.27 do not pay for 0.6 and 0.2"
    assert paying_width(drafts, Budget([3] * 3, 3, 0.0, 0.3), [0.0, 0.5, 0.5]) == 0, "the row that gains is ahead"
    assert paying_width(drafts, Budget([3] * 3, 3, 0.0, 0.3), [1.0, 0.0, 0.0]) == 2


def test_rows_are_cut_to_the_width_that_pays():
    context = context_for([[2], [3]])
    drafts = [Draft([4, 5, 6], [0, 1, 0], [0.9, 0.8, 0.1]), Draft([7, 8], [0, 1], [0.9, 0.7])]
    tree = tree_of(drafts, Budget([3, 3], 3, 0.0, 0.2), context)
    assert (paths_of(tree, 0), paths_of(tree, 1)) == ({(4,), (4, 5)}, {(7,), (7, 8)})
    assert tree.expected == pytest.approx(0.9 + 0.8 + 0.9 + 0.7)
    assert tree_of(drafts, Budget([3, 3], 3, 2.0, 0.2), context).size == 0


def test_reliance_follows_what_comes():
    reliance = Reliance(2)
    assert reliance.applied(0, 0.6) == 0.6
    for _ in range(40):
        reliance.observe([0.5, 0.4], 1)
    assert reliance.applied(0, 0.5) < 0.1
    assert reliance.applied(1, 0.4) > 0.7
    assert reliance.applied(1, 0.9) == CERTAIN
    before = list(reliance.factors)
    reliance.observe([0.0, 0.0], None)
    assert reliance.factors == before, "what promised nothing shows nothing"
    for _ in range(30):
        reliance.observe([0.5, 0.0], 0)
    assert reliance.applied(0, 0.5) > 0.6, "it comes back"


@pytest.mark.parametrize("name", ["suffix", "auto"])
def test_what_was_not_drafted_is_learnt_from_all_the_same(name):
    """Copies that pay by their frequencies are left out once the text has stopped to repeat itself, and come back."""
    period = [2, 3, 4, 5]
    context = context_for([period * 3])
    drafter = begun(name, context)
    budget = Budget([4], 4, 0.2, 0.2)
    assert drafter.propose(context, budget).size == 4
    said = torch.randint(2, 11, (60,), generator=torch.Generator().manual_seed(0))
    for token in said.tolist():  # one at a time, as without drafts
        settle(drafter, context, [[token]], logits=ranked(11).view(1, 1, -1))
    sizes = []
    for token in period * 5:
        sizes.append(drafter.propose(context, budget).size)
        settle(drafter, context, [[token]], logits=ranked(token).view(1, 1, -1))
    assert sizes[0] == 0
    assert sizes[-1] == 4
