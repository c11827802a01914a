"""`specheads train`: the program of `train/heads.py`."""

from __future__ import annotations

import typer


def train(context: typer.Context) -> None:
    """Train a draft head for a target; `specheads train --help` lists the options.

    All arguments are those of `train/heads.py`.
    """
    try:
        from ..training.heads_command import main
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'Training needs the package {error.name}: run `pip install "specheads[train]"`.') from error
    raise typer.Exit(main(context.args))
