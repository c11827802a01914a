"""What a drafter can copy from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .base import DraftContext


def known_segments(context: DraftContext, line: int) -> list[list[int]]:
    """The texts that a line knows: its encoder input, if there is one, and its own tokens, which come last.

    A token that the target cannot say (a placeholder for an image, or one of an encoder with a vocabulary of its own) ends a
    segment, so that it is never drafted and no text is held to go on across it.

    Returns:
        At least one segment; the last one is the one that goes on.
    """
    segments = list(_split(encoder_tokens(context, line), context.vocab_size))
    own = list(_split(context.tokens(line), context.vocab_size))
    return [segment for segment in segments + own[:-1] if segment] + own[-1:]


def encoder_tokens(context: DraftContext, line: int) -> list[int]:
    """A line's tokens that the encoder reads, without padding; none where there is no encoder, or it reads no ids."""
    if context.encoder_ids is None:
        return []
    row = context.rows[line]
    ids = context.encoder_ids[row]
    return (ids if context.encoder_mask is None else ids[context.encoder_mask[row].bool()]).tolist()


def _split(tokens: Iterable[int], vocab_size: int) -> Iterator[list[int]]:
    segment: list[int] = []
    for token in tokens:
        if 0 <= token < vocab_size:
            segment.append(token)
        else:
            yield segment
            segment = []
    yield segment


def through_end(tokens: list[int], end_tokens: set[int]) -> list[int]:
    """Cuts tokens after the first one that ends a row."""
    for index, token in enumerate(tokens):
        if token in end_tokens:
            return tokens[: index + 1]
    return tokens
