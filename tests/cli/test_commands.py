"""The command `specheads`, run as a user runs it."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import specheads
from specheads.cli import main, options
from specheads.cli.chat import Chat
from specheads.cli.session import Session, Settings
from specheads.cli.terminal import RoundPrinter
from specheads.drafters import STORED
from specheads.drafters.base import OF_TARGET, REGISTRY
from specheads.rounds import DraftRound

from ..evaluation.conftest import *  # noqa: F403


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory: pytest.TempPathFactory, model: Any, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("head")
    config = specheads.EagleConfig.from_target(model, draft_vocab_size=None, tokenizer=tokenizer)
    specheads.EagleHead(config).save_pretrained(folder)
    return folder


def test_help_needs_no_torch() -> None:
    script = (
        "import sys; from specheads.cli import main; "
        "codes = [main([*command, '--help']) for command in ([], ['generate'], ['chat'], ['eval'])]; "
        "assert codes == [0] * 4; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "convert" in found.stdout


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_names_every_drafter_and_every_setting(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    known = {name.partition(":")[0] for name in options.DRAFTERS}
    assert known == {*REGISTRY, *OF_TARGET, STORED.removesuffix(":")}
    assert all(name in printed for name in options.DRAFTERS)
    assert set(options.OF_SESSIONS) == {field.name for field in fields(Settings)}
    assert all(f"--{name.replace('_', '-')}" in printed for name in [*options.OF_SESSIONS, "system", "show_drafts"])


def test_generate_gives_the_text_of_the_model(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["generate", "abcabcabc", "--model", str(model_folder), "--max-new-tokens", "12"]
    assert main([*asked, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert main([*asked, "--json", "--drafter", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == record["text"]
    assert record["speculation"]["num_emitted_tokens"] == record["tokens"] == 12
    monkeypatch.setattr(sys, "stdin", io.StringIO("abcabcabc"))
    assert main(["generate", *asked[2:]]) == 0
    printed = capsys.readouterr()
    assert printed.out.rstrip("\n") == record["text"].rstrip("\n")
    assert "mean acceptance length" in printed.err


def test_a_chat_computes_nothing_twice_and_an_interruption_ends_the_reply_only(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(Settings(model=str(model_folder), max_new_tokens=10))
    read: list[int] = []
    forward = type(session.model).forward
    monkeypatch.setattr(
        type(session.model), "forward",
        lambda self, input_ids=None, **more: (read.append(input_ids.shape[1]), forward(self, input_ids=input_ids, **more))[1],
    )  # fmt: skip
    printed = io.StringIO()
    chat = Chat(session, Console(file=printed, highlight=False))
    lines = iter(["A first long question, and more of it.", "And?", "/nonsense", "/reset", "Why?"])
    seen = []

    def next_line() -> str:
        seen.append((len(read), [dict(message) for message in chat.messages]))
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    chat.run(next_line)
    second, count = read[seen[1][0]], len(read)
    talk = [*seen[1][1], {"role": "user", "content": "And?"}]
    fresh = Session(Settings(model=str(model_folder), max_new_tokens=10)).reply(talk)
    assert read[count] - second >= read[0]  # what was read for the first turn is not read again
    assert seen[2][1][-1] == {"role": "assistant", "content": fresh.text}
    assert "no command /nonsense" in printed.getvalue()
    assert len(chat.messages) == 2

    def interrupt(self: Any, rounds: Any) -> None:
        self.text.add(ord("A") - 33)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RoundPrinter, "put_round", interrupt)
        chat.turn("Go on.")
    assert chat.messages[-1] == {"role": "assistant", "content": "A"}
    assert session.cache is None
    chat.turn("And now?")
    assert len(chat.messages) == 6


def test_rounds_are_printed_in_colours(tokenizer: Any) -> None:
    printed = io.StringIO()
    printer = RoundPrinter(tokenizer, Console(file=printed, force_terminal=True, color_system="standard"), show_drafts=True)
    a, b, c = (tokenizer(letter).input_ids[0] for letter in "abc")
    printer.put_round({0: DraftRound([a, b, c], [0, 1, 2], [1], [a, c])})
    printer.end()
    assert printed.getvalue() == "\x1b[32ma\x1b[0m\x1b[9;31mbc\x1b[0m\x1b[4;34mc\x1b[0m\n"


def test_info_says_what_a_head_is_and_whether_it_fits(
    head_folder: Path, model_folder: Path, tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(head_folder), "--model", str(model_folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "EAGLE-3 draft head"
    assert found["vocabulary"]["target"] == 257
    assert found["check"]["fits"]
    other = tmp_path / "other"
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(other)
    tokenizer.save_pretrained(other)
    assert main(["info", str(head_folder), "--model", str(other)]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_a_head_is_converted_and_read_again(
    head_folder: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign, back = tmp_path / "foreign", tmp_path / "back"
    asked = ["convert", str(head_folder), "--model", str(model_folder), "--to", "eagle3"]
    assert main([*asked, "--output", str(foreign)]) == 0
    assert main([*asked, "--output", str(foreign)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["info", str(foreign)]) == 0
    assert "eagle3" in capsys.readouterr().out
    given = ["--layer-id-convention", "hidden_states", "--d2t-encoding", "offsets"]
    code = main(["convert", str(foreign), "--model", str(model_folder), "--output", str(back), *given])
    assert code == 0, capsys.readouterr().err
    assert (back / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", " "], "The prompt is empty."),
        (["generate", "x", "--model", "/no/such/folder"], "there is no such folder"),
        (["generate", "x", "--drafter", "auto", "--draft-model", "y"], "either --drafter or --draft-model"),
        (["generate", "x", "--model", "no/such/folder"], "there is no such folder"),
        (["info", "/no/such/folder"], "There is no folder /no/such/folder"),
        (["convert", "x", "--output", "/no/such/output", "--to", "turbo"], "no layout 'turbo'"),
        (["convert", "x", "--output", f"{__file__}/below"], "cannot be written, since"),
        (["convert", "x", "--output", __file__], "is a file"),
        (["convert", "x", "--output", str(Path(__file__).parent)], "is not empty"),
        (["generate", "x", "--seed", str(2**64)], "--seed must be a number of 64 bits"),
        (["report", "/no/such/file"], "cannot be read"),
        (["generate", "x", "--turbo"], "No such option"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


@pytest.mark.parametrize("program", ["speed", "acceptance", "exactness"])
@pytest.mark.parametrize("option", ["--output", "--report"])
def test_an_output_that_cannot_be_written_is_said_before_anything_is_measured(
    program: str,
    option: str,
    prompt_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measures(*arguments: Any) -> Any:
        raise AssertionError("measured")

    monkeypatch.setattr(f"specheads.evaluation.{program}.load_target", measures)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for place, fault in ((tmp_path, "is a folder; name a file in it"), (tmp_path / "file" / "out", "cannot be written")):
        assert main(["eval", program, "--prompts", str(prompt_file), option, str(place)]) == 2
        said = capsys.readouterr().err
        assert f"{option} {place} {fault}" in said and said.count("\n") == 1


def test_damaged_weights_are_named(
    head_folder: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, name in ((head_folder, "head"), (model_folder, "model")):
        shutil.copytree(folder, tmp_path / name)
        file = tmp_path / name / "model.safetensors"
        file.write_bytes(file.read_bytes()[:100])
    for command in (["info", str(tmp_path / "head")], ["generate", "x", "--model", str(tmp_path / "model")]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert command[-1] in said and "header" in said and "Traceback" not in said


def test_a_prompt_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\x00"), encoding="utf-8"))
    assert main(["generate"]) == 2
    assert "standard input is no text" in capsys.readouterr().err


INTERRUPTION = """
import os, signal, sys
import specheads.__main__ as command

