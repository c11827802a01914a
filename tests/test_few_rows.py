"""Passes of a few tokens on a CPU get columns that nothing looks at, and give what they gave without."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specheads
from specheads import few_rows, target
from specheads.cache import SlotCache
from specheads.few_rows import filled_columns, filled_rows, fills_passes
from specheads.target import SlotRunner
from tests.tiny import tiny

PROMPT = torch.tensor([[3, 5, 7, 9, 11, 5, 7, 9], [0, 0, 8, 2, 8, 2, 8, 2], [0, 0, 0, 4, 6, 4, 6, 4]])


def single(family: str) -> PreTrainedModel:
    return tiny(family).float()


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [(1, 1, 1), (1, 2, 4), (1, 3, 4), (1, 5, 6), (1, 7, 8), (1, 16, 16), (2, 1, 1), (3, 1, 1), (8, 2, 2)],
)
def test_columns(rows: int, columns: int, expected: int) -> None:
    assert filled_columns(rows, columns) == expected


def test_who_is_filled_up() -> None:
    assert fills_passes(single("llama"))
    assert not fills_passes(tiny("llama"))  # double precision
    assert not fills_passes(single("mixtral"))
    assert not fills_passes(specheads.pack_for_cpu(single("llama")))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_texts_and_outputs_are_plain_ones(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, widths = specheads.enable(single(family)), []
    extend = SlotRunner.extend

    def watched(self: SlotRunner, tokens: Tensor, depths: Tensor, visible: Tensor) -> target.Pass:
        given = extend(self, tokens, depths, visible)
        widths.append((tokens.shape[1], self.written))
        assert given.logits.shape[1] == tokens.shape[1]
        return given

    monkeypatch.setattr(SlotRunner, "extend", watched)
    prompt = PROMPT[-1:]
    asked = {
        "attention_mask": (prompt != 0).long(), "max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True,
        "output_logits": True, "output_hidden_states": True, "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    plain = model.generate(prompt, **asked)
    ours = model.generate(prompt, speculative={"drafter": "suffix", "draft_tokens": 2, "adaptive": False}, **asked)
    assert any(asked_for < written for asked_for, written in widths)
    assert torch.equal(plain.sequences, ours.sequences)
    for expected, given in zip(plain.logits, ours.logits, strict=True):
        torch.testing.assert_close(given, expected, atol=1e-4, rtol=1e-4)
    for expected, given in zip(plain.hidden_states[1:], ours.hidden_states[1:], strict=True):
        torch.testing.assert_close(given[-1], expected[-1], atol=1e-4, rtol=1e-4)


def test_a_column_that_is_looked_at_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The filling made visible to the draft bends the logits: what the comparison above would catch."""

    def attended(tokens: Tensor, depths: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, depths, visible = filled(tokens, depths, visible)
        return tokens, depths, torch.ones_like(visible)

    filled = few_rows.filled
    model = specheads.enable(single("llama"))
    asked = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(PROMPT[:1], **asked)
    monkeypatch.setattr(target, "filled", attended)
    ours = model.generate(PROMPT[:1], speculative={"drafter": "suffix", "draft_tokens": 2, "adaptive": False}, **asked)
    shared = min(len(plain.logits), len(ours.logits))
    assert any(not torch.allclose(a, b, atol=1e-3) for a, b in zip(plain.logits[:shared], ours.logits[:shared], strict=True))


@pytest.mark.parametrize(("rows", "columns", "expected"), [(1, 1, 1), (3, 1, 4), (4, 1, 4), (7, 1, 8), (7, 2, 7), (3, 4, 3)])
def test_rows(rows: int, columns: int, expected: int) -> None:
    assert filled_rows(rows, columns) == expected


def ended_row_run(family: str, drafter: str, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, bool, bool]:
    """A batch of which one row ends early: whether that row was shown in passes, the texts agree, and what the caches hold."""
    model, shown = specheads.enable(single(family)), []
    show = SlotCache.show

    def watched(self: SlotCache, lines: int) -> None:
        show(self, lines)
        shown.append(lines > self.going)

    prompt = torch.cat([PROMPT, PROMPT[:1].flip(1)])
    asked = {
        "attention_mask": (prompt != 0).long(), "max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True,
        "output_hidden_states": True, "pad_token_id": 0,
    }  # fmt: skip
    said = model.generate(prompt, eos_token_id=None, **asked).sequences[:, prompt.shape[1] :]
    end = first_end(said)
    plain = model.generate(prompt, eos_token_id=end, **asked)
    settings = {"drafter": drafter, "draft_tokens": 2, "adaptive": True}
    with monkeypatch.context() as patch:
        patch.setattr(SlotCache, "show", watched)
        ours = model.generate(prompt, speculative=settings, eos_token_id=end, **asked)
    length = ours.past_key_values.get_seq_length()
    held = all(
        torch.allclose(own.keys, stock.keys[:, :, :length], atol=1e-3, rtol=1e-3)
        for own, stock in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True)
        if not stock.is_sliding
    )
    return any(shown), torch.equal(plain.sequences, ours.sequences), held


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_a_row_that_has_ended_fills_a_pass_and_keeps_what_it_has(
    family: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_shown, agree, held = ended_row_run(family, drafter, monkeypatch)
    assert agree and held
    assert was_shown or drafter != "none"  # the clock decides when drafts leave room


def test_writing_over_what_an_ended_row_has_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    show = SlotCache.show

    def over(self: SlotCache, lines: int) -> None:
        show(self, lines)
        lengths = self.layout.lengths
        self.layout.set_lengths([*lengths[: self.going], *[1 for _ in lengths[self.going :]]])

    monkeypatch.setattr(SlotCache, "show", over)
    assert ended_row_run("llama", "none", monkeypatch) == (True, True, False)


def first_end(said: Tensor) -> int:
    """A token with which one row ends early and the others go on."""
    for step in range(4, said.shape[1] // 2):
        for token in said[:, step].tolist():
            if int((said == token).any(dim=1).sum()) == 1:
                return int(token)
    raise AssertionError("no such token; take another prompt")
