"""From files and the Hub's formats to batches."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from specheads.evaluation.prompts import InputError
from specheads.training.data import Collator, WithPrompts, training_dataset
from specheads.training.packing import block_diagonal_mask, check_packable, target_inputs
from specheads.training.sources import load_rows
from tests.tiny import FAMILIES, tiny

from .templates import chat, tokenizer_for

CHATS = [chat("Is it?", "Yes, it is."), chat("Paris?", "Paris.", "And?", "I do not know."), chat("No.", "No.", "No.", "No.")]
ROWS = [{"messages": messages, "id": str(number)} for number, messages in enumerate(CHATS)]


@pytest.fixture(autouse=True)
def _no_shared_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def saved(folder: Path, kind: str) -> Path:
    table = datasets.Dataset.from_list(ROWS)
    path = folder / f"rows.{kind}"
    match kind:
        case "jsonl":
            return jsonl(path)
        case "json":
            path.write_text(json.dumps(ROWS), encoding="utf-8")
        case "jsonl.gz":
            path.write_bytes(gzip.compress(jsonl(folder / "rows.jsonl").read_bytes()))
        case "parquet":
            table.to_parquet(path)
        case "arrow":
            table.save_to_disk(folder / "saved")
            return next((folder / "saved").glob("*.arrow"))
        case "saved":
            table.save_to_disk(path)
        case "splits":
            datasets.DatasetDict({"train": table}).save_to_disk(path)
        case "folder":
            path.mkdir()
            jsonl(path / "train-00000-of-00001.jsonl")
    return path


KINDS = ("jsonl", "json", "jsonl.gz", "parquet", "arrow", "saved", "splits", "folder")


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_examples(tmp_path: Path, kind: str, streaming: bool) -> None:
    rows = load_rows(str(saved(tmp_path, kind)), streaming=streaming)
    found = list(training_dataset(rows, tokenizer_for("llama3")))
    assert found == list(training_dataset(datasets.Dataset.from_list(ROWS), tokenizer_for("llama3")))
    assert len(found) == 3 and all(set(example) == {"input_ids", "loss_mask"} for example in found)


def test_every_shape_gives_the_same_examples_from_a_file(tmp_path: Path) -> None:
    sharegpt = [
        {"conversations": [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in messages]}
        for messages in CHATS
    ]
    pairs = [{"prompt": messages[:1], "completion": messages[1:]} for messages in CHATS]
    texts = [{"text": tokenizer_for("chatml").apply_chat_template(messages, tokenize=False)} for messages in CHATS]
    first, *others = [
        list(training_dataset(load_rows(str(jsonl(tmp_path / f"{number}.jsonl", rows))), tokenizer_for("chatml")))
        for number, rows in enumerate([ROWS, sharegpt, pairs, texts])
    ]
    assert all(other == first for other in others)


def test_a_file_is_the_training_split_whatever_is_asked_for(tmp_path: Path) -> None:
    assert len(load_rows(str(jsonl(tmp_path / "rows.jsonl")), split="test")) == 3
    assert len(load_rows(str(jsonl(tmp_path / "rows.jsonl")), split="test[:2]")) == 2


def test_a_part_of_the_messages_may_have_more_fields(tmp_path: Path) -> None:
    rows = [{"messages": chat("a", "b")}, {"messages": [{**chat("a")[0], "name": "Ann"}, *chat("a", "b")[1:]], "tools": None}]
    table = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(table)  # where the other row has nothing, it says None
    first, second = training_dataset(load_rows(str(table)), tokenizer_for("chatml"))
    assert first == second


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.jsonl", None, "There is no file or folder"),
        ("rows.txt", "Hello", "none of the suffixes"),
        ("rows.jsonl", '{"messages": [', "cannot be read"),
        ("rows.jsonl", "", "is an empty file"),
        ("rows.parquet", "Hello", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(tmp_path: Path, name: str, content: str | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=sentence) as refused:
        load_rows(str(tmp_path / name))
    assert "\n" not in str(refused.value)


def test_a_missing_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no split 'test'; it has train"):
        load_rows(str(saved(tmp_path, "splits")), split="test")


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
def test_a_row_without_a_reply_is_an_error_that_names_it(tmp_path: Path, streaming: bool) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [*ROWS, {"messages": chat("Is it?"), "id": "3"}])
    with pytest.raises(InputError, match="mine, row 4: there is no reply"):
        list(training_dataset(load_rows(str(path), streaming=streaming), tokenizer_for("chatml"), name="mine"))


def test_the_share_of_learned_tokens_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="specheads.training.data"):
        examples = list(training_dataset(datasets.Dataset.from_list(ROWS), tokenizer_for("chatml"), name="mine"))
    tokens = sum(len(example["input_ids"]) for example in examples)
    learned = sum(sum(example["loss_mask"]) for example in examples)
    assert f"mine: 3 examples, {learned} of {tokens} tokens are the assistant's ({learned / tokens:.1%})" in caplog.messages


def test_the_share_is_logged_of_a_stream_too(caplog: pytest.LogCaptureFixture) -> None:
    stream = datasets.Dataset.from_list(ROWS * 4).to_iterable_dataset()
    with caplog.at_level(logging.INFO, logger="specheads.training.data"):
        list(training_dataset(stream, tokenizer_for("chatml"), name="mine"))
    assert any(message.startswith("mine, so far: 10 examples") for message in caplog.messages)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
def test_examples_whose_replies_come_too_late_are_left_out(streaming: bool, caplog: pytest.LogCaptureFixture) -> None:
    rows = datasets.Dataset.from_list([{"messages": chat("What is it? " * 40, "Yes.")}, *ROWS])
    rows = rows.to_iterable_dataset() if streaming else rows
    with caplog.at_level(logging.INFO, logger="specheads.training.data"):
        examples = list(training_dataset(rows, tokenizer_for("gemma"), max_length=30, name="mine"))
    assert len(examples) == 3 and all(len(example["input_ids"]) <= 30 and any(example["loss_mask"]) for example in examples)
    assert streaming or "1 left out" in caplog.text


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(InputError, match="no example is left of 3 rows"):
        training_dataset(datasets.Dataset.from_list(ROWS), tokenizer_for("gemma"), max_length=4)


def test_several_processes_encode_the_same() -> None:
    rows = datasets.Dataset.from_list(ROWS)
    assert list(training_dataset(rows, tokenizer_for("gemma"), num_proc=2)) == list(
        training_dataset(rows, tokenizer_for("gemma"))
    )


def test_a_batch_is_padded_at_the_right() -> None:
    examples = [{"input_ids": [5, 6, 7], "loss_mask": [False, True, True]}, {"input_ids": [8], "loss_mask": [True]}]
    batch = Collator(pad_token_id=0)(examples)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["loss_mask"].dtype == torch.bool and "segment_ids" not in batch


def test_prompts_are_learned_too_if_asked_for() -> None:
    examples = [{"input_ids": [5, 6, 7], "loss_mask": [False, False, True]}, {"input_ids": [5], "loss_mask": [True]}]
    alone, both = Collator(0)(examples), WithPrompts(Collator(0))(examples)
    assert alone["loss_mask"].int().tolist() == [[0, 0, 1], [1, 0, 0]]
    assert both["loss_mask"].int().tolist() == [[1, 1, 1], [1, 0, 0]]
    assert torch.equal(alone["input_ids"], both["input_ids"])


def test_positions_begin_anew_with_each_example() -> None:
    examples = [
        {"input_ids": [5, 6, 7], "loss_mask": [True] * 3, "segment_ids": [1, 1, 2]},
        {"input_ids": [8], "loss_mask": [True], "segment_ids": [1]},
    ]
    batch = Collator(pad_token_id=0)(examples)
    assert batch["segment_ids"].tolist() == [[1, 1, 2], [1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 0], [0, 0, 1]]


def packed(length: int, streaming: bool = False) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The examples, and the rows that they are packed into."""
    rows = datasets.Dataset.from_list(ROWS * 3)
    alone = list(training_dataset(rows, tokenizer_for("chatml")))
    rows = rows.to_iterable_dataset() if streaming else rows
    return alone, list(training_dataset(rows, tokenizer_for("chatml"), max_length=length, packing=True))


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
def test_packing_keeps_every_example(streaming: bool) -> None:
    alone, rows = packed(256, streaming)
    assert len(rows) < len(alone) and all(len(row["input_ids"]) <= 256 for row in rows)
    unpacked = []
    for row in rows:
        for segment in range(1, max(row["segment_ids"]) + 1):
            places = [place for place, number in enumerate(row["segment_ids"]) if number == segment]
            assert places == list(range(places[0], places[-1] + 1))
            unpacked.append({name: [row[name][place] for place in places] for name in ("input_ids", "loss_mask")})
    assert sorted(unpacked, key=str) == sorted(alone, key=str)


