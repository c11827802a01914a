"""The target's own answers: the same rows whatever happens on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.evaluation.prompts import InputError
from specheads.training import target_writer
from specheads.training.data_provenance import describe_data, provenance_of, template_arguments
from specheads.training.encoding import Encoder
from specheads.training.generate import generate_data, main
from specheads.training.generate_arguments import GenerateArguments
from specheads.training.row_files import OutputError
from specheads.training.sources import load_rows

from .conftest import save_target
from .templates import chat, tokenizer_for

ROOT = Path(__file__).parents[2]
QUESTIONS = [
    {"prompt": "What is the capital of France?"},
    {"messages": chat("Is it?", "An answer that is written anew.", "And the question?")},
    {"conversations": [{"from": "human", "value": "Paris?"}, {"from": "gpt", "value": "No."}]},
    {"turns": ["def add(a, b):", "Again."]},
    {"prompt": "what is the  capital of FRANCE?"},
    {"messages": [{"role": "system", "content": "Be kind."}, *chat("Is it?")]},
]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write(tmp_path / "questions.jsonl", QUESTIONS)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(folder: Path, pattern: str = "data/*.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob(pattern)) for line in file.read_text(encoding="utf-8").splitlines()]


def generated(model: Path, questions: Path, output: Path, **changes: Any) -> list[dict[str, Any]]:
    settings = {"max_new_tokens": 12, "batch_size": 2, "drafter": "suffix", **changes}
    generate_data(GenerateArguments(str(model), str(questions), output, **settings))
    return read(output)


def by_id(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_every_turn_is_answered_anew(target_folder: Path, questions: Path, tmp_path: Path) -> None:
    rows = generated(target_folder, questions, tmp_path / "out", max_new_tokens=100, seed=8)  # replies that end in time
    assert len(rows) == 5  # two questions are the same but for case and spaces
    turns = (1, 2, 1, 2, 1)
    assert any(row["unanswered"] == 0 and number == 2 for row, number in zip(rows, turns, strict=True))
    for row, asked, number in zip(rows, [QUESTIONS[place] for place in (0, 1, 2, 3, 5)], turns, strict=True):
        users = [message["content"] for message in row["messages"] if message["role"] == "user"]
        roles = [message["role"] for message in row["messages"] if message["role"] != "system"]
        assert roles == ["user", "assistant"] * len(users)
        everything = json.dumps(asked)
        assert all(json.dumps(user)[1:-1] in everything for user in users)
        assert "written anew" not in json.dumps(row["messages"])
        assert len(users) + row["unanswered"] == number
        assert row["unanswered"] == 0 or row["finish_reason"] == "length"
    assert rows[4]["messages"][0] == {"role": "system", "content": "Be kind."}


def test_the_target_wrote_what_is_learned(target_folder: Path, questions: Path, tmp_path: Path) -> None:
    """Greedy answers are those of plain `generate` on just the tokens that training sees before them."""
    from transformers import AutoModelForCausalLM

    rows = generated(target_folder, questions, tmp_path / "out", temperature=0.0, max_new_tokens=20)
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype="auto")
    compared = 0
    for row in rows:
        for example in Encoder(tokenizer_for("chatml")).examples(row, "row"):
            ids, mask = torch.tensor(example["input_ids"]), torch.tensor(example["loss_mask"])
            start = int(mask.int().argmax())
            given = {"input_ids": ids[None, :start], "attention_mask": torch.ones_like(ids[None, :start])}
            own = model.generate(**given, max_new_tokens=20, do_sample=False)[0, start:]
            stop = next((place for place in range(start, len(mask)) if not mask[place]), len(mask))
            # Random tokens may be written in more than one way; the text is what is compared.
            decode = tokenizer_for("chatml").decode
            assert decode(own).rstrip("\ufffd") == decode(ids[start:stop])
            compared += 1
    assert compared == len(rows)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 1},
        {"batch_size": 5},
        {"drafter": "none"},
        {"drafter": "recycling"},
        {"adaptive": False},
        {"streaming": True},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_rows_depend_on_nothing_but_question_and_seed(
    target_folder: Path, questions: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    temperature = changes.get("temperature", 1.0)
    first = generated(target_folder, questions, tmp_path / "a", temperature=temperature)
    second = generated(target_folder, questions, tmp_path / "b", **{**changes, "drafter": changes.get("drafter", "auto")})
    assert first == second


def test_seeds_and_order(target_folder: Path, questions: Path, tmp_path: Path) -> None:
    first = by_id(generated(target_folder, questions, tmp_path / "a"))
    backwards = write(tmp_path / "backwards.jsonl", QUESTIONS[::-1])
    again = by_id(generated(target_folder, backwards, tmp_path / "b"))
    # Which of two like questions comes first decides how it is put.
    same = [key for key in first if "capital" not in json.dumps(first[key]["messages"])]
    assert len(same) == 4 and all(first[key] == again[key] for key in same)
    other = by_id(generated(target_folder, questions, tmp_path / "c", seed=1))
    assert first.keys() == other.keys() and all(first[key] != other[key] for key in first)


def test_shards_give_the_rows_of_one_process(target_folder: Path, questions: Path, tmp_path: Path) -> None:
    whole = by_id(generated(target_folder, questions, tmp_path / "whole"))
    for number in range(3):
        rows = generated(target_folder, questions, tmp_path / "shards", shard=f"{number}/3")
    assert by_id(rows) == whole
    assert len(list((tmp_path / "shards" / "data").iterdir())) == 3


@pytest.mark.parametrize("torn", [b"", b'{"id": "ab', b'{"id": "ab", "messages": []}'], ids=["whole", "torn", "no line end"])
def test_a_run_goes_on_where_it_was(target_folder: Path, questions: Path, tmp_path: Path, torn: bytes) -> None:
    whole = generated(target_folder, questions, tmp_path / "whole")
    file = tmp_path / "part" / "data" / "train-00000-of-00001.jsonl"
    generated(target_folder, questions, tmp_path / "part", limit=3)
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    file.write_bytes(b"".join(lines) + torn)  # the second batch is half there
    assert generated(target_folder, questions, tmp_path / "part") == whole


def test_what_is_done_is_not_done_again(
    target_folder: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = generated(target_folder, questions, tmp_path / "out")
    monkeypatch.setattr(target_writer.TargetWriter, "_generate", lambda *_: pytest.fail("generates again"))
    assert generated(target_folder, questions, tmp_path / "out") == first


def command(model: Path, questions: Path, output: Path) -> list[str]:
    options = {"model": model, "dataset": questions, "output": output, "max_new_tokens": 60, "batch_size": 2}
    return [
        sys.executable,
        "train/generate.py",
        *(str(part) for name, value in options.items() for part in (f"--{name}", value)),
    ]


def test_a_killed_run_gives_the_same_rows(target_folder: Path, tmp_path: Path) -> None:
    questions = write(tmp_path / "questions.jsonl", [{"prompt": f"Question {number}?"} for number in range(40)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    settings: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    assert len(generated(target_folder, questions, tmp_path / "whole", max_new_tokens=60)) == 40
    file = tmp_path / "killed" / "data" / "train-00000-of-00001.jsonl"
    sizes = []
    for share in (4, 20):
        process = subprocess.Popen(command(target_folder, questions, tmp_path / "killed"), **settings)
        while process.poll() is None and not (file.exists() and file.read_bytes().count(b"\n") >= share):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        sizes.append(file.read_bytes().count(b"\n"))
    assert 4 <= sizes[0] < 40 and 20 <= sizes[1] < 40
    generated(target_folder, questions, tmp_path / "killed", max_new_tokens=60)
    assert file.read_bytes() == (tmp_path / "whole" / "data" / file.name).read_bytes()


def test_cut_and_failed_answers_are_counted(target_folder: Path, questions: Path, tmp_path: Path) -> None:
    options = GenerateArguments(str(target_folder), str(questions), tmp_path / "kept", max_new_tokens=3)
    counts = generate_data(options)
    rows = read(tmp_path / "kept")
    cut = [row for row in rows if row["finish_reason"] == "length"]
    assert counts["rows"] == 5 and counts["cut"] == len(cut) > 0 and counts["duplicates"] == 1
    assert counts["partly_answered"] == sum(row["unanswered"] > 0 for row in rows) > 0
    assert counts["tokens"] == sum(row["num_tokens"] for row in rows)
    options = GenerateArguments(str(target_folder), str(questions), tmp_path / "dropped", max_new_tokens=3, drop_cut=True)
    counts = generate_data(options)
    assert counts["failed: cut"] == sum(len(row["messages"]) <= 3 for row in cut)
    assert counts["rows"] + counts["failed: cut"] == 5
    assert all(row["finish_reason"] == "stop" for row in read(tmp_path / "dropped"))


def test_questions_that_are_too_long_are_counted_and_not_asked_again(target_folder: Path, tmp_path: Path) -> None:
    questions = write(tmp_path / "questions.jsonl", [{"prompt": "Paris " * 600}, *QUESTIONS[:1]])
    for _ in range(2):
        counts = generate_data(GenerateArguments(str(target_folder), str(questions), tmp_path / "out", max_new_tokens=8))
        assert counts["failed: too long"] == 1 and counts["rows"] == 1
    (failed,) = read(tmp_path / "out", "failed/*.jsonl")
    assert failed["reason"] == "too long" and "504 are the most" in failed["detail"]


def test_questions_that_will_be_measured_on_are_left_out(target_folder: Path, questions: Path, tmp_path: Path) -> None:
    measured = write(tmp_path / "measured.jsonl", [{"turns": ["WHAT IS the capital of France?"]}])
    options = GenerateArguments(str(target_folder), str(questions), tmp_path / "out", max_new_tokens=4, exclude=[str(measured)])
    counts = generate_data(options)
    assert counts["excluded"] == 2 and counts["rows"] == 4
    assert "capital" not in json.dumps(read(tmp_path / "out"))


def test_a_system_message_is_added_where_there_is_none(target_folder: Path, questions: Path, tmp_path: Path) -> None:
    rows = generated(target_folder, questions, tmp_path / "out", system="Be brief.")
    assert [row["messages"][0]["content"] for row in rows] == ["Be brief."] * 4 + ["Be kind."]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"temperature": 0.5}, "sampling.temperature was 1.0 and is 0.5"),
        ({"seed": 7, "max_new_tokens": 5}, "sampling.max_new_tokens was 12 and is 5; seed was 0 and is 7"),
        ({"template_arguments": '{"enable_thinking": false}'}, "template_arguments.enable_thinking was None and is False"),
        ({"shard": "0/2"}, "shards was 1 and is 2"),
        ({"system": "Be brief."}, "system was None and is 'Be brief.'"),
    ],
    ids=str,
)
def test_other_settings_are_refused_by_name(
    target_folder: Path, questions: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    first = generated(target_folder, questions, tmp_path / "out")
    with pytest.raises(InputError, match=sentence):
        generated(target_folder, questions, tmp_path / "out", **changes)
    assert read(tmp_path / "out") == first


def test_another_target_is_refused(target_folder: Path, questions: Path, tmp_path: Path) -> None:
    generated(target_folder, questions, tmp_path / "out")
    with pytest.raises(InputError, match=r"target\.chat_template_fingerprint was"):
        generated(save_target(tmp_path / "other", "qwen3"), questions, tmp_path / "out")


def test_the_folder_is_training_data_as_it_is(target_folder: Path, questions: Path, tmp_path: Path) -> None:
    rows = generated(target_folder, questions, tmp_path / "out", template_arguments='{"enable_thinking": false}')
    assert [row["messages"] for row in load_rows(str(tmp_path / "out"))] == [row["messages"] for row in rows]
    for source in (tmp_path / "out", tmp_path / "out" / "data" / "train-00000-of-00001.jsonl"):
        assert template_arguments([str(source)]) == {"enable_thinking": False}
        assert template_arguments([str(source)], {"enable_thinking": False}) == {"enable_thinking": False}
        with pytest.raises(InputError, match=r"was written under the template arguments .*False.*, not .*True"):
            template_arguments([str(source)], {"enable_thinking": True})
    provenance = provenance_of(str(tmp_path / "out"))
    assert provenance is not None and provenance["sampling"]["max_new_tokens"] == 12
    assert provenance["target"]["weights_fingerprint"] and provenance["origin"]["versions"]["transformers"]
    kept = describe_data([str(tmp_path / "out")], {"enable_thinking": False})
    assert kept["template_arguments"] == {"enable_thinking": False}
    assert kept["datasets"][0]["target"] == provenance["target"]
    assert provenance_of(str(questions)) is None and template_arguments([str(questions)]) == {}


@pytest.mark.parametrize("template", ["llama3", "gemma", "mistral", "qwen3", "opens-thought"])
def test_what_is_learned_is_what_was_written_under_every_template(template: str, tmp_path: Path) -> None:
    folder = save_target(tmp_path / "model", template)
    questions = write(tmp_path / "questions.jsonl", [{"turns": ["Is it?", "Sure?"]}, {"prompt": "Paris?"}, {"prompt": "Why?"}])
    told: list[tuple[str, str]] = []
    read_reply = target_writer.TargetWriter._read

    def overheard(self: Any, ask: Any, asked: str, ids: list[int]) -> Any:
        ends = {self.tokenizer.eos_token_id}
        told.append((asked, self.tokenizer.decode([token for token in ids if token not in ends]).rstrip("\ufffd")))
        return read_reply(self, ask, asked, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_writer.TargetWriter, "_read", overheard)
        rows = generated(folder, questions, tmp_path / "out", max_new_tokens=30)
    tokenizer, learned = tokenizer_for(template), []
    for row in rows:
        for example in Encoder(tokenizer).examples(row, "row"):
            mask = example["loss_mask"]
            starts = [place for place in range(1, len(mask)) if mask[place] and not mask[place - 1]]
            for start in starts:
                stop = next((place for place in range(start, len(mask)) if not mask[place]), len(mask))
                text = tokenizer.decode(example["input_ids"][start:stop])
                learned.append((tokenizer.decode(example["input_ids"][:start]), text))
    assert len(learned) == len(told) >= 3
    for asked, written in told:
        # An end token may follow, if the reply was not cut.
        assert any(before == asked and text.startswith(written) for before, text in learned), (asked, written)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--shard", "4/4"], "--shard must be this process"),
        (["--temperature", "-1"], "--temperature must be a finite number"),
        (["--template_arguments", "[1]"], "--template-arguments must be a JSON object"),
        (["--batch_size", "0"], "--batch-size must be at least 1"),
        (["--top_p", "0"], "--top-p must be in"),
        (["--dataset", "none.jsonl"], "There is no file or folder none.jsonl"),
        (["--model", "/none"], "The model /none cannot be loaded: there is no such folder"),
        (["--dtype", "double"], "--dtype must be one of auto, float32"),
        (["--drafter", "nonsense"], "cannot be used"),
    ],
    ids=str,
)
def test_bad_input_is_one_sentence(
    target_folder: Path, questions: Path, tmp_path: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(target_folder), "--dataset", str(questions), "--output", str(tmp_path / "out"), *options]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error


def test_a_question_that_is_none_is_named(target_folder: Path, tmp_path: Path) -> None:
    questions = write(tmp_path / "q.jsonl", [QUESTIONS[0], {"text": "Just a text."}])
    with pytest.raises(
        InputError, match=r"q.jsonl, row 2: a row must have .*this one has `text`|this one has `prompt` \(null\), `text`"
    ):
        generated(target_folder, questions, tmp_path / "out")
    questions = write(tmp_path / "q.jsonl", [{"messages": chat("", "b")[1:]}])
    with pytest.raises(InputError, match="row 1: there is no question, only replies"):
        generated(target_folder, questions, tmp_path / "out2")


def test_a_full_disk_leaves_whole_lines(
    target_folder: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = generated(target_folder, questions, tmp_path / "whole")
    room, real = (tmp_path / "whole" / "data" / "train-00000-of-00001.jsonl").stat().st_size * 2 // 3, os.write

    def write_until_full(descriptor: int, data: Any) -> int:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        written = real(descriptor, data[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", write_until_full)
    with pytest.raises(OutputError, match=r"cannot be written \(No space left on device\); its \d lines so far are whole"):
        generated(target_folder, questions, tmp_path / "full")
    monkeypatch.undo()
    left = read(tmp_path / "full")
    assert left == whole[: len(left)] and 0 < len(left) < len(whole)
    assert generated(target_folder, questions, tmp_path / "full") == whole


def test_a_limit_of_the_system_leaves_whole_lines(target_folder: Path, tmp_path: Path) -> None:
    """The same through the real command, with a file size that the system refuses to exceed."""
    questions = write(tmp_path / "questions.jsonl", [{"prompt": f"Question {number}?"} for number in range(40)])
    whole = generated(target_folder, questions, tmp_path / "whole", max_new_tokens=60)
    asked = " ".join(command(target_folder, questions, tmp_path / "full"))
    limit = f"ulimit -f 4; exec {asked} --streaming"  # blocks of 1024 bytes; a stream leaves no copy that would be cut itself
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", limit], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("generate.py: ") and "cannot be written (File too large); its" in last
    left = read(tmp_path / "full")
    assert left == whole[: len(left)] and 0 < len(left) < len(whole)


def test_a_folder_that_cannot_be_written_is_one_sentence(
    target_folder: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    given = ["--model", str(target_folder), "--dataset", str(questions), "--output", str(tmp_path / "file" / "out")]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert "cannot be written (Not a directory); choose a folder that can be written to." in error


def test_two_processes_do_not_write_the_same_file(target_folder: Path, questions: Path, tmp_path: Path) -> None:
    from specheads.training.row_files import OutputFolder

    held = OutputFolder(tmp_path / "out", (0, 1))
    with pytest.raises(InputError, match="is being written by another process"):
        generated(target_folder, questions, tmp_path / "out")
    held.close()
    assert len(generated(target_folder, questions, tmp_path / "out")) == 5


def test_a_damaged_line_is_named(target_folder: Path, questions: Path, tmp_path: Path) -> None:
    generated(target_folder, questions, tmp_path / "out")
    file = tmp_path / "out" / "data" / "train-00000-of-00001.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"\x00\x00\n" + lines[2])
    with pytest.raises(InputError, match=r"line 2, is damaged"):
        generated(target_folder, questions, tmp_path / "out")
