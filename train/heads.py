"""Trains a draft head; `--help` lists the options, `train/recipes/` holds some that go together."""

from __future__ import annotations

from specheads.training.heads_command import main

if __name__ == "__main__":
    raise SystemExit(main())
