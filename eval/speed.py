"""Measures the speed of plain `generate` and of named variants; `--help` lists the options."""

from __future__ import annotations

from specheads.evaluation.speed import main

if __name__ == "__main__":
    raise SystemExit(main())
