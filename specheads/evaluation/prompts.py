"""Prompt files and datasets of the usual layouts, and prompts as batches of a model's inputs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

LAYOUTS = ("turns", "prompt", "messages", "question")
Asked = TypeVar("Asked")

NAMES = ("question_id", "prompt_id", "task_id", "id")
TABLES = (".parquet", ".arrow", ".gz", ".zst", ".xz", ".bz2")  # files that `datasets` reads
TEXTS = (".jsonl", ".json", ".ndjson", ".txt")


class InputError(ValueError):
    """What the user gave cannot be used; the message is one sentence that says why."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Args:
        name: Its name in the file, or its line number.
        category: Its category in the file, `"all"` if there is none.
        messages: The chat, up to the answer that is to be generated.
        later: What the user says after that answer, and after each further one.
    """

    name: str
    category: str
    messages: tuple[dict[str, str], ...]
    later: tuple[str, ...] = ()


@dataclass
class PromptOptions:
    """The options of a command that say which prompts it takes."""

    prompts: str = field(
        metadata={
            "help": "JSON lines with `turns` (Spec-Bench, MT-bench), `prompt` (HumanEval), `question` (GSM8K) or `messages`; "
            "plain text, one prompt a line; or a dataset of such rows: a Hub id, a folder, a Parquet or compressed file"
        }
    )
    subset: str | None = field(default=None, metadata={"help": "of a dataset: the name of one of its configurations"})
    split: str = field(default="test", metadata={"help": "of a dataset: which part of it"})
    limit: int | None = field(default=None, metadata={"help": "how many prompts, taken evenly from the file"})

    def read(self) -> list[Prompt]:
        """The prompts that are asked for.

        Raises:
            InputError: as `read_prompts` does.
        """
        return spread(read_prompts(self.prompts, self.split, self.subset), self.limit)


def read_prompts(source: str | Path, split: str = "test", subset: str | None = None) -> list[Prompt]:
    """Reads prompts.

    Args:
        source: A file: JSON lines, each with `turns` (as in Spec-Bench and MT-bench), `prompt` (as in HumanEval; a list of
            turns or a chat will do), `question` (as in GSM8K) or `messages` (a chat; answers at its end are left out), or plain
            text with one prompt a line. Or a dataset of such rows, as `training.sources.load_rows` opens it.
        split: Of a dataset.
        subset: Of a dataset.

    Raises:
        InputError: if it cannot be opened, if it holds no prompt, or if a line has none of the layouts.
    """
    path = Path(source)
    if _is_dataset(path):
        rows = _load_rows(str(source), split, subset)
        return [_parse_record(row, f"{source}, row {number}", number) for number, row in enumerate(rows, start=1)]
    return _read_file(path)


def _is_dataset(path: Path) -> bool:
    if path.exists():
        return path.is_dir() or path.suffix in TABLES
    return path.suffix not in TEXTS and re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) is not None


def _load_rows(source: str, split: str, subset: str | None) -> Any:
    try:
        from ..training.sources import load_rows

        rows = load_rows(source, split, subset)
    except ModuleNotFoundError as error:
        raise InputError(f"To read the dataset {source} takes the package {error.name}: run `pip install datasets`.") from error
    if not len(rows):
        raise InputError(f"The dataset {source} holds no prompt.")
    return rows


def _read_file(path: Path) -> list[Prompt]:
    try:
        # Not `splitlines`: a JSON string may hold characters that it takes for line ends.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The prompt file {path} cannot be read: {error}.") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise InputError(f"The prompt file {path} holds no prompt.")
    if numbered[0][1].lstrip().startswith("{"):
        return [_parse_record(_parse_json(line, path, number), f"{path}, line {number}", number) for number, line in numbered]
    return [_from_text(line.strip(), str(number)) for number, line in numbered]


OF_OUTPUT = ("output", "resume", "report", "markdown", "texts")


def settings_of(options: Any, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What a measurement depends on: the options of its command but for those about the output, and a hash of what is asked."""
    asked = json.dumps([asdict(prompt) for prompt in prompts], ensure_ascii=False)
    kept = {name: value for name, value in asdict(options).items() if name not in OF_OUTPUT}
    return {**kept, "prompts_sha256": hashlib.sha256(asked.encode()).hexdigest()}


def check_counts(options: object, *names: str) -> None:
    """Raises `InputError` if one of these options is given and below 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")


def spread(prompts: Sequence[Asked], limit: int | None) -> list[Asked]:
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


def _parse_record(record: Mapping[str, Any], place: str, number: int) -> Prompt:
    messages, later = _parse_turns(record)
    if not messages:
        wanted = ", ".join(f"`{layout}`" for layout in LAYOUTS)
        raise InputError(
            f"{place}, needs a prompt in one of {wanted}; it has {', '.join(f'`{key}`' for key in record) or 'nothing'}."
        )
    name = next((record[key] for key in NAMES if record.get(key) is not None), number)
    return Prompt(str(name), str(record.get("category") or "all"), messages, later)


def _parse_turns(record: Mapping[str, Any]) -> tuple[tuple[dict[str, str], ...], tuple[str, ...]]:
    """The chat up to the first answer, and the user's later turns; the former is empty if there is none."""
    match record:
        case {"turns": [str(first), *later]} | {"prompt": [str(first), *later]} if first.strip():
            return _from_text(first, "").messages, tuple(map(str, later))
        case {"prompt": str(text)} | {"question": str(text)} if text.strip():
            return _from_text(text, "").messages, ()
        case {"messages": [*messages]} | {"prompt": [*messages]} if all(_is_message(message) for message in messages):
            chat = [{"role": message["role"], "content": message["content"]} for message in messages]
            while chat and chat[-1]["role"] == "assistant":
                chat.pop()
            return tuple(chat), ()
    return (), ()


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _from_text(text: str, name: str) -> Prompt:
    return Prompt(name, "all", ({"role": "user", "content": text},))
