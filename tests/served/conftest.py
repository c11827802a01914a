"""The engine that heads are served with: vLLM in an environment of its own, `make test-served`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "SPECHEADS_VLLM_PYTHON"
WORKER = Path(__file__).with_name("worker.py")

Serve = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Has the engine do jobs (see `worker.py`)."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.fail(f"{VARIABLE} must name the Python of an environment with vLLM; `make test-served` makes one.")

    def run(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("jobs")
        files = folder / "jobs.json", folder / "results.json"
        files[0].write_text(json.dumps(jobs))
        log = folder / "log.txt"
        with log.open("w") as output:
            done = subprocess.run([python, WORKER, *files], stdout=output, stderr=subprocess.STDOUT, check=False)
        print(log.read_text())  # pytest shows it if a test fails
        assert done.returncode == 0
        return json.loads(files[1].read_text())

    return run
