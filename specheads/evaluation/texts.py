"""A few texts with all that was drafted for them, for reports: generated once more, beside what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .bench import Bench
from .colouring import shown_rounds
from .prompts import Prompt

MOST_LETTERS = 300  # of a prompt that are kept


def kept_texts(bench: Bench, way: str, prompts: Sequence[Prompt], seed: int) -> list[dict[str, Any]]:
    """Generates once more and keeps what every round drafted.

    Args:
        bench: The target.
        way: The variant, one of this library's.
        prompts: What is asked.
        seed: Of sampling.

    Returns:
        For each prompt its name (`prompt`), `category`, the end of what was `asked`, the `way`, and the `rounds` as
        `shown_rounds` gives them.
    """
    speculative = {**bench.variants[way]["speculative"], "per_step_drafts": True}
    texts = []
    for prompt in prompts:
        rows = bench.run(way, [prompt], seed, speculative=speculative).speculation.rows
        asked = prompt.messages[-1]["content"].strip()
        texts.append(
            {
                "prompt": prompt.name,
                "category": prompt.category,
                "asked": _end_of(asked),
                "way": way,
                "rounds": shown_rounds(bench.tokenizer, rows[0].per_step_drafts),
            }
        )
    return texts


def _end_of(asked: str) -> str:
    """The last letters of what was asked, from the beginning of a word."""
    if len(asked) <= MOST_LETTERS:
        return asked
    end = asked[-MOST_LETTERS:]
    return f"… {end.partition(' ')[2] or end}"
