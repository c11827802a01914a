"""What `generate` returns of every step: the lengths and values of plain `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import specheads
from specheads.target import SlotRunner

from .exactness.test_greedy import arguments, prompt
from .tiny import perturbed, tiny

FIELDS = ["scores", "logits", "hidden_states", "attentions"]
ALL = {f"output_{name}": True for name in FIELDS}
FAMILIES = ["llama", "gemma3_text", "mistral", "gpt2", "t5"]


def assert_same(own: Any, plain: Any, name: str) -> None:
    """The same nesting, shapes, types and values."""
    if plain is None or own is None:
        assert own is plain, name
    elif isinstance(plain, Tensor):
        assert own.shape == plain.shape and own.dtype == plain.dtype, name
        torch.testing.assert_close(own, plain, atol=1e-5, rtol=1e-4, msg=name)
    else:
        assert len(own) == len(plain), name
        for index, (ours, theirs) in enumerate(zip(own, plain, strict=True)):
            assert_same(ours, theirs, f"{name}[{index}]")


def compare(out: Any, plain: Any) -> None:
    assert torch.equal(out.sequences, plain.sequences)
    for name, value in plain.items():
        if name not in ("sequences", "cache", "past_key_values"):
            assert_same(out[name], value, name)


def both(family: str, batch: int, drafter: str, **settings: Any) -> tuple[Any, Any]:
    # Eager attention, which alone gives its weights; in single precision, since it turns padding in double into NaN.
    target = specheads.enable(tiny(family, attention="eager").float())
    given = {**prompt(family, batch), "do_sample": False, "max_new_tokens": 22, "return_dict_in_generate": True, **settings}
    plain = target.generate(**given)
    out = target.generate(**given, **arguments(drafter, 4, perturbed(target, 0.05), family))
    assert out.speculation.num_accepted_draft_tokens > 0 or drafter == "suffix"
    return out, plain


def early_end(family: str) -> int:
    """A token that plain decoding says early in some row and late or never in another."""
    plain = specheads.enable(tiny(family, attention="eager").float()).generate(
        **prompt(family, 4), do_sample=False, max_new_tokens=22
    )
    start = 11 if family != "t5" else 1
    firsts = {
        token: [(row == token).nonzero()[0].item() if (row == token).any() else 99 for row in plain[:, start:]]
        for token in plain[:, start:].unique().tolist()
    }
    return max(firsts, key=lambda token: max(firsts[token]) - min(firsts[token]) - 5 * (min(firsts[token]) == 0))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("drafter", ["suffix", "draft tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_step(family: str, drafter: str, batch: int) -> None:
    compare(*both(family, batch, drafter, **ALL))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_end_early(family: str) -> None:
    end = early_end(family)
    out, plain = both(family, 4, "draft tree", **ALL, eos_token_id=end, pad_token_id=3)
    ends = (plain.sequences == end).int().argmax(dim=1)
    assert len(set(ends.tolist())) > 1
    compare(out, plain)


@pytest.mark.parametrize("name", FIELDS)
def test_one_alone(name: str) -> None:
    out, plain = both("llama", 4, "draft tree", **{f"output_{name}": True})
    compare(out, plain)
    assert [field for field in FIELDS if out.get(field) is not None] == [name]


def test_scores_of_processors() -> None:
    settings = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 3, "temperature": 0.7, "output_scores": True}
    compare(*both("llama", 4, "draft tree", **settings))


def test_scores_of_processors_with_a_state() -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            self.calls += 1
            return scores - scores.mean(dim=0) * 0.1 * (self.calls % 3)  # rows look at one another

    target = specheads.enable(tiny())
    given = {**prompt("llama", 4), **ALL, "output_attentions": False, "do_sample": False, "return_dict_in_generate": True}
    given |= {"max_new_tokens": 22, "eos_token_id": early_end("llama"), "pad_token_id": 3}
    plain = target.generate(**given, logits_processor=[Counting()])
    out = target.generate(**given, logits_processor=[Counting()], **arguments("recycling", 4, target, "llama"))
    compare(out, plain)


def test_sampled_scores_are_those_of_the_text() -> None:
    """Teacher-forced, the returned scores of a sampled text are the target's."""
    target = specheads.enable(tiny())
    out = target.generate(
        **prompt("llama", 1), do_sample=True, temperature=0.8, max_new_tokens=20, return_dict_in_generate=True,
        output_scores=True, output_logits=True, speculative={"tree_nodes": 8, "draft_tokens": 3, "adaptive": False, "seed": 3},
        assistant_model=perturbed(target, 0.05),
    )  # fmt: skip
    logits = target(out.sequences).logits[0, 10:-1].float()
    torch.testing.assert_close(torch.cat(out.logits), logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.cat(out.scores), logits / 0.8, atol=1e-5, rtol=1e-4)


def test_the_comparison_sees_a_wrong_path(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SlotRunner.columns_attended
    monkeypatch.setattr(
        SlotRunner, "columns_attended", lambda self, weights, line, path: original(self, weights, line, range(len(path)))
    )
    with pytest.raises(AssertionError):
        compare(*both("llama", 4, "draft tree", **ALL))
