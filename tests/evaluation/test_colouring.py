from __future__ import annotations

from typing import Any

import pytest

from specheads.evaluation.colouring import accepted_marks, pieces


@pytest.mark.parametrize(
    ("accepted", "length", "marks"),
    [
        ([0, 2, 1], 6, "xaaxax"),
        ([0, 2], 3, "xaa"),  # a stop cut the last round after its accepted tokens
        ([], 0, ""),
    ],
)
def test_each_round_is_its_accepted_tokens_and_one_of_the_target(accepted: list[int], length: int, marks: str) -> None:
    assert accepted_marks(accepted, length) == [mark == "a" for mark in marks]


def test_pieces_add_up_to_the_text(tokenizer: Any) -> None:
    text = "Zoë says: 日本 ☕ [bold] x"
    tokens = tokenizer(text).input_ids
    found = pieces(tokenizer, [*tokens, tokenizer.eos_token_id])
    assert "".join(found) == text
    assert len(found) == len(tokens) + 1
    assert "日" in found  # three bytes, three tokens: the last one shows it
