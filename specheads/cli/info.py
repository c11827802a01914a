"""`specheads info`: what a head is, and whether it fits a target."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import options


def info(
    head: Annotated[str, typer.Argument(help="Folder or Hub id of a head, in any layout that is known.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Folder or Hub id of a target, to check whether the head fits it.")
    ] = None,
    revision: options.Revision = None,
    as_json: options.AsJson = False,
) -> None:
    """Say what a head is: its kind, target, size, vocabulary, training; with --model, whether it fits that target.

    The exit status is 1 if it does not fit.
    """
    from dataclasses import asdict

    from ..formats.description import check_head, describe_head

    download = {} if revision is None else {"revision": revision}
    found: dict[str, Any] = {"head": head, **describe_head(head, **download)}
    fits = True
    if model is not None:
        from ..evaluation.bench import load_target

        check = check_head(head, *load_target(model), **download)
        found["check"] = {"model": model, **asdict(check)}
        fits = check.fits
    _show(found, as_json)
    raise typer.Exit(0 if fits else 1)


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    for name, text in _lines(found):
        typer.echo(f"{name:15} {text}")


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    made_for, vocabulary = found["target"], found["vocabulary"]
    lines = [
        ("head", found["head"]),
        ("kind", found["kind"]),
        ("layout", found["layout"]),
        ("parameters", f"{found['parameters']:,}, {found['dtype']}"),
        ("vocabulary", _vocabulary(vocabulary)),
        ("target", _target(made_for)),
        ("reads", _layers(found["feature_layers"])),
        ("training", _training(found)),
        *[("measured", _measured(task)) for task in found["results"] or [] ],
        ("engines", found["engines"] or "not known without a target; `specheads convert` writes other layouts"),
    ]  # fmt: skip
    if not found["results"]:
        lines.insert(-1, ("measured", "nothing is recorded beside the weights"))
    if found.get("target_adapter"):
        lines.append(("adapter", "the head goes with an adapter of its target (Medusa-2)"))
    if "check" in found:
        check = found["check"]
        lines.append((f"fits {check['model']}", "yes" if check["fits"] else "no"))
        lines += [("", remark) for remark in check["remarks"]]
    return lines


def _vocabulary(vocabulary: dict[str, Any]) -> str:
    own, whole = vocabulary["head"], vocabulary["target"]
    if own is None or whole is None:
        return "not said in the config"
    return f"{own:,} tokens" + ("" if own == whole else f" of the target's {whole:,}")


def _target(made_for: dict[str, Any]) -> str:
    parts = [made_for.get("name_or_path") or "not named"]
    if made_for.get("revision"):
        parts.append(f"revision {made_for['revision']}")
    if made_for.get("hidden_size"):
        parts.append(f"hidden size {made_for['hidden_size']:,}")
    return ", ".join(parts)


def _layers(layers: list[int] | None) -> str:
    if not layers:
        return "not said"
    return f"hidden_states[{', '.join(map(str, layers))}] of the target"


def _training(found: dict[str, Any]) -> str:
    if found["training"] is None:
        return "no record beside the weights"
    return f"{found['training']['command']}; data: {', '.join(found['training']['datasets']) or 'not named'}"


def _measured(task: dict[str, Any]) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in task["settings"].items())
    speed = "" if task["speed_ratio"] is None else f", {task['speed_ratio']:.2f} times as fast as plain generation"
    return (
        f"{task['task']}, {task['prompts']} prompts: {task['mean_acceptance_length']:.2f} tokens per round{speed}"
        f"{f' ({settings})' if settings else ''}"
    )
