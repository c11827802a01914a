"""The command `specheads`, one file per command.

What a command needs, torch above all, is imported when it runs: help appears at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from ..evaluation.prompts import InputError
from ..interruption import INTERRUPTED
from .chat import chat
from .convert import convert
from .demo import demo
from .env import env
from .evaluations import PASSED_ON, evaluations
from .generate import generate
from .info import info
from .report import report
from .train import train

__all__ = ["app", "main"]

FAILED, UNUSABLE = 1, 2

app = typer.Typer(
    name="specheads",
    help="Exact speculative decoding for Hugging Face models: the same text as without, in fewer passes of the model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _command in (demo, generate, chat, info, convert):
    app.command()(_command)
app.command(context_settings=PASSED_ON)(train)
app.add_typer(evaluations)
app.command()(report)
app.command()(env)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"specheads {__version__}")
        raise typer.Exit


@app.callback()
def settings(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from, for bug reports.")] = False,
) -> None:
    """What holds for all commands."""
    context.obj = traceback


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line; that of the process if `None`.

    Returns:
        The exit status: 1 for a failure or a missing package, 2 for input that cannot be used, 130 for an interruption.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(args=given, prog_name="specheads")
    except SystemExit as ended:
        if isinstance(
            getattr(ended.__context__, "__cause__", None), KeyboardInterrupt
        ):  # typer ends the process without a word
            typer.echo("specheads: interrupted", err=True)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except (ImportError, InputError, ValueError, OSError) as error:
        if "--traceback" in given:
            raise
        typer.echo(f"specheads: {_one_line(error)}", err=True)
        return FAILED if isinstance(error, ImportError) else UNUSABLE
    except KeyboardInterrupt:
        typer.echo("specheads: interrupted", err=True)
        return INTERRUPTED
    except Exception as error:
        # A fault of the model, of its files, or of this program: not a sentence of ours, and yet one line.
        if "--traceback" in given:
            raise
        where = "`specheads --traceback ...` shows where it comes from"
        typer.echo(f"specheads: {type(error).__name__}: {_one_line(error)}; {where}.", err=True)
        return FAILED
    return 0


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
