from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from specheads.evaluation.prompts import InputError, Prompt, encode, in_batches, read_prompts, spread

USER = {"role": "user", "content": "Hello"}


def write(folder: Path, text: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ('{"question_id": 81, "category": "qa", "turns": ["Hello", "Again"]}', Prompt("81", "qa", (USER,), ("Again",))),
        ('{"prompt_id": 5, "prompt": ["Hello", "Again", "And?"]}', Prompt("5", "all", (USER,), ("Again", "And?"))),
        ('{"prompt": [{"role": "user", "content": "Hello"}]}', Prompt("1", "all", (USER,))),
        ('{"question": "Hello", "answer": "Hi"}', Prompt("1", "all", (USER,))),
        ('{"task_id": "HumanEval/0", "prompt": "Hello"}', Prompt("HumanEval/0", "all", (USER,))),
        ('{"messages": [{"role": "user", "content": "Hello"}]}', Prompt("1", "all", (USER,))),
        (
            '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}',
            Prompt("1", "all", (USER,)),
        ),
        ("Hello", Prompt("1", "all", (USER,))),
    ],
)
def test_every_layout_gives_the_chat_to_be_answered(tmp_path: Path, line: str, prompt: Prompt) -> None:
    assert read_prompts(write(tmp_path, line + "\n\n")) == [prompt]


def test_a_line_separator_within_a_json_string_ends_no_line(tmp_path: Path) -> None:
    (prompt,) = read_prompts(write(tmp_path, '{"prompt": "one\u2028two"}\n'))
    assert prompt.messages[0]["content"] == "one\u2028two"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("\n\n", "holds no prompt"),
        ('{"prompt": "Hello"}\n{"prompt": "Hel', "line 2, is not JSON"),
        ('{"prompt": "Hello"}\n[1]', "line 2, is not a JSON object"),
        ('{"instruction": "Hello", "answer": "Hi"}', "it has `instruction`, `answer`"),
        ('{"turns": []}', "needs a prompt"),
        ('{"prompt": " "}', "needs a prompt"),
        ('{"messages": [{"role": "assistant", "content": "Hi"}]}', "needs a prompt"),
        ('{"messages": ["Hello"]}', "needs a prompt"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read_prompts(write(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")


@pytest.mark.parametrize("suffix", ["prompts.parquet", "prompts.jsonl.gz", ""])
def test_a_dataset_is_read_like_a_file(tmp_path: Path, suffix: str) -> None:
    rows = datasets.Dataset.from_list([{"question": "Hello", "category": None}, {"question": "Hello", "category": "qa"}])
    if suffix.endswith("parquet"):
        rows.to_parquet(tmp_path / suffix)
    elif suffix:
        rows.to_json(tmp_path / suffix, compression="gzip")
    else:
        datasets.DatasetDict({"test": rows}).save_to_disk(str(tmp_path / "saved"))
    assert read_prompts(tmp_path / (suffix or "saved")) == [Prompt("1", "all", (USER,)), Prompt("2", "qa", (USER,))]


def prompts_of(categories: str) -> list[Prompt]:
    return [Prompt(str(place), category, (USER,)) for place, category in enumerate(categories)]


def test_a_limit_takes_from_every_part() -> None:
    taken = spread(prompts_of("aaaabbbbcccc"), 3)
    assert [prompt.category for prompt in taken] == ["a", "b", "c"]
    assert spread(taken, 9) == taken
    assert spread(taken, None) == taken


def test_batches_hold_one_category() -> None:
    batches = list(in_batches(prompts_of("abaab"), 2))
    assert [[prompt.name for prompt in batch] for batch in batches] == [["0", "2"], ["3"], ["1", "4"]]


def test_the_chat_template_is_applied_and_rows_are_padded_on_the_left(tokenizer: Any) -> None:
    longer = Prompt("2", "all", ({"role": "user", "content": "Hello again"},))
    inputs = encode(tokenizer, [Prompt("1", "all", (USER,)), longer])
    text = tokenizer.decode(inputs["input_ids"][0][inputs["attention_mask"][0].bool()])
    assert text == "[user] Hello\n[assistant] "
    assert inputs["attention_mask"][0].tolist() == [0] * len(" again") + [1] * len(text)
    assert bool(inputs["attention_mask"][1].all())
