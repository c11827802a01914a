"""A server writes the answers; a small one stands in for it here."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specheads.evaluation.prompts import InputError
from specheads.training import endpoint
from specheads.training.generate import generate_data, main
from specheads.training.generate_arguments import GenerateArguments

from .test_generate import QUESTIONS, by_id, read, write

Answer = tuple[int, Any]


@contextmanager
def server(answer: Callable[[dict[str, Any]], Answer]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers as it is told; gives its address and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({**request, "path": self.path, "key": self.headers.get("Authorization")})
            status, body = answer(request)
            content = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/v1", asked
    finally:
        running.shutdown()
        running.server_close()
        thread.join()


def completion(text: str, finish_reason: str = "stop", **message: Any) -> Answer:
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish_reason}
    return 200, {"choices": [choice], "usage": {"completion_tokens": len(text.split())}}


def echo(request: dict[str, Any]) -> Answer:
    """A reply that depends on the conversation and the seed, as a server's would."""
    return completion(f"{len(request['messages'])} {request['seed']}")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    init = endpoint.EndpointWriter.__init__
    monkeypatch.setattr(
        endpoint.EndpointWriter, "__init__", lambda self, *args, **named: init(self, *args, **named, pause=0.001)
    )


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write(tmp_path / "questions.jsonl", QUESTIONS)


def generated(url: str, questions: Path, output: Path, **changes: Any) -> list[dict[str, Any]]:
    settings = {"max_new_tokens": 12, "concurrency": 4, **changes}
    generate_data(GenerateArguments("the-target", str(questions), output, endpoint=url, **settings))
    return read(output)


def test_rows_are_the_servers_replies(questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    template = '{"enable_thinking": false}'
    with server(echo) as (url, asked):
        rows = generated(url, questions, tmp_path / "out", temperature=0.5, top_k=7, template_arguments=template)
    assert len(rows) == 5 and len(asked) == 7
    for request in asked:
        assert request["path"] == "/v1/chat/completions" and request["key"] == "Bearer secret"
        assert (request["model"], request["temperature"], request["top_k"], request["max_tokens"]) == ("the-target", 0.5, 7, 12)
        assert request["chat_template_kwargs"] == {"enable_thinking": False}
        assert request["messages"][-1]["role"] == "user"
    assert len({request["seed"] for request in asked}) == 7
    said = [message["content"] for message in rows[1]["messages"]]
    assert said[0] == "Is it?" and said[1].startswith("1 ") and said[2] == "And the question?" and said[3].startswith("3 ")
    assert rows[1]["num_tokens"] == 4 and "secret" not in (tmp_path / "out" / "provenance.json").read_text(encoding="utf-8")


def test_order_concurrency_and_interruptions_do_not_matter(questions: Path, tmp_path: Path) -> None:
    def slow(request: dict[str, Any]) -> Answer:
        time.sleep(request["seed"] % 7 / 200)
        return echo(request)

    with server(slow) as (url, _):
        whole = generated(url, questions, tmp_path / "whole", concurrency=1)
        assert generated(url, questions, tmp_path / "many", concurrency=8) == whole
    with server(slow) as (url, asked):
        part = generated(url, questions, tmp_path / "part", limit=2)
        before = len(asked)
        assert generated(url, questions, tmp_path / "part") == whole
    assert part == whole[:2] and len(asked) - before == sum(len(row["messages"]) // 2 for row in whole[2:])


def test_a_server_that_stumbles_is_asked_again(questions: Path, tmp_path: Path) -> None:
    stumbles = iter([(503, "busy"), (429, "slow down"), (200, "{cut"), (500, "oh")])
    with server(lambda request: next(stumbles, None) or echo(request)) as (url, asked):
        rows = generated(url, questions, tmp_path / "out")
    assert len(rows) == 5 and len(asked) == 11


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((404, "no such model"), "refuses requests: 404 .*no such model"),
        ((401, "who are you"), "refuses requests: 401"),
        ((200, {"error": "what"}), "answers with what is no chat completion"),
        ((503, "busy"), "refuses requests: 503"),
    ],
    ids=str,
)
def test_a_server_that_does_not_serve_ends_the_run(questions: Path, tmp_path: Path, answer: Answer, sentence: str) -> None:
    with server(lambda request: answer) as (url, _), pytest.raises(InputError, match=sentence):
        generated(url, questions, tmp_path / "out")
    assert read(tmp_path / "out", "*/*.jsonl") == []


def test_no_server_is_one_sentence(questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server(echo) as (url, _):
        pass
    given = ["--model", "m", "--dataset", str(questions), "--output", str(tmp_path / "out"), "--endpoint", url]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert "does not answer" in error and "run the same command again" in error and "Traceback" not in error


def test_what_the_server_cannot_answer_is_counted(tmp_path: Path) -> None:
    replies = {
        "long": (400, "the maximum context length is 4096 tokens"),
        "bad": (400, "no"),
        "silent": completion(" "),
        "cut": completion("and so", "length"),
        "good": completion("yes"),
        "thoughtful": completion("yes", reasoning_content="hm"),
    }
    questions = write(tmp_path / "questions.jsonl", [{"prompt": name} for name in replies])
    with server(lambda request: replies[request["messages"][-1]["content"]]) as (url, _):
        options = GenerateArguments("m", str(questions), tmp_path / "out", endpoint=url)
        counts = generate_data(options)
    assert counts["rows"] == 3 and counts["cut"] == 1
    assert (counts["failed: too long"], counts["failed: refused"], counts["failed: empty"]) == (1, 1, 1)
    rows = {row["messages"][0]["content"]: row for row in by_id(read(tmp_path / "out")).values()}
    assert rows["cut"]["finish_reason"] == "length"
    assert rows["thoughtful"]["messages"][1]["reasoning_content"] == "hm"
    reasons = {entry["reason"]: entry["detail"] for entry in read(tmp_path / "out", "failed/*.jsonl")}
    assert "4096" in reasons["too long"]
