"""A command line whose flags may also stand in a YAML file, under the same words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..evaluation.prompts import InputError

CONFIG = "--config"


def parse(kinds: Sequence[type], program: str, description: str | None, arguments: Sequence[str]) -> tuple[Any, ...]:
    """Reads a command line into dataclasses.

    Args:
        kinds: The dataclasses; their fields are the flags.
        program: The command's name.
        description: What it does.
        arguments: The command line. `--config FILE` stands for the flags in the file; those beside it win.

    Returns:
        An instance of each.

    Raises:
        InputError: if the file cannot be used, or a key or a flag is not known.
        SystemExit: with help, and for a value of the wrong type.
    """
    from transformers import HfArgumentParser

    parser = HfArgumentParser(kinds, prog=program, description=description, allow_abbrev=False)
    parser.add_argument(CONFIG, metavar="FILE", help="a YAML file of these flags, without their dashes")
    file, flags = _without_config(arguments)
    known = {action.dest for action in parser._actions}
    if file is not None:
        flags = [*_flags_of(_read(file), known, file), *flags]
    _check_flags(flags, parser)
    try:
        *instances, _ = parser.parse_args_into_dataclasses(args=flags, look_for_args_file=False)
    except ValueError as error:  # what a dataclass says of its values
        raise InputError(str(error)) from error
    return tuple(instances)


def _without_config(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    flags, file = list(arguments), None
    for place, flag in enumerate(flags):
        if flag == CONFIG and place + 1 < len(flags):
            file = Path(flags[place + 1])
            del flags[place : place + 2]
            break
        if flag.startswith(f"{CONFIG}="):
            file = Path(flag.partition("=")[2])
            del flags[place]
            break
    return file, flags


def _read(file: Path) -> Mapping[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"The recipe {file} cannot be read: {' '.join(str(error).split())}.") from error
    if not isinstance(content, Mapping):
        raise InputError(f"The recipe {file} must be a mapping of flags to values.")
    return content


def _flags_of(content: Mapping[str, Any], known: set[str], file: Path) -> Iterator[str]:
    for key, value in content.items():
        if key not in known:
            raise InputError(_unknown(str(key), known, f"in the recipe {file}"))
        if value is None:
            continue
        yield f"--{key}"
        yield from ([_text(item) for item in value] if isinstance(value, list) else [_text(value)])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _check_flags(flags: Sequence[str], parser: Any) -> None:
    known = parser._option_string_actions
    for flag in flags:
        name = flag.partition("=")[0]
        if name.startswith("--") and name not in known:
            raise InputError(_unknown(name, set(known), "on the command line"))


def _unknown(name: str, known: set[str], where: str) -> str:
    near = get_close_matches(name, sorted(known), 1)
    return f"Unknown option {name!r} {where}{f'; did you mean {near[0]!r}?' if near else '; --help lists what there is.'}"
