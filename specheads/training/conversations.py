"""Rows of the usual dataset shapes, read as what they are: a chat, a prompt with its completion, or a text."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..evaluation.prompts import InputError

SHAPES = "`messages`, `conversations` (ShareGPT), `prompt` with `completion`, or `text`"
# What ShareGPT and its descendants call the parties.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
LENGTH = "length"  # the `finish_reason` of a reply that was cut

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Args:
        messages: With `role` and `content`, as chat templates take them.
        tools: The tools that the template is shown.
        written: Per reply, the text exactly as the target wrote it where the chat template renders it otherwise, else empty.
            No entries where nothing is known of it.
        is_cut: The last reply ended because it was too long, not because its writer was done.
    """

    messages: tuple[Message, ...]
    tools: list[Any] | None = None
    written: tuple[str, ...] = ()
    is_cut: bool = False


@dataclass(frozen=True)
class Completion:
    """A prompt and what follows it, both plain strings."""

    prompt: str
    completion: str
    is_cut: bool = False


@dataclass(frozen=True)
class Text:
    """A text as it is."""

    text: str
    is_cut: bool = False


def read_row(row: Mapping[str, Any], place: str) -> Chat | Completion | Text:
    """Reads a row of training data.

    Args:
        row: With one of the shapes that `SHAPES` names; what else it has is left out, but for `tools`, `finish_reason` (where
            it is `"length"`, the last reply was cut and its end is not learned) and the `written` of generated data.
        place: What to call the row in an error.

    Raises:
        InputError: if it has none of the shapes, or one that is damaged.
    """
    is_cut = row.get("finish_reason") == LENGTH
    if (messages := _messages(row, place)) is not None:
        return Chat(messages, _tools(row, place), tuple(row.get("written") or ()), is_cut)
    match row:
        case {"prompt": str(prompt), "completion": str(completion)}:
            return Completion(prompt, completion, is_cut)
        case {"text": str(text)}:
            return Text(text, is_cut)
    raise _no_shape(row, place, SHAPES)


def read_prompt(row: Mapping[str, Any], place: str) -> Chat:
    """Reads a row whose questions are to be answered.

    Args:
        row: With a shape that `read_row` takes, but for `text`, or with `prompt` alone, or `turns` (user messages, as in
            Spec-Bench).
        place: What to call the row in an error.

    Raises:
        InputError: as `read_row`.
    """
    if (messages := _messages(row, place)) is not None:
        return Chat(messages, _tools(row, place))
    match row:
        case {"prompt": str(prompt)} if prompt.strip():
            return Chat(({"role": "user", "content": prompt},))
        case {"prompt": [*_]}:
            return Chat(_chat(row["prompt"], place), _tools(row, place))
        case {"turns": [*turns]} if turns and all(isinstance(turn, str) for turn in turns):
            said = [({"role": "user", "content": turn}, {"role": "assistant", "content": ""}) for turn in turns]
            return Chat(tuple(message for pair in said for message in pair))
    raise _no_shape(row, place, "`messages`, `conversations` (ShareGPT), `prompt` or `turns`")


def _messages(row: Mapping[str, Any], place: str) -> tuple[Message, ...] | None:
    """The conversation of a row that has one."""
    for name in ("messages", "conversations"):
        if row.get(name) is not None:
            return _chat(row[name], place)
    prompt, completion = row.get("prompt"), row.get("completion")
    if completion is None or (isinstance(prompt, str) and isinstance(completion, str)):
        return None
    return _chat(prompt, place, "user") + _chat(completion, place, "assistant")


def _chat(messages: Any, place: str, role: str | None = None) -> tuple[Message, ...]:
    from trl.data_utils import maybe_convert_to_chatml

    if isinstance(messages, str) and role is not None:
        messages = [{"role": role, "content": messages}]
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError(f"{place}: a conversation must be a list of messages that is not empty, got {_short(messages)}.")
    # It renames within the messages that it is given.
    named = maybe_convert_to_chatml({"messages": copy.deepcopy(list(messages))})["messages"]
    return tuple(_message(message, place) for message in named)


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(
            f"{place}: a message must have `role` and `content`, or `from` and `value`, got {_short(message)}; correct the row."
        )
    # Tables fill the fields that other messages have with nothing.
    filled = {name: value for name, value in message.items() if value is not None}
    filled["role"] = ROLES.get(filled["role"], filled["role"])
    if isinstance(filled.get("content"), list):
        filled["content"] = _joined(filled["content"], place)
    if not isinstance(filled.setdefault("content", ""), str):
        raise InputError(f"{place}: the `content` of a message must be a string, got {_short(message)}; correct the row.")
    return filled


def _joined(parts: list[Any], place: str) -> str:
    texts = [isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts]
    if not all(texts):
        raise InputError(f"{place}: heads are trained on text, and a message has other parts: {_short(parts)}.")
    return "".join(part["text"] for part in parts)


def _tools(row: Mapping[str, Any], place: str) -> list[Any] | None:
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise InputError(f"{place}: `tools` must be a list or its JSON, got {_short(tools)}: {error}.") from error
    return list(tools) if tools else None


def _no_shape(row: Mapping[str, Any], place: str, shapes: str) -> InputError:
    columns = ", ".join(f"`{name}`{' (null)' if value is None else ''}" for name, value in row.items()) or "nothing"
    return InputError(f"{place}: a row must have {shapes}; this one has {columns}. Rename its columns or leave the row out.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
