"""The command, as the script `specheads` and as `python -m specheads`."""

from __future__ import annotations

from .interruption import leave_quietly_while_importing


def main() -> int:
    """Runs the command with the arguments of the process; see `specheads.cli.main`."""
    leave_quietly_while_importing()
    from .cli import main as run

    return run()


if __name__ == "__main__":
    raise SystemExit(main())
