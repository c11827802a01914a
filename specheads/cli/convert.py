"""`specheads convert`: a head from one library's layout to another's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..evaluation.prompts import InputError
from . import options

OWN = "specheads"


def convert(
    head: Annotated[str, typer.Argument(help="Folder or Hub id of the head, in any layout that is known.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write; it must not hold anything yet.")],
    to: Annotated[
        str,
        typer.Option(
            help="The layout to write: specheads, speculators (vLLM), eagle3 (SGLang), eagle, vllm-medusa, medusa, medusa-v2, "
            "tgi-medusa, hydra."
        ),
    ] = OWN,
    model: options.Model = None,
    revision: options.Revision = None,
    subfolder: Annotated[str | None, typer.Option(help="The folder within the repository.")] = None,
    layer_id_convention: Annotated[
        str | None, typer.Option(help="For EAGLE-3 layer ids that leave it open: hidden_states or layer_outputs.")
    ] = None,
    d2t_encoding: Annotated[
        str | None, typer.Option(help="For EAGLE-3 draft vocabularies that leave it open: offsets or ids.")
    ] = None,
    version: Annotated[int | None, typer.Option(help="1 or 2, for EAGLE heads that do not say which they are.")] = None,
) -> None:
    """Read a head of one library and write it for another.

    The target (--model) is needed to read it: layer ids, vocabulary and shapes are checked against it.
    """
    from ..formats import EXPORTS, export_head, import_head

    if to not in (OWN, *EXPORTS):
        raise InputError(f"There is no layout {to!r}; there are {', '.join((OWN, *EXPORTS))}.")
    _check_output(output)
    if model is None:
        raise InputError("--model is missing: give the folder or Hub id of the target that the head is for.")
    from ..evaluation.bench import load_model

    given = {
        "revision": revision, "subfolder": subfolder, "layer_id_convention": layer_id_convention,
        "d2t_encoding": d2t_encoding, "version": version,
    }  # fmt: skip
    found = import_head(head, load_model(model), **{name: value for name, value in given.items() if value is not None})
    if to == OWN:
        found.save_pretrained(output)
    else:
        export_head(found, output, to)
    typer.echo(f"{found.config.facts().kind} of {found.num_parameters():,} parameters written to {output} ({to}).")


def _check_output(folder: Path) -> None:
    """Refuses, before the target is loaded, a folder that could not be written or that holds something."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        fault = "may not be written to" if nearest.is_dir() else "is a file"
        raise InputError(f"--output {folder} cannot be written, since {nearest} {fault}: name another folder.")
    if nearest == folder and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty: name a new folder, or delete it.")
