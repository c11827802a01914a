"""Every command and every piece of code in the documentation is run, in a folder with small stand-ins for what it names.

What cannot be run here stands in `NOT_RUN`, with the reason; a command that is in neither is a failure.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import specheads
from specheads.drafters.retrieval_store import build_store
from specheads.evaluation import bench
from tests.formats import checkpoints
from tests.hub import Hub
from tests.test_docs import BLOCK, PAGES, ROOT, blocks
from tests.training.conftest import save_target
from tests.training.runs import write_chats

ELIDED = "..."

# The beginning of a command, and why it is not run.
NOT_RUN = {
    "pip install": "it downloads",
    "pip uninstall": "it takes packages away",
    "export VLLM_": "settings of vLLM, which has an environment of its own: `make test-served`",
    "vllm serve": "an engine with an environment of its own; tests/training/test_endpoint.py has a stand-in for its server",
    "python train/generate.py --endpoint": "it asks that server; tests/training/test_endpoint.py",
    "accelerate launch": "several processes; tests/training/test_trainer.py runs two",
    "python -m specheads.evaluation.lm_eval": "the task is on the Hub; tests/evaluation/test_lm_eval.py has one of its own",
    "make demo": "minutes on a real model; tests/evaluation/test_demo.py",
    "make test": "this is it",
    "export MODEL": "it converts the model; the stand-in has that name",
}

# What a command is given besides, so that it takes no longer than a test may, and the exit statuses that are right here.
SHORT = ["--max-new-tokens", "4"]
BRIEFLY: dict[str, tuple[list[str], set[int]]] = {
    "eval/speed.py": ([*SHORT, "--limit", "1"], {0}),
    "eval/acceptance.py": ([*SHORT, "--limit", "1"], {0}),
    "eval/exactness.py": ([*SHORT, "--samples", "20", "--tokens", "2", "--limit", "1"], {0, 1}),  # so few see nothing: blind
    "eval speed": ([*SHORT, "--limit", "1"], {0}),
    "generate": (SHORT, {0}),
    "chat": (SHORT, {0}),
    "train/generate.py": (["--max_new_tokens", "4"], {0}),
    "train/heads.py": (
        [
            *("--max_steps", "2", "--eval_examples", "0", "--eval_strategy", "no", "--generate_prompts", "0", "--depth", "2"),
            *("--save_strategy", "steps", "--save_steps", "1", "--draft_vocab_size", "48", "--dtype", "float32"),
            *("--per_device_train_batch_size", "2", "--use_cpu", "true", "--dataloader_pin_memory", "false"),
        ],
        {0},
    ),
}
PROGRAMS = {
    "eval/speed.py": "specheads.evaluation.speed",
    "eval/acceptance.py": "specheads.evaluation.acceptance",
    "eval/exactness.py": "specheads.evaluation.exactness",
    "train/heads.py": "specheads.training.heads_command",
    "train/generate.py": "specheads.training.generate",
}


def commands_of(page: Path) -> list[str]:
    """The commands of a page's shell blocks, each on one line and without its comment."""
    lines = [line for code in blocks(page, "sh") for line in code.replace("\\\n", " ").splitlines()]
    return [command for line in lines if (command := re.sub(r"\s#.*", "", line).strip())]


