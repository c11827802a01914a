"""Generated text piece by piece, with who contributed it: the draft or the target itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what decoders write for a character of which bytes are missing


def accepted_marks(per_step_accepted: Sequence[int], length: int) -> list[bool]:
    """For each emitted token, whether it is an accepted draft token.

    Args:
        per_step_accepted: How many draft tokens each round accepted; after them it emitted one of the target's own.
        length: The number of emitted tokens. A stop may have cut the last round.
    """
    marks = [mark for accepted in per_step_accepted for mark in (*(True for _ in range(accepted)), False)]
    return marks[:length]


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds; characters of several tokens belong to the last of them.

    Args:
        tokenizer: Decodes them.
        tokens: The ids; special ones add nothing.
    """
    found, shown = [], ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if text.endswith(UNFINISHED) and end < len(tokens):
            found.append("")
            continue
        found.append(text[len(shown) :])
        shown = text
    return found
