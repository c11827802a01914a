"""Odd input: exact, or refused with one sentence, and before anything is half done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

import specheads
from specheads.drafters import Accepted, Budget, DraftContext
from specheads.tree import DraftTree

from .exactness.test_greedy import prompt
from .tiny import perturbed, tiny

DRAFT = {"draft_tokens": 4, "adaptive": False}


class Own:
    """A user's drafter."""

    step_cost = 0.0
    weighs_nodes = False

    def __init__(self, propose: Callable[[DraftContext], Any]):
        self.tree = propose

    def begin(self, context: DraftContext) -> None: ...

    def propose(self, context: DraftContext, budget: Budget) -> Any:
        return self.tree(context) if budget.depth else DraftTree.empty(len(context.rows), context.device)

    def commit(self, context: DraftContext, accepted: Accepted) -> None: ...

    def keep_rows(self, lines: Any) -> None: ...


def both(target: Any, inputs: dict[str, Tensor], speculative: Any = None, draft: Any = None, **arguments: Any) -> None:
    settings = {"max_new_tokens": 20, "do_sample": False, **arguments}
    plain = target.generate(**inputs, **settings)
    ours = target.generate(**inputs, **settings, speculative=speculative or DRAFT, assistant_model=draft)
    assert torch.equal(plain, ours) and plain.dtype == ours.dtype


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_pass_are_refused(kind: str) -> None:
    model = tiny()
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0}
    with pytest.raises(ValueError, match=kind):
        specheads.enable(model)


@pytest.mark.parametrize("dtype", [torch.float, torch.bool, torch.int])
def test_masks_of_any_type(dtype: torch.dtype, target: Any) -> None:
    inputs = prompt("llama", 4)
    expected = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    assert torch.equal(expected, target.generate(**inputs, max_new_tokens=12, do_sample=False, speculative=DRAFT))


def test_ids_of_another_type(target: Any) -> None:
    inputs = prompt("llama", 2)
    both(target, {**inputs, "input_ids": inputs["input_ids"].int()})


TREES: dict[str, tuple[Callable[[int], Any], str]] = {
    "negative token": (lambda b: DraftTree.chain(torch.full((b, 2), -5)), "tokens must be below 32"),
    "large token": (lambda b: DraftTree.chain(torch.full((b, 2), 32)), "tokens must be below 32"),
    "float tokens": (lambda b: DraftTree(torch.ones(b, 1), torch.zeros(b, 1), 1), "must be integers"),
    "other batch": (lambda b: DraftTree.chain(torch.ones(b + 1, 2, dtype=torch.long)), r"of shape \[2, N\]"),
    "late parent": (lambda b: DraftTree(torch.ones(b, 2).long(), torch.full((b, 2), 2), 2), "before its child"),
    "no chain": (lambda b: DraftTree(torch.ones(b, 2).long(), torch.zeros(b, 2).long(), 1, is_chain=True), "is_chain"),
    "short depth": (lambda b: DraftTree(torch.ones(b, 2).long(), torch.tensor([[0, 1]] * b), 1), "depth"),
    "no law": (lambda b: DraftTree.chain(torch.ones(b, 1).long(), torch.full((b, 1, 32), -1.0)), "proposals"),
    "no number": (lambda b: DraftTree.chain(torch.ones(b, 1).long(), torch.full((b, 1, 32), torch.nan)), "proposals"),
    "other vocabulary": (lambda b: DraftTree.chain(torch.ones(b, 1).long(), torch.full((b, 1, 8), 0.125)), "proposals"),
}


@pytest.mark.parametrize("name", TREES)
def test_invalid_trees_of_own_drafters_are_refused(name: str, target: Any) -> None:
    make, message = TREES[name]
    specheads.enable(target, drafter=Own(lambda context: make(len(context.rows))))
    with pytest.raises(ValueError, match=message):
        target.generate(**prompt("llama", 2), max_new_tokens=9, eos_token_id=None, speculative=True)


