"""Makes a datastore for the drafter `retrieval:FOLDER` from text: `python -m specheads.drafters.retrieval_build --help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .retrieval_store import build_store


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the files, builds the store, and says what is in it.

    Args:
        arguments: Those of the command line, if not the process's own.

    Raises:
        ValueError: if a file is of another kind, or lacks the field.
    """
    parser = argparse.ArgumentParser(
        prog="python -m specheads.drafters.retrieval_build",
        description="Makes a datastore, or a new version of one, from text. Whoever has the old version open goes on with it.",
    )
    parser.add_argument("files", nargs="+", type=Path, help="text files, a document each, or .jsonl, a document a line")
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="the store")
    parser.add_argument("--tokenizer", required=True, metavar="ID", help="the target's: a folder or Hub id")
    parser.add_argument(
        "--field",
        default="text",
        help="where a line of .jsonl has its document: text, token ids, or chat messages (default: text)",
    )
    given = parser.parse_args(arguments)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    documents = (ids for file in given.files for ids in documents_of(file, given.field, tokenizer))
    known = build_store(given.output, documents, tokenizer).description
    print(f"{known.documents} documents, {known.tokens} tokens: use it as the drafter retrieval:{given.output}")


def documents_of(file: Path, field: str, tokenizer: Any) -> Iterator[list[int]]:
    """The documents of a file as token ids.

    Args:
        file: A `.jsonl` file, or one of plain text, which is a single document.
        field: Where a line of `.jsonl` has its document. Of chat messages the assistant's are taken, each a document.
        tokenizer: The target's.

    Raises:
        ValueError: naming the file and line whose field is missing or of another kind.
    """
    if file.suffix != ".jsonl":
        yield _encoded(file.read_text(encoding="utf-8"), tokenizer)
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            value = _record(line, file, number).get(field)
            if isinstance(value, str):
                yield _encoded(value, tokenizer)
            elif isinstance(value, list) and all(type(token) is int for token in value):
                yield value
            elif isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
                yield from (_encoded(turn["content"], tokenizer) for turn in value if turn.get("role") == "assistant")
            else:
                raise ValueError(
                    f"{file}, line {number}: the field {field!r} must be text, token ids or messages, got {value!r}."
                )


def _record(line: str, file: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}, line {number}, is not JSON: {error}.") from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{file}, line {number}, must be a JSON object with the field of the document, got {line.strip()[:40]}."
        )
    return record


def _encoded(text: str, tokenizer: Any) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"retrieval_build: {error}", file=sys.stderr)
        raise SystemExit(2) from None
