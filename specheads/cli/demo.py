"""`specheads demo`: a small real model on a few prompts."""

from __future__ import annotations

import typer


def demo() -> None:
    """Compare plain generation with speculative generation on a small real model."""
    from ..demo import main

    raise typer.Exit(main([]))