class Loading:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:  # what some packages make of it while they are loaded
                raise ImportError("half loaded") from None

sys.meta_path.insert(0, Loading())
sys.argv = ["specheads", "generate", "hello"]
sys.exit(command.main())
"""


def test_an_interruption_while_packages_are_loaded_is_one_line() -> None:
    found = subprocess.run([sys.executable, "-c", INTERRUPTION], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (130, "specheads: interrupted\n")


def test_an_interruption_of_a_command_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("specheads.cli.session.Session.__init__", interrupted)
    assert main(["generate", "a"]) == 130
    assert capsys.readouterr().err == "specheads: interrupted\n"


def test_a_fault_that_is_nobodys_sentence_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> Any:
        raise IndexError("index out of range\nin self")

    monkeypatch.setattr("specheads.cli.session.Session.__init__", fails)
    assert main(["generate", "a"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "IndexError: index out of range in self" in said and "--traceback" in said
    with pytest.raises(IndexError):
        main(["--traceback", "generate", "a"])


@pytest.mark.parametrize("kind", ["speed", "acceptance", "exactness", ["speed"]])
def test_a_report_of_what_is_not_whole_is_refused(kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"kind": kind, "provenance": {}, "settings": {}}))
    assert main(["report", str(result), "--output", str(tmp_path / "page.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "page.html").exists()


def test_programs_take_their_own_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    words = {"train": "--draft_vocab_size", "eval speed": "--variant", "eval acceptance": "--turns"}
    for command, word in words.items():
        assert main([*command.split(), "--help"]) == 0
        said = capsys.readouterr().out
        assert word in said and f"usage: specheads {command} " in said
    assert main(["train", "--no_such_flag", "1"]) == 2
    assert "specheads train: Unknown option" in capsys.readouterr().err


def test_a_missing_harness_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "specheads.evaluation.lm_eval", raising=False)
    assert main(["eval", "lm-eval", "--model", "specheads"]) == 1
    assert 'the package lm-eval: run `pip install "specheads[lm-eval]"`' in capsys.readouterr().err


def test_the_environment_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"]["torch"]
