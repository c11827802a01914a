"""What a speed measurement compares: each variant with each number of drafted tokens, and some variants more than once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .prompts import InputError
from .variants import COUNTED, Variant


@dataclass(frozen=True)
class Way:
    """One column of the comparison.

    Args:
        name: What it is called, `"suffix"` or `"suffix K=4"`.
        variant: The variant.
        draft_tokens: K, the most tokens drafted along a path; `None` leaves it to the variant.
    """

    name: str
    variant: Variant
    draft_tokens: int | None


def ways_of(variants: Sequence[Variant], draft_tokens: Sequence[int]) -> list[Way]:
    """The variants, those that draft once for each draft length.

    Args:
        variants: The variants, `plain` first.
        draft_tokens: The lengths; none leaves them to the variants.
    """
    if len(draft_tokens) < 2:
        return [Way(variant.name, variant, draft_tokens[0] if draft_tokens else None) for variant in variants]
    found = []
    for variant in variants:
        if _drafts_as_told(variant):
            found += [Way(f"{variant.name} K={length}", variant, length) for length in draft_tokens]
        else:
            found.append(Way(variant.name, variant, None))
    return found


def lengths_of(text: str | None) -> list[int]:
    """Whole numbers separated by commas; none of `None`.

    Raises:
        InputError: if there is something else, or a number twice.
    """
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--draft-tokens must be at least 1, or several such numbers separated by commas, got {text}.")
    lengths = [int(part) for part in parts]
    if len(set(lengths)) < len(lengths):
        raise InputError(f"--draft-tokens names a number twice: {text}.")
    return lengths


def _drafts_as_told(variant: Variant) -> bool:
    if variant.kind in COUNTED and not variant.is_ours:
        return variant.argument is None  # else the name says how many
    return variant.is_stock_assisted or (variant.is_ours and variant.kind != "none")
