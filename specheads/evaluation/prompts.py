"""Prompt files of the usual layouts, and prompts as batches of a model's inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYOUTS = ("turns", "prompt", "messages")
NAMES = ("question_id", "task_id", "id")


class InputError(ValueError):
    """What the user gave cannot be used; the message is one sentence that says why."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Args:
        name: Its name in the file, or its line number.
        category: Its category in the file, `"all"` if there is none.
        messages: The chat, up to the answer that is to be generated.
    """

    name: str
    category: str
    messages: tuple[dict[str, str], ...]


def read_prompts(path: Path) -> list[Prompt]:
    """Reads a prompt file.

    Args:
        path: JSON lines, each with `turns` (as in Spec-Bench; the first one is used), `prompt` (as in HumanEval) or `messages`
            (a chat; answers at its end are left out), or plain text with one prompt a line.

    Raises:
        InputError: if there is no such file, if it holds no prompt, or if a line has none of the layouts.
    """
    try:
        # Not `splitlines`: a JSON string may hold characters that it takes for line ends.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The prompt file {path} cannot be read: {error}.") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise InputError(f"The prompt file {path} holds no prompt.")
    if numbered[0][1].lstrip().startswith("{"):
        return [_parse_record(_parse_json(line, path, number), path, number) for number, line in numbered]
    return [_from_text(line.strip(), str(number)) for number, line in numbered]


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most `limit` prompts, taken evenly from the whole, so that a file in order of category loses none of them first."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    return [prompts[index * len(prompts) // limit] for index in range(limit)]


def in_batches(prompts: Sequence[Prompt], size: int) -> Iterator[list[Prompt]]:
    """Batches of at most `size` prompts, each of one category, in the order of the file."""
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    for category in categories:
        members = [prompt for prompt in prompts if prompt.category == category]
        for start in range(0, len(members), size):
            yield members[start : start + size]


def encode(tokenizer: Any, prompts: Sequence[Prompt]) -> Any:
    """The inputs of a model for a batch of prompts: through the chat template if the tokenizer has one, padded on the left."""
    has_template = tokenizer.chat_template is not None
    if has_template:
        texts = [
            tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
            for prompt in prompts
        ]
    else:
        texts = ["\n".join(message["content"] for message in prompt.messages) for prompt in prompts]
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # The template has written the special tokens already.
    inputs = tokenizer(texts, add_special_tokens=not has_template, padding=True, return_tensors="pt")
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def _parse_json(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {number}, is not JSON: {error}.") from error
    if not isinstance(record, dict):
        raise InputError(f"{path}, line {number}, is not a JSON object.")
    return record


def _parse_record(record: dict[str, Any], path: Path, number: int) -> Prompt:
    messages = _parse_messages(record)
    if not messages:
        wanted = ", ".join(f"`{layout}`" for layout in LAYOUTS)
        raise InputError(
            f"{path}, line {number}, needs a prompt in one of {wanted}; "
            f"it has {', '.join(f'`{key}`' for key in record) or 'nothing'}."
        )
    name = next((record[key] for key in NAMES if key in record), number)
    return Prompt(str(name), str(record.get("category", "all")), messages)


def _parse_messages(record: dict[str, Any]) -> tuple[dict[str, str], ...]:
    match record:
        case {"turns": [str(first), *_]} if first.strip():
            return _from_text(first, "").messages
        case {"prompt": str(text)} if text.strip():
            return _from_text(text, "").messages
        case {"messages": [*messages]} if all(_is_message(message) for message in messages):
            chat = [{"role": message["role"], "content": message["content"]} for message in messages]
            while chat and chat[-1]["role"] == "assistant":
                chat.pop()
            return tuple(chat)
    return ()


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _from_text(text: str, name: str) -> Prompt:
    return Prompt(name, "all", ({"role": "user", "content": text},))