def reason_against(command: str) -> str | None:
    return next((reason for start, reason in NOT_RUN.items() if command.startswith(start)), None)


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the documentation names: models, heads, prompts, chats."""
    folder = tmp_path_factory.mktemp("docs")
    target = save_target(folder / "folder", "chatml")
    model = AutoModelForCausalLM.from_pretrained(target).float()
    model.save_pretrained(target)
    for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "path/to/model", "path/to/draft", "draft", "second"):
        shutil.copytree(target, folder / name)
    tokenizer = AutoTokenizer.from_pretrained(target)
    config = specheads.EagleConfig.from_target(model, draft_vocab_size=None, tokenizer=tokenizer)
    for name in ("path/to/head", "user/head", "head"):
        specheads.EagleHead(config).save_pretrained(folder / name)
    build_store(folder / "store", [[5, 6, 7, 8, 9]])
    prompt = json.dumps({"category": "qa", "prompt": "Paris Paris Paris"}) + "\n"
    for name in ("prompts.jsonl", "question.jsonl", "eval_prompts.jsonl", "eval/prompts.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(prompt, encoding="utf-8")
    (folder / "letter.txt").write_text("Paris is the capital of France", encoding="utf-8")
    for name in ("answers.jsonl", "answers/answers.jsonl", "HuggingFaceH4/ultrachat_200k/data/train_sft-00000-of-00001.jsonl"):
        write_chats(folder / name, count=6)
    shutil.copytree(ROOT / "train" / "recipes", folder / "train" / "recipes")
    questions = (ROOT / "train" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    (folder / "train" / "prompts.jsonl").write_text("\n".join(questions) + "\n", encoding="utf-8")
    return folder


def program_of(words: list[str]) -> tuple[str, Callable[[list[str]], Any], list[str]]:
    """What runs a command: its name, its `main`, and the arguments."""
    program, *rest = words
    if program == "specheads":
        name = " ".join(rest[: 2 if rest[0] == "eval" else 1])
        return name, import_module("specheads.cli").main, rest
    assert Path(program).name == "python", f"do not know how to run {shlex.join(words)}"
    if rest[0] == "-m":
        return rest[1], import_module(rest[1]).main, rest[2:]
    return rest[0], import_module(PROGRAMS[rest[0]]).main, rest[1:]


def execute(command: str, before: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, read: Callable[[], Any]) -> None:
    """Runs a command line; what is elided in it is what the command before it had."""
    stated, _, file = command.partition(" > ")
    source, _, run = stated.rpartition(" | ")
    if source:
        assert source.startswith("cat ")
        monkeypatch.setattr(sys, "stdin", io.StringIO(Path(source[4:]).read_text(encoding="utf-8")))
    name, main, given = program_of(shlex.split(os.path.expandvars(run)))
    if ELIDED in given:
        place = given.index(ELIDED)
        given[place : place + 1] = before[name]
    before[name] = given
    more, statuses = BRIEFLY.get(name, ([], {0}))
    read()
    status = main([*given, *more])
    printed = read()
    assert (status or 0) in statuses, f"{command} ended with {status}: {printed.err or printed.out}"
    if file:
        Path(file).write_text(printed.out, encoding="utf-8")
        assert json.loads(printed.out)


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.name)
def test_commands_run(page: Path, stand_ins: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(stand_ins)
    monkeypatch.setattr(bench, "smollm2_folder", lambda: stand_ins / "folder")  # the target where none is named
    monkeypatch.setenv("MODEL", str(stand_ins / "folder"))
    before: dict[str, list[str]] = {}
    for command in commands_of(page):
        if reason_against(command) is None:
            monkeypatch.setattr(sys, "stdin", io.StringIO("Paris?\n/quit\n"))
            execute(command, before, monkeypatch, capsys.readouterr)


def test_no_reason_is_left_over() -> None:
    every = [command for page in PAGES for command in commands_of(page)]
    assert [start for start in NOT_RUN if not any(command.startswith(start) for command in every)] == []


# Code

OTHERS = {
    "README.md": "below",
    "choosing_a_drafter.md": "below",
    "heads_on_the_hub.md": "below",
    "quick_start.md": "tests/test_docs.py",
    "extending.md": "tests/test_docs.py",
    "serving_in_vllm.md": "it takes vLLM: tests/served",
}


def test_all_code_is_run_somewhere() -> None:
    assert {page.name for page in PAGES if blocks(page, "python")} == set(OTHERS)
    languages = {language for page in PAGES for language, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
    assert languages <= {"python", "sh", "diff", "yaml", "json", "text"}


@pytest.fixture
def names(stand_ins: Path) -> dict[str, Any]:
    """What code in the documentation takes for given."""
    model, draft = (AutoModelForCausalLM.from_pretrained(stand_ins / "folder").float() for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(stand_ins / "folder")
    inputs = {**tokenizer("Paris is", return_tensors="pt"), "max_new_tokens": 4}
    return {"specheads": specheads, "model": model, "draft": draft, "tokenizer": tokenizer, "inputs": inputs}


def run(page: str, code: str, names: dict[str, Any]) -> None:
    exec(compile(code, page, "exec"), names)


def test_code_of_the_readme(names: dict[str, Any]) -> None:
    specheads.enable(names["model"])
    for code in blocks(ROOT / "README.md", "python"):
        run("README.md", code, names)
    difference = blocks(ROOT / "README.md", "diff")[0].splitlines()
    for mark in "-+":  # the script before, and the script after
        lines = [line[1:] for line in difference if line[0] in (" ", mark)]
        run("README.md", "\n".join(line for line in lines if "from_pretrained" not in line), {**names, "inputs": short(names)})


def short(names: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in names["inputs"].items() if name != "max_new_tokens"}


def test_formulas_have_the_values_of_their_comments(names: dict[str, Any]) -> None:
    code = blocks(ROOT / "docs" / "choosing_a_drafter.md", "python")[0]
    run("choosing_a_drafter.md", code, names)
    stated = re.findall(r"^(\w+\(.*\))  # ([\d.]+)$", code, re.MULTILINE)
    assert len(stated) == 4
    for call, value in stated:
        digits = len(value.partition(".")[2])
        assert round(float(eval(call, names)), digits) == float(value)


@pytest.fixture
def token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> str:
    """One that may write to the stand-in for the Hub, logged in with."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    return "secret"


def test_code_of_heads_on_the_hub(
    names: dict[str, Any], hub: Hub, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no folder has the name of a repository
    model = names["model"]
    figures = {"value": 2.0, "low": 1.9, "high": 2.1, "ratio": 1.4, "low_ratio": 1.3, "high_ratio": 1.5, "shares": [0.6, 0.4]}
    prints = {"fingerprint_of_prompts": "a" * 64, "fingerprint": "b" * 64}
    names |= figures | prints | {"command": "train/heads.py", "arguments": {}, "token": token, "folder": str(tmp_path / "own")}
    names["head"] = specheads.EagleHead.from_target(model)
    push, settings, load, results, recipe = blocks(ROOT / "docs" / "heads_on_the_hub.md", "python")
    for code in (results, settings, push, push.replace("private=True", 'private=True, revision="v1"')):
        run("heads_on_the_hub.md", code, names)
    foreign = checkpoints.save(tmp_path / "foreign", *checkpoints.eagle3())
    hub.put("someone/foreign-head", foreign, under="eagle3/")
    specheads.load_drafter("user/head", model, cache_dir=names["folder"])  # loads again without a network
    run("heads_on_the_hub.md", load, {**names, "specheads": _fitting(names)})
    names["inputs"]["do_sample"] = False
    run("heads_on_the_hub.md", recipe, {**names, "model": specheads.disable(model)})


def _fitting(names: dict[str, Any]) -> Any:
    """The library, where `import_head` reads the foreign head for the target that it was made for."""
    import types

    found = types.SimpleNamespace(**{name: getattr(specheads, name) for name in specheads.__all__})
    found.import_head = lambda name, model, **options: specheads.import_head(name, checkpoints.target(), **options)
    return found
