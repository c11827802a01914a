"""What the three measuring programs have in common: options in, a table, a file and perhaps a page out, and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..interruption import INTERRUPTED
from .journal import check_output
from .prompts import InputError
from .report import check_packages, write_report


def run_program(
    name: str,
    options_type: type,
    description: str,
    measure: Callable[[Any], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    arguments: Sequence[str] | None,
    status: Callable[[dict[str, Any]], int] = lambda result: 0,
) -> int:
    """Runs a program.

    Args:
        name: What it is called: that of its file in `eval/`, and of the command behind `specheads eval`.
        options_type: The dataclass of its options, `output` and `report` among them.
        description: What it does, for its help.
        measure: Measures and writes the result.
        show: Prints it.
        arguments: The command line; that of the process if `None`.
        status: The exit status that goes with a result.

    Returns:
        The exit status: 2 for input that cannot be used, 130 for an interruption.
    """
    from transformers import HfArgumentParser

    program = f"{name}.py" if arguments is None else f"specheads eval {name}"
    parser = HfArgumentParser(options_type, prog=program, description=description)
    try:
        (options,) = parser.parse_args_into_dataclasses(args=arguments)
        check_packages(options.report)
        check_output("--output", options.output)
        check_output("--report", options.report)
        result = measure(options)
    except (InputError, OSError) as error:  # the latter for an output that cannot be written
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted; the same command with --resume goes on from here.", file=sys.stderr)
        return INTERRUPTED
    show(result)
    print(f"Written to {options.output}")
    if options.report is not None:
        write_report([options.output], options.report)
        print(f"Report in {options.report}")
    return status(result)
