"""Lengths worked out from a text are those that `generate` had when it wrote it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specheads
from specheads.heads import DraftHead
from specheads.training import Deployment, Evaluation, Sampling, TrainingBatch

from ..tiny import tiny, with_head
from .tools import DEPTH, batch_of, new_head, packed, random_texts, training_of

END, PROMPT, NEW = 2, 4, 24
GREEDY = Deployment(Sampling(temperature=0))


def setting(name: str, spread: float, steps: int = 0) -> tuple[Any, DraftHead]:
    """A target that drafts with a head whose drafts are now accepted and now rejected."""
    target = specheads.enable(tiny("llama", spread=spread, eos_token_id=None), drafter="none")
    head = new_head(target, name, spread=None)
    batch, _, _ = written(target, 24, do_sample=False)
    training = training_of(head, target)
    optimiser = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        output = training(batch)
        (output.loss_sum / output.trained).backward()
        optimiser.step()
    return with_head(target, head), head


def written(target: Any, rows: int, end: int | None = None, **settings: Any) -> tuple[TrainingBatch, list[int], list[int]]:
    """Texts that the target wrote with its drafter; and for each how many tokens and rounds there were."""
    ids = torch.randint(3, 32, (rows, PROMPT), generator=torch.Generator().manual_seed(2))
    speculative = {"adaptive": False, "draft_tokens": DEPTH, "seed": 0, **settings.pop("speculative", {})}
    out = target.generate(
        ids, max_new_tokens=NEW, pad_token_id=0, eos_token_id=end, return_dict_in_generate=True, speculative=speculative,
        **settings,
    )  # fmt: skip
    tokens = [row.num_emitted_tokens for row in out.speculation.rows]
    texts = [row[: PROMPT + count].tolist() for row, count in zip(out.sequences, tokens, strict=True)]
    assert end is None or any(text[-1] == end for text in texts)
    return batch_of(texts, [PROMPT] * rows), tokens, [row.num_spec_steps for row in out.speculation.rows]


def evaluated(target: Any, head: DraftHead, batch: TrainingBatch, deployment: Deployment, **settings: Any) -> Evaluation:
    evaluation = Evaluation(DEPTH, {"": deployment})
    training_of(head, target, **settings).evaluate(batch, evaluation)
    return evaluation


@pytest.mark.parametrize("name", ["medusa", "medusa, hydra", "eagle 1", "eagle 3", "eagle 3, own vocabulary"])
def test_greedy_rounds_are_known_one_by_one(name: str) -> None:
    target, head = setting(name, spread=0.3, steps=25)
    batch, tokens, rounds = written(target, 24, end=END, do_sample=False)
    assert sum(rounds) < 0.9 * sum(tokens)
    sums = evaluated(target, head, batch, GREEDY, chunk_roots=7).sums[""]
    # Replies of a single token have no draft, and say nothing.
    expected = [[float(count), float(turns)] for count, turns in zip(tokens, rounds, strict=True) if count > 1]
    assert sums.replies == expected
    assert sums.mean_acceptance_length == pytest.approx(sum(map(lambda r: r[0], expected)) / sum(r[1] for r in expected))


SAMPLED: dict[str, tuple[Deployment, dict[str, Any]]] = {
    "block": (Deployment(), {}),
    "token": (Deployment(verification="token"), {"speculative": {"verification": "token"}}),
    "match": (Deployment(verification="match"), {"speculative": {"verification": "match"}}),
    "greedy drafts": (Deployment(draft_temperature=0), {"speculative": {"draft_temperature": 0}}),
    "hot drafts": (Deployment(draft_temperature=1.5), {"speculative": {"draft_temperature": 1.5}}),
    "warped": (Deployment(Sampling(0.7, 12, 0.9)), {"temperature": 0.7, "top_k": 12, "top_p": 0.9}),
}


def deviation(name: str, case: str, deployment: Deployment | None = None) -> tuple[float, float]:
    """How far the rounds of a call are from what is expected: in standard deviations, and as a share."""
    target, head = setting(name, spread=0.15)
    own, arguments = SAMPLED[case]
    batch, tokens, rounds = written(target, 192, **{"do_sample": True, "top_k": 0, **arguments})
    sums = evaluated(target, head, batch, deployment or own).sums[""]
    assert [reply[0] for reply in sums.replies] == tokens
    differences = torch.tensor([turns - reply[1] for turns, reply in zip(rounds, sums.replies, strict=True)])
    # With greedy drafts the text alone decides, and there is no difference at all.
    return float(differences.sum() / differences.norm().clamp(min=1e-9)), float(differences.sum()) / sum(rounds)


@pytest.mark.parametrize("case", SAMPLED)
@pytest.mark.parametrize("name", ["medusa", "eagle 3"])
def test_sampled_rounds_are_as_many_as_expected(name: str, case: str) -> None:
    deviations, share = deviation(name, case)
    assert abs(deviations) < 3.5
    assert abs(share) < 0.03


@pytest.mark.parametrize(
    ("case", "wrong"), [("token", Deployment(verification="match")), ("match", Deployment()), ("greedy drafts", Deployment())]
)
def test_another_verification_has_other_rounds(case: str, wrong: Deployment) -> None:
    assert abs(deviation("medusa", case, wrong)[0]) > 5


def test_block_verification_never_accepts_less() -> None:
    target, head = setting("medusa", spread=0.15)
    batch, _, _ = written(target, 64, do_sample=True, top_k=0)
    block, token = (evaluated(target, head, batch, Deployment(verification=own)).sums[""] for own in ("block", "token"))
    assert block.mean_acceptance_length > token.mean_acceptance_length
    assert block.expected_length > token.expected_length


@torch.no_grad()
def test_the_expected_length_is_the_mean_over_the_laws() -> None:
    """Over all texts, each as often as the target writes it, against the sum over all drafts: Σ q(x) min(1, p/q) α(x)."""
    target = tiny("llama", 8, spread=0.3)
    head = new_head(target, "medusa", num_heads=2, spread=0.15)
    prompt, vocabulary = [5, 6, 4, 3], range(8)
    states = target(torch.tensor([prompt]), output_hidden_states=True)
    first = states.logits[0, -1].softmax(-1)
    after = target(torch.tensor([[*prompt, token] for token in vocabulary])).logits[:, -1].softmax(-1)
    q = [head.head(index, states.hidden_states[-1][0, -2])[0].softmax(-1) for index in range(2)]
    exact = sum(
        float(q[0][token] * min(1, first[token] / q[0][token]) * torch.minimum(after[token], q[1]).sum())
        for token in vocabulary
    )
    measured, training = 0.0, training_of(head, target, depth=2)
    for one in vocabulary:
        for two in vocabulary:
            batch = batch_of([[*prompt, one, two]], [len(prompt) - 1])
            evaluation = Evaluation(2, {"": Deployment(verification="token")})
            training.evaluate(batch, evaluation)
            # Of the text's roots only the prompt's last token has two tokens after it.
            measured += float(first[one] * after[one, two]) * float(evaluation.sums[""].values[3, 1])
    assert measured == pytest.approx(exact, rel=1e-6)


def test_the_shares_by_depth() -> None:
    target, head = setting("medusa", spread=0.3)
    batch, _, _ = written(target, 16, do_sample=False)
    evaluation = Evaluation(DEPTH, {"greedy": GREEDY, "sampled": Deployment(verification="token")})
    training = training_of(head, target)
    training.evaluate(batch, evaluation)
    greedy, sampled = evaluation.sums["greedy"], evaluation.sums["sampled"]
    # In greedy text a draft is accepted where the most probable tokens agree.
    assert greedy.acceptance == pytest.approx(evaluation.top_k_agreement(1))
    assert evaluation.top_k_agreement(10)[0] > evaluation.top_k_agreement(2)[0] > evaluation.top_k_agreement(1)[0]
    assert evaluation.rank_accuracies[0][0] == pytest.approx(evaluation.top_k_agreement(1)[0])
    assert sum(evaluation.rank_accuracies[1][:3]) == pytest.approx(evaluation.top_k_agreement(3)[1])
    # Training reports the same, with the roots in the prompt.
    batch.loss_mask[:, PROMPT - 1] = True
    again = Evaluation(DEPTH, {"": Deployment(verification="token")})
    training.evaluate(batch, again)
    sums = training(batch).sums
    batch.loss_mask[:, PROMPT - 1] = False
    assert sampled.acceptance != pytest.approx(again.sums[""].acceptance)
    assert sums.conditional_acceptance[0] == pytest.approx(sums.acceptance[0])
    interval = sampled.interval()
    assert interval.value == pytest.approx(sampled.mean_acceptance_length)
    assert interval.low < interval.value < interval.high


def test_acceptance_by_position_is_that_of_the_rounds() -> None:
    target, head = setting("medusa", spread=0.3)
    ids = torch.randint(3, 32, (48, PROMPT), generator=torch.Generator().manual_seed(2))
    out = target.generate(
        ids, max_new_tokens=2 * NEW, do_sample=False, pad_token_id=0, return_dict_in_generate=True,
        speculative={"adaptive": False, "draft_tokens": DEPTH},
    )  # fmt: skip
    sums = evaluated(target, head, batch_of(out.sequences.tolist(), [PROMPT] * 48), GREEDY).sums[""]
    drafted = out.speculation
    # At the end of a text `generate` drafts one token less than there are.
    assert sums.conditional_acceptance_at_position == pytest.approx(drafted.conditional_acceptance_at_position, abs=0.02)
    assert sums.acceptance_at_position == pytest.approx(drafted.acceptance_at_position, abs=0.02)
    assert abs(sums.conditional_acceptance[0] - drafted.conditional_acceptance_at_position[0]) > 0.1  # over all places


def test_packed_texts_measure_the_same() -> None:
    target, head = setting("eagle 3", spread=0.3)
    texts, prompts = random_texts(5)
    deployment = Deployment(verification="token")
    apart = evaluated(target, head, batch_of(texts, prompts), deployment).sums[""]
    together = evaluated(target, head, packed(texts, prompts), deployment).sums[""]
    torch.testing.assert_close(torch.tensor(apart.replies), torch.tensor(together.replies))
    torch.testing.assert_close(apart.values, together.values)


def test_measurements_add_up() -> None:
    target, head = setting("medusa", spread=0.3)
    texts, prompts = random_texts(5)
    whole = evaluated(target, head, batch_of(texts, prompts), Deployment())
    parts = evaluated(target, head, batch_of(texts[:2], prompts[:2]), Deployment())
    parts.include(evaluated(target, head, batch_of(texts[2:], prompts[2:]), Deployment()))
    assert parts.sums[""].mean_acceptance_length == pytest.approx(whole.sums[""].mean_acceptance_length)
    assert parts.sums[""].conditional_acceptance == pytest.approx(whole.sums[""].conditional_acceptance)
    assert parts.sums[""].acceptance_at_position == pytest.approx(whole.sums[""].acceptance_at_position)
    assert torch.equal(parts.ranks, whole.ranks)


def test_text_that_the_settings_exclude_gives_numbers() -> None:
    target, head = setting("eagle 3, own vocabulary", spread=0.3)
    batch = batch_of(*random_texts(4))
    for verification in ("token", "block", "match"):
        sums = evaluated(target, head, batch, Deployment(Sampling(0.3, 2, 0.5), verification)).sums[""]
        assert bool(sums.values.isfinite().all())
        assert 1 <= sums.mean_acceptance_length <= DEPTH + 1


def test_no_verification_of_that_name() -> None:
    with pytest.raises(ValueError, match="token, block, match, got 'tree'"):
        Deployment(verification="tree")
