"""Tests whether drafters leave the target's greedy text and its sampling law as they are; `--help` lists the options."""

from __future__ import annotations

from specheads.evaluation.exactness import main

if __name__ == "__main__":
    raise SystemExit(main())