def test_what_is_no_tree_is_refused(target: Any) -> None:
    specheads.enable(target, drafter=Own(lambda context: None))
    with pytest.raises(TypeError, match="NoneType"):
        target.generate(**prompt("llama", 2), max_new_tokens=9, eos_token_id=None, speculative=True)


def test_an_own_drafter_that_is_valid_works(target: Any) -> None:
    def same_again(context: DraftContext) -> DraftTree:
        last = [context.tokens(line)[-1] for line in range(len(context.rows))]
        return DraftTree.chain(torch.tensor(last)[:, None].repeat(1, 30))  # more than there is room for

    specheads.enable(target, drafter=Own(same_again))
    both(target, prompt("llama", 4), True)


@pytest.mark.parametrize("drafter", [Own, 3, object()])
def test_what_is_no_drafter_is_refused(drafter: Any, target: Any) -> None:
    with pytest.raises(TypeError, match="drafter must be"):
        specheads.enable(target, drafter=drafter)


@pytest.mark.parametrize("name", ["auto", "recycling", "suffix"])
def test_a_table_of_positions_that_ends(name: str) -> None:
    class StopAt(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 29)

    for family in ("gpt2", "opt"):
        target = specheads.enable(tiny(family, max_position_embeddings=30, eos_token_id=None))
        settings = {**DRAFT, "draft_tokens": 8, "drafter": name, "tree_nodes": 12}
        rules = StoppingCriteriaList([StopAt()])
        both(target, prompt(family, 1), settings, max_new_tokens=60, stopping_criteria=rules)


class StopAtWidth(StoppingCriteria):
    """Stops all rows at a width."""

    def __init__(self, width: int):
        self.width = width

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.width)


@pytest.mark.parametrize(("family", "table"), [("gpt_neo", "max_position_embeddings"), ("mpt", "max_seq_len")])
def test_padding_takes_positions_where_rows_go_in_step(family: str, table: str) -> None:
    """The short row has positions left when the long one has none, and its drafts stand in the same columns."""
    target = specheads.enable(tiny(family, **{table: 20}, eos_token_id=None))
    ids = torch.tensor([[5, 6, 7, 8] * 3, [0] * 6 + [5, 6, 7] * 2])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    rules = StoppingCriteriaList([StopAtWidth(21)])  # the last token needs no position
    settings = {"drafter": "suffix", "draft_tokens": 8, "adaptive": False}
    both(target, inputs, settings, max_new_tokens=60, stopping_criteria=rules, pad_token_id=0)


@pytest.mark.parametrize(
    ("family", "table"), [("gpt2", "max_position_embeddings"), ("opt", "max_position_embeddings"), ("mpt", "max_seq_len")]
)
def test_positions_that_end_are_said(family: str, table: str) -> None:
    target = specheads.enable(tiny(family, **{table: 20}, eos_token_id=None))
    read: list[int] = []
    target.register_forward_pre_hook(lambda *_: read.append(1))
    ids = torch.randint(4, 30, (1, 25))
    with pytest.raises(ValueError, match="takes 25 positions and the model has 20; shorten it to 20"):
        target.generate(ids, max_new_tokens=1, speculative=True)
    assert not read
    fits = ids[:, :20]
    both(target, {"input_ids": fits, "attention_mask": torch.ones_like(fits)}, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"Row 0 .* last of the model's 20 positions .* after 11 new tokens"):
        target.generate(ids[:, :10], max_new_tokens=40, do_sample=False, speculative=True)
    padded = torch.cat([torch.zeros(1, 8, dtype=torch.long), ids[:, :15]], dim=1)
    inputs = {"input_ids": padded, "attention_mask": (padded != 0).long()}
    if family != "mpt":  # where padding takes no positions, the row's own tokens count
        both(target, inputs, max_new_tokens=6)


