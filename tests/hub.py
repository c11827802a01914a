"""A stand-in for the Hub on this machine: the part of its HTTP interface that saving, loading and pushing heads use.

What every request asked for and carried is kept in `requests`, so that a test can say that a token or a revision went
everywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest
import transformers.dynamic_module_utils
import transformers.utils.hub

Files = dict[str, bytes]


class Refusal(Exception):
    """What the Hub answers in place of a result."""

    def __init__(self, status: int, code: str, message: str, **headers: str):
        super().__init__(message)
        self.status, self.headers = status, {"X-Error-Code": code, "X-Error-Message": message, **headers}


@dataclass
class Repository:
    """Its commits, each with all its files, and the branches and tags that point at them."""

    private: bool = False
    gated: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Files, branch: str = "main") -> str:
        content = repr((len(self.commits), branch, sorted(files.items())))
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.commits[sha] = files
        self.refs[branch] = sha
        return sha

    def resolve(self, revision: str) -> str:
        sha = self.refs.get(revision, revision)
        if sha not in self.commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha


@dataclass(frozen=True)
class Request:
    """One request: for a file or about a repository, at which revision and with which token."""

    method: str
    kind: str
    repository: str
    revision: str | None
    file: str | None
    token: str | None


@dataclass
class Hub:
    """The server's state. `tokens` are those that may read and write everything."""

    endpoint: str = ""
    tokens: set[str] = field(default_factory=lambda: {"secret"})
    repositories: dict[str, Repository] = field(default_factory=dict)
    uploads: Files = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    lock: Any = field(default_factory=Lock)

    def files(self, repository: str, revision: str = "main") -> Files:
        found = self.repositories[repository]
        return found.commits[found.resolve(revision)]

    def put(self, repository: str, folder: Path, revision: str = "main", under: str = "") -> str:
        """Commits the files of a folder, besides those that are there. Gives the commit."""
        found = self.repositories.setdefault(repository, Repository())
        before = found.commits[found.refs[revision]] if revision in found.refs else {}
        files = {under + path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return found.commit({**before, **files}, revision)

    def asked(self, kind: str = "resolve") -> list[Request]:
        """The requests of a kind."""
        return [request for request in self.requests if request.kind == kind]

    def readable(self, name: str, token: str | None) -> Repository:
        repository = self.repositories.get(name)
        if repository is None or (repository.private and token not in self.tokens):
            # The Hub does not tell a repository that there is not from one that may not be seen.
            raise Refusal(401 if token is None else 404, "RepoNotFound", "Repository not found")
        if repository.gated and token not in self.tokens:
            raise Refusal(403, "GatedRepo", f"Access to model {name} is restricted.")
        return repository

    def writable(self, name: str, token: str | None) -> Repository:
        if token not in self.tokens:
            raise Refusal(401, "Unauthorized", "Invalid username or password.")
        return self.readable(name, token)


NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
ROUTES = [
    ("create", "POST", r"/api/repos/create"),
    ("whoami", "GET", r"/api/whoami-v2"),
    ("validate", "POST", r"/api/validate-yaml"),
    ("info", "GET", rf"/api/models/{NAME}(/revision/(?P<revision>[^/]+))?"),
    ("tree", "GET", rf"/api/models/{NAME}/tree/(?P<revision>[^/]+)"),
    ("branch", "POST", rf"/api/models/{NAME}/branch/(?P<revision>[^/]+)"),
    ("tag", "POST", rf"/api/models/{NAME}/tag/(?P<revision>[^/]+)"),
    ("preupload", "POST", rf"/api/models/{NAME}/preupload/(?P<revision>[^/]+)"),
    ("commit", "POST", rf"/api/models/{NAME}/commit/(?P<revision>[^/]+)"),
    ("batch", "POST", rf"/{NAME}\.git/info/lfs/objects/batch"),
    ("upload", "PUT", r"/uploads/(?P<file>\w+)"),
    ("resolve", "GET", rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<file>.+)"),
]


class Handler(BaseHTTPRequestHandler):
    """Answers of the stand-in; `do_…` finds the route, `_…` below answers."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        method = "GET" if self.command == "HEAD" else self.command
        for kind, of, pattern in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and of == method:
                found = {name: unquote(value) for name, value in match.groupdict().items() if value}
                return self._answer(kind, found, body)
        self._send(404, f"No route for {self.command} {path}".encode())

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _answer(self, kind: str, found: dict[str, str], body: bytes) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        name, revision, file = found.get("name", ""), found.get("revision"), found.get("file")
        with self.hub.lock:
            self.hub.requests.append(Request(self.command, kind, name, revision, file, token))
            try:
                getattr(self, f"_{kind}")(name, revision, file, token, body)
            except Refusal as refusal:
                self._send(refusal.status, json.dumps({"error": str(refusal)}).encode(), **refusal.headers)

    def _send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def _create(self, _name: str, _revision: Any, _file: Any, token: str | None, body: bytes) -> None:
        if token not in self.hub.tokens:
            raise Refusal(401, "Unauthorized", "Invalid username or password.")
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'someone'}/{asked['name']}"
        status = 409 if name in self.hub.repositories else 200
        if status == 200:
            repository = self.hub.repositories[name] = Repository(asked.get("visibility") == "private")
            repository.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self._send(status, json.dumps({"url": f"{self.hub.endpoint}/{name}"}).encode())

    def _whoami(self, *_: Any) -> None:
        self._json({"name": "someone", "type": "user", "orgs": []})

    def _validate(self, *_: Any) -> None:
        self._json({"errors": [], "warnings": []})

    def _info(self, name: str, revision: str | None, _file: Any, token: str | None, _body: bytes) -> None:
        repository = self.hub.readable(name, token)
        sha = repository.resolve(revision or "main")
        siblings = [{"rfilename": file} for file in sorted(repository.commits[sha])]
        self._json({"id": name, "sha": sha, "private": repository.private, "siblings": siblings, "tags": []})

    def _tree(self, name: str, revision: str, _file: Any, token: str | None, _body: bytes) -> None:
        repository = self.hub.readable(name, token)
        files = repository.commits[repository.resolve(revision)]
        self._json([
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in sorted(files.items())
        ])  # fmt: skip

    def _branch(self, name: str, revision: str, _file: Any, token: str | None, body: bytes) -> None:
        repository = self.hub.writable(name, token)
        if revision in repository.refs:
            raise Refusal(409, "Conflict", "Reference already exists")
        asked = json.loads(body) if body else {}
        repository.refs[revision] = repository.resolve(asked.get("startingPoint") or "main")
        self._json({})

    def _tag(self, name: str, revision: str, _file: Any, token: str | None, body: bytes) -> None:
        repository = self.hub.writable(name, token)
        repository.refs[json.loads(body)["tag"]] = repository.resolve(revision)
        self._json({})

    def _preupload(self, name: str, revision: str, _file: Any, token: str | None, body: bytes) -> None:
        self.hub.writable(name, token).resolve(revision)
        answers = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(body)["files"]
        ]
        self._json({"files": answers})

    def _batch(self, name: str, _revision: Any, _file: Any, token: str | None, body: bytes) -> None:
        self.hub.writable(name, token)
        objects = []
        for asked in json.loads(body)["objects"]:
            upload = {"href": f"{self.hub.endpoint}/uploads/{asked['oid']}", "header": {}}
            objects.append({**asked, "actions": {"upload": upload}})
        self._json({"transfer": "basic", "objects": objects})

    def _upload(self, _name: str, _revision: Any, file: str, _token: Any, body: bytes) -> None:
        assert hashlib.sha256(body).hexdigest() == file
        self.hub.uploads[file] = body
        self._send(200, b"")

    def _commit(self, name: str, revision: str, _file: Any, token: str | None, body: bytes) -> None:
        repository = self.hub.writable(name, token)
        files = dict(repository.commits[repository.resolve(revision)])
        for line in body.decode().splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        asks_for_request = urlsplit(self.path).query == "create_pr=1"
        sha = repository.commit(files, "refs/pr/1" if asks_for_request else revision)
        answer = {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.endpoint}/{name}/commit/{sha}", "hookOutput": ""}
        self._json({**answer, "pullRequestUrl": f"{self.hub.endpoint}/{name}/discussions/1"} if asks_for_request else answer)

    def _resolve(self, name: str, revision: str, file: str, token: str | None, _body: bytes) -> None:
        repository = self.hub.readable(name, token)
        sha = repository.resolve(revision)
        content = repository.commits[sha].get(file)
        if content is None:
            raise Refusal(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": sha})
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        self._send(200, content, ETag=etag, **{"X-Repo-Commit": sha, "Accept-Ranges": "none"})

    def log_message(self, *_: Any) -> None:
        """Nothing goes to the terminal."""


@contextmanager
def running() -> Iterator[Hub]:
    """A stand-in that answers on a port of this machine until the block ends."""
    hub = Hub()
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def connect(hub: Hub, monkeypatch: pytest.MonkeyPatch, caches: Path) -> None:
    """Lets huggingface_hub and transformers, which read their settings when they are imported, take a stand-in for the Hub.

    Args:
        hub: The stand-in.
        monkeypatch: Undoes it.
        caches: Where downloads go, in place of the user's cache.
    """
    _take_for_the_hub(hub.endpoint, monkeypatch)
    constants = {
        "HF_HUB_CACHE": str(caches / "hub"),
        "HF_TOKEN_PATH": str(caches / "token"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }
    for name, value in constants.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    modules = str(caches / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(str(caches))  # restores what transformers adds to the path


def cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nobody answers."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    _take_for_the_hub(endpoint, monkeypatch)
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the attempts


def _take_for_the_hub(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # it has the endpoint of its first use
