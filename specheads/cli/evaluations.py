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


@evaluations.command(context_settings=PASSED_ON)
def acceptance(context: typer.Context) -> None:
    """Measure how much of its drafts the target accepts; the arguments are those of `eval/acceptance.py`."""
    from ..evaluation.acceptance import main

    raise typer.Exit(main(context.args))


@evaluations.command(context_settings=PASSED_ON)
def exactness(context: typer.Context) -> None:
    """Test whether drafters leave the target's output as it is; the arguments are those of `eval/exactness.py`."""
    from ..evaluation.exactness import main

    raise typer.Exit(main(context.args))


@evaluations.command("lm-eval", context_settings=PASSED_ON)
def lm_eval(context: typer.Context) -> None:
    """Run the benchmark harness lm-eval, which has `--model specheads` here; the arguments are those of `lm_eval`."""
    try:
        from ..evaluation.lm_eval import main
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('This needs the package lm-eval: run `pip install "specheads[lm-eval]"`.') from error
    raise typer.Exit(main(context.args))
