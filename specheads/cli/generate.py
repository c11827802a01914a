"""`specheads generate`: one text."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ..evaluation.prompts import InputError
from ..interruption import INTERRUPTED
from . import options


@options.for_sessions()
def generate(
    settings: dict[str, Any],
    prompt: Annotated[str | None, typer.Argument(help="The prompt; from standard input if left out.")] = None,
    system: options.System = None,
    show_drafts: options.ShowDrafts = False,
    as_json: options.AsJson = False,
) -> None:
    """Generate one text.

    On a terminal accepted drafts are green, the target's own tokens underlined blue. Statistics go to standard error.
    """
    messages = [*_system(system), {"role": "user", "content": _prompt(prompt)}]
    from rich.console import Console

    from .session import Session, Settings
    from .terminal import RoundPrinter, statistics_line

    session = Session(Settings(**settings))
    console = Console(highlight=False)
    try:
        reply = session.reply(messages, None if as_json else RoundPrinter(session.tokenizer, console, show_drafts))
    except KeyboardInterrupt:
        console.print()
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        import json

        typer.echo(json.dumps(session.record(reply), indent=2, ensure_ascii=False))
        return
    Console(stderr=True, highlight=False).print(statistics_line(reply), style="dim", soft_wrap=True)


def _system(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _prompt(given: str | None) -> str:
    if given is None and sys.stdin.isatty():
        raise InputError('There is no prompt: give one as an argument, as in `specheads generate "..."`, or on standard input.')
    try:
        prompt = sys.stdin.read() if given is None else given
    except UnicodeDecodeError as error:
        raise InputError(f"The prompt on standard input is no text: {error}.") from error
    if not prompt.strip():
        raise InputError("The prompt is empty.")
    return prompt
