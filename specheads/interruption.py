"""Ctrl-C while modules are loaded, which takes seconds and in which an exception is not safe: others swallow or reword it."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # what a shell reports for Ctrl-C
IMPORTING = "<frozen importlib"


def leave_quietly_while_importing() -> None:
    """From now on Ctrl-C during an import ends the process with one line; at other times it is a `KeyboardInterrupt`."""
    signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORTING):
            sys.stderr.write("specheads: interrupted\n")
            sys.stderr.flush()
            os._exit(INTERRUPTED)  # files are written whole or not at all, so none is spoilt
        frame = frame.f_back
    raise KeyboardInterrupt