PACKED_FAMILIES = ("llama", "qwen3", "mistral", "gemma3_text", "gpt2", "gpt_neox")


def hidden_states(model: Any, inputs: dict[str, Any]) -> Any:
    return model(**inputs, use_cache=False).logits


def worst_difference(model: Any, give: Any) -> float:
    """How much packing changes the target's scores at most."""
    alone, rows = packed(256)
    batch = Collator(pad_token_id=0)(rows)
    together = hidden_states(model, give(batch))
    by_ids = {tuple(example["input_ids"]): example for example in alone}
    worst, seen = 0.0, 0
    for line, segments in enumerate(batch["segment_ids"]):
        for segment in range(1, int(segments.max()) + 1):
            ids = batch["input_ids"][line, segments == segment]
            assert tuple(ids.tolist()) in by_ids
            single = hidden_states(model, {"input_ids": ids[None]})[0]
            worst = max(worst, float((together[line, segments == segment] - single).abs().max()))
            seen += 1
    assert seen == len(alone)
    return worst


@pytest.mark.parametrize("family", PACKED_FAMILIES)
@torch.no_grad()
def test_a_packed_example_is_computed_as_if_it_were_alone(family: str) -> None:
    check_packable(model := tiny(family, vocab_size=len(tokenizer_for("chatml"))))
    assert worst_difference(model, target_inputs) < 1e-9
    with_mask = worst_difference(model, lambda batch: {**target_inputs(batch), "attention_mask": batch["attention_mask"]})
    assert with_mask > 1e-3  # the mask switches off what keeps them apart, so the comparison can fail


@torch.no_grad()
def test_the_mask_for_heads_is_block_diagonal() -> None:
    model = tiny("llama", vocab_size=len(tokenizer_for("chatml")))

    def masked(batch: dict[str, Any]) -> dict[str, Any]:
        mask = block_diagonal_mask(batch["segment_ids"])
        added = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
        return {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "attention_mask": added}

    assert worst_difference(model, masked) < 1e-9
    assert block_diagonal_mask(torch.tensor([[1, 1, 2, 0]]))[0, 0].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ]


@pytest.mark.parametrize(("family", "why"), [("mamba2", "carries a state"), ("bloom", "no position ids")])
def test_targets_that_cannot_keep_examples_apart_are_refused(family: str, why: str) -> None:
    assert family in FAMILIES
    with pytest.raises(InputError, match=f"cannot be packed for a target of type {family}: .*{why}"):
        check_packable(tiny(family))
