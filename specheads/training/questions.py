"""What is to be answered: the conversations of a dataset without their replies, each once."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..evaluation.prompts import InputError
from .conversations import Chat, Message, read_prompt


@dataclass(frozen=True)
class Question:
    """A conversation to be answered.

    Args:
        key: Its name: a hash of what is asked, upper and lower case, spaces and forms of characters aside.
        turns: What is said before each reply.
        tools: The tools that the chat template is shown.
    """

    key: str
    turns: tuple[tuple[Message, ...], ...]
    tools: list[Any] | None = None


@dataclass
class Questions:
    """The questions of a dataset that fall to one of several processes.

    Args:
        rows: Rows that `read_prompt` takes.
        name: What to call the dataset in messages.
        system: A system message for conversations that have none.
        shard: Which process this is, and how many there are.
        limit: How many questions at most, over all processes.
        excluded: Keys of questions that are left out.

    Attributes:
        duplicates: How many rows asked what another one had asked before.
        left_out: How many were excluded.
    """

    rows: Any
    name: str = "the dataset"
    system: str | None = None
    shard: tuple[int, int] = (0, 1)
    limit: int | None = None
    excluded: frozenset[str] = frozenset()
    duplicates: int = field(default=0, init=False)
    left_out: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[Question]:
        """The questions, in the order of the dataset.

        Raises:
            InputError: if a row holds no question.
        """
        seen: set[str] = set()
        self.duplicates = self.left_out = 0
        for number, row in enumerate(self.rows, start=1):
            if self.limit is not None and len(seen) == self.limit:
                return
            question = question_of(row, f"{self.name}, row {number}", self.system)
            if question.key in self.excluded:
                self.left_out += 1
            elif question.key in seen:
                self.duplicates += 1
            else:
                if len(seen) % self.shard[1] == self.shard[0]:
                    yield question
                seen.add(question.key)


def question_of(row: Mapping[str, Any], place: str, system: str | None = None) -> Question:
    """The question of a row.

    Args:
        row: As `read_prompt` takes it.
        place: What to call the row in an error.
        system: A system message, if the row has none.

    Raises:
        InputError: if there is none.
    """
    chat = read_prompt(row, place)
    turns = _turns(chat)
    if not turns:
        raise InputError(f"{place}: there is no question, only replies; give a conversation that somebody else begins.")
    # By the row's own words: whatever the system message, the same dataset gives the same keys.
    key = _key(turns, chat.tools)
    if system is not None and turns[0][0]["role"] != "system":
        turns = (({"role": "system", "content": system}, *turns[0]), *turns[1:])
    return Question(key, turns, chat.tools)


def _turns(chat: Chat) -> tuple[tuple[Message, ...], ...]:
    replies = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
    uses_tools = any(message["role"] == "tool" or message.get("tool_calls") for message in chat.messages)
    if uses_tools:
        # What a tool said belongs to the call that was made then: only the last reply can be written anew.
        return (chat.messages[: replies[-1]] if chat.messages[-1]["role"] == "assistant" else chat.messages,)
    bounds = [-1, *replies, len(chat.messages)]
    turns = [chat.messages[start + 1 : stop] for start, stop in pairwise(bounds)]
    return tuple(turn for turn in turns if turn)


def _key(turns: tuple[tuple[Message, ...], ...], tools: list[Any] | None) -> str:
    said = [[(message["role"], _normalised(message["content"])) for message in turn] for turn in turns]
    return hashlib.sha256(json.dumps([said, tools], ensure_ascii=False).encode()).hexdigest()[:24]


def _normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
