"""Generated text piece by piece, with who contributed it: the draft or the target itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..rounds import DraftRound

UNFINISHED = "\ufffd"  # what decoders write for a character of which bytes are missing
# How each part is shown on a terminal.
ACCEPTED, OWN, REJECTED = "green", "underline blue", "strike red"


class Pieces:
    """The text that each token adds; characters of several tokens belong to the last of them.

    Args:
        tokenizer: Decodes them. Special tokens add nothing.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.shown = ""

    def add(self, token: int) -> str:
        """The text that one more token adds."""
        self.tokens.append(token)
        text = self._decoded()
        return "" if text.endswith(UNFINISHED) else self._new(text)

    def rest(self) -> str:
        """What the tokens so far leave unfinished."""
        return self._new(self._decoded())

    def after(self, tokens: Sequence[int]) -> str:
        """The text that some tokens would add, which are not added."""
        return self._decoded(tokens)[len(self.shown) :]

    def _decoded(self, more: Sequence[int] = ()) -> str:
        decode = self.tokenizer.decode
        text: str = decode([*self.tokens, *more], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _new(self, text: str) -> str:
        new, self.shown = text[len(self.shown) :], text
        return new


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds; characters of several tokens belong to the last of them.

    Args:
        tokenizer: Decodes them.
        tokens: The ids; special ones add nothing.
    """
    text = Pieces(tokenizer)
    found = [text.add(token) for token in tokens]
    if found:
        found[-1] += text.rest()
    return found


def accepted_marks(per_step_accepted: Sequence[int], length: int) -> list[bool]:
    """For each emitted token, whether it is an accepted draft token.

    Args:
        per_step_accepted: How many draft tokens each round accepted; after them it emitted one of the target's own.
        length: The number of emitted tokens. A stop may have cut the last round.
    """
    marks = [mark for accepted in per_step_accepted for mark in (*(True for _ in range(accepted)), False)]
    return marks[:length]


def shown_rounds(tokenizer: Any, rounds: Iterable[DraftRound]) -> list[dict[str, Any]]:
    """The rounds of one text in words, for a result file.

    Args:
        tokenizer: Decodes the tokens.
        rounds: What `per_step_drafts` kept of the text.

    Returns:
        Per round `emitted`, the text of each token that was emitted; `accepted`, the accepted nodes; and `draft`, for each node
        its `text` and its `parent`, 0 for the last token before the round.
    """
    text = Pieces(tokenizer)
    shown: list[dict[str, Any]] = []
    for a_round in rounds:
        draft = [
            {"text": _node_text(text, a_round, node), "parent": a_round.parents[node - 1]}
            for node in range(1, len(a_round.tokens) + 1)
        ]
        emitted = [text.add(token) for token in a_round.emitted]
        shown.append({"emitted": emitted, "accepted": list(a_round.accepted), "draft": draft})
    if shown and shown[-1]["emitted"]:
        shown[-1]["emitted"][-1] += text.rest()
    return shown


def _node_text(text: Pieces, a_round: DraftRound, node: int) -> str:
    """What a drafted token would add after the nodes above it."""
    path = list(_upwards(a_round.parents, node))[::-1]
    tokens = [a_round.tokens[above - 1] for above in path]
    return text.after(tokens)[len(text.after(tokens[:-1])) :]


def _upwards(parents: Sequence[int], node: int) -> Iterator[int]:
    while node:
        yield node
        node = parents[node - 1]


def rejected_path(a_round: dict[str, Any]) -> list[int]:
    """The drafted tokens that come first to be shown as rejected: the path that leaves the accepted one, first children first.

    Args:
        a_round: One of `shown_rounds`.
    """
    node, path = (a_round["accepted"] or [0])[-1], []
    children = first_children(a_round)
    while (node := children.get(node, 0)) != 0:
        path.append(node)
    return path


def first_children(a_round: dict[str, Any]) -> dict[int, int]:
    """For each node of a round that has children, the first of them."""
    found: dict[int, int] = {}
    for node, drafted in enumerate(a_round["draft"], start=1):
        found.setdefault(drafted["parent"], node)
    return found