def test_a_trained_length_is_no_end_of_positions() -> None:
    target = specheads.enable(tiny(max_position_embeddings=16))
    ids = torch.randint(4, 30, (1, 25))
    both(target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def test_prefix_functions_are_asked_along_the_text_only(target: Any) -> None:
    draft = perturbed(target, 0.05)
    inputs = prompt("llama", 1)
    asked: list[list[list[int]]] = [[], []]

    def allowed_by(turn: int) -> Callable[[int, Tensor], list[int]]:
        def allowed(row: int, ids: Tensor) -> list[int]:
            asked[turn].append(ids.tolist())
            assert 31 not in ids[11:].tolist(), "asked after the end"
            return list(range(3 + len(asked[turn]) % 3, 32))

        return allowed

    arguments = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 31}
    for speculative, assistant in ((None, None), (DRAFT, draft)):
        target.generate(
            **inputs,
            **arguments,
            prefix_allowed_tokens_fn=allowed_by(int(speculative is not None)),
            speculative=speculative,
            assistant_model=assistant,
        )
    assert asked[0] == asked[1]


def test_functions_may_take_ids_as_they_are_in_memory(target: Any) -> None:
    rule = LogitsProcessorList([lambda ids, scores: scores + 0 * ids.view(-1).sum()])
    both(target, prompt("llama", 4), logits_processor=rule)


@pytest.mark.parametrize("limit", [5, 11, 12, 14])
def test_a_length_rule_of_ones_own(limit: int, target: Any) -> None:
    both(target, prompt("llama", 2), stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(limit)]))


def test_huge_limits_cost_nothing(target: Any) -> None:
    both(target, prompt("llama", 2), {**DRAFT, "draft_tokens": 10**9, "adaptive": True}, max_new_tokens=20)
    out = target.generate(
        **prompt("llama", 2), max_new_tokens=2**31, do_sample=False, eos_token_id=[31, 5, 12], speculative=True
    )
    assert out.shape[1] < 200


def test_t5_with_the_encoders_outputs_given() -> None:
    target = specheads.enable(tiny("t5"))
    inputs = prompt("t5", 2)
    outputs = target.get_encoder()(**inputs, return_dict=True)
    given = {"encoder_outputs": outputs, "attention_mask": inputs["attention_mask"]}
    both(target, given, {**DRAFT, "drafter": "auto"})
    with pytest.raises(ValueError, match="encoder_outputs"):
        target.generate(**given, max_new_tokens=5, speculative=DRAFT, assistant_model=perturbed(target, 0.05))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"assistant_model": "suffix"}, TypeError, "must be a model"),
        ({"assistant_tokenizer": object()}, ValueError, "assistant_model"),
        ({"speculative": {"seed": 2**64}}, ValueError, "64 bits"),
        ({"speculative": {"drafter": ""}}, ValueError, "Unknown drafter"),
        ({"speculative": {"verification": torch.ones(2)}}, ValueError, "verification"),
        ({"speculative": {"draft_tokens": 2.0}}, ValueError, "draft_tokens"),
        ({"speculative": {"draft_tokens": True}}, ValueError, "draft_tokens"),
        ({"speculative": "yes"}, TypeError, "speculative"),
        ({"draft_tokens": 3}, ValueError, "draft_tokens: settings of speculation go into"),
    ],
)
def test_one_clear_sentence(call: dict[str, Any], error: type[Exception], message: str, target: Any) -> None:
    with pytest.raises(error, match=message):
        target.generate(**{**prompt("llama", 1), "speculative": True, "max_new_tokens": 4, **call})


def test_a_model_without_an_output_layer_is_no_draft(target: Any) -> None:
    with pytest.raises(TypeError, match="LlamaModel"):
        specheads.enable(target, drafter=tiny().model)


def test_another_vocabulary_is_refused_by_enable_too(target: Any) -> None:
    with pytest.raises(ValueError, match="vocabulary of 40"):
        specheads.enable(target, drafter=tiny(vocab_size=40))
