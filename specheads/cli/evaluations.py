"""`specheads eval`: the programs of `eval/`."""

from __future__ import annotations

import typer

evaluations = typer.Typer(name="eval", help="Measure speed, acceptance or exactness; each has a --help of its own.")
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@evaluations.command(context_settings=PASSED_ON)
def speed(context: typer.Context) -> None:
    """Measure speed against plain generation; the arguments are those of `eval/speed.py`."""
    from ..evaluation.speed import main

    raise typer.Exit(main(context.args))
