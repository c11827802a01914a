"""Conversations answered turn by turn.

Whoever writes the replies, the rows that come of them are the same: see `answer`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .conversations import LENGTH, Message
from .questions import Question

STOP = "stop"
# Why a reply is of no use.
TOO_LONG, EMPTY, CUT, REFUSED = "too long", "empty", "cut", "refused"


@dataclass(frozen=True)
class Ask:
    """A conversation whose next reply is asked for.

    Args:
        messages: What was said so far.
        tools: The tools that the chat template is shown.
        seed: Of the reply's randomness.
    """

    messages: tuple[Message, ...]
    tools: list[Any] | None
    seed: int


@dataclass(frozen=True)
class Reply:
    """A reply, or why there is none.

    Args:
        message: The reply.
        num_tokens: Tokens that were written, the end token included.
        is_cut: It was ended by the greatest length.
        written: The text as it was written, where the chat template renders the message otherwise.
        failure: Why there is no reply.
        detail: More of that.
    """

    message: Message = field(default_factory=dict)
    num_tokens: int = 0
    is_cut: bool = False
    written: str = ""
    failure: str | None = None
    detail: str = ""


class Writer(Protocol):
    """Who writes replies."""

    def reply(self, asks: Sequence[Ask]) -> list[Reply]:
        """A reply to each conversation; what it is depends on that conversation and its seed alone."""
        ...


@dataclass
class Answer:
    """A question on its way to a row.

    Args:
        question: The question.
        keep_cut: Whether replies that were cut are of use.
    """

    question: Question
    keep_cut: bool = True
    messages: list[Message] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    num_tokens: int = 0
    is_cut: bool = False
    failure: str | None = None
    detail: str = ""

    @property
    def is_open(self) -> bool:
        """Whether there is more to reply to."""
        return self.failure is None and not self.is_cut and len(self.written) < len(self.question.turns)

    def ask(self, seed: int) -> Ask:
        """What is asked next."""
        turn = len(self.written)
        said = (*self.messages, *self.question.turns[turn])
        return Ask(said, self.question.tools, row_seed(seed, self.question.key, turn))

    def take(self, reply: Reply) -> None:
        """Takes the reply to what was asked."""
        self.failure, self.detail = reply.failure, reply.detail
        if reply.is_cut and not self.keep_cut:
            self.failure = CUT
        if self.failure is None:
            self.messages += [*self.question.turns[len(self.written)], reply.message]
            self.written.append(reply.written)
            self.num_tokens += reply.num_tokens
            self.is_cut = reply.is_cut

    @property
    def row(self) -> dict[str, Any]:
        """The row of training data: what was replied before anything failed."""
        row = {
            "id": self.question.key,
            "messages": self.messages,
            "finish_reason": LENGTH if self.is_cut else STOP,
            "num_tokens": self.num_tokens,
            "unanswered": len(self.question.turns) - len(self.written),
            "written": self.written,
        }
        return {**row, "tools": self.question.tools} if self.question.tools else row

    @property
    def failed(self) -> dict[str, Any]:
        """The entry among what failed."""
        return {"id": self.question.key, "reason": self.failure, "turn": len(self.written), "detail": self.detail}


def answer(questions: Sequence[Question], writer: Writer, seed: int, keep_cut: bool) -> list[Answer]:
    """Answers conversations, all of them turn by turn.

    A conversation ends with its last turn, with a reply that was cut, or before a reply of no use.

    Args:
        questions: The conversations.
        writer: Who replies.
        seed: Of all randomness; each reply's own seed depends on it, the question and the turn.
        keep_cut: Whether replies that were cut are kept.
    """
    answers = [Answer(question, keep_cut) for question in questions]
    while waiting := [one for one in answers if one.is_open]:
        for one, reply in zip(waiting, writer.reply([one.ask(seed) for one in waiting]), strict=True):
            one.take(reply)
    return answers


def row_seed(seed: int, key: str, turn: int) -> int:
    """The seed of one reply."""
    digest = hashlib.sha256(f"{seed}:{key}:{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # servers take 63 bits
